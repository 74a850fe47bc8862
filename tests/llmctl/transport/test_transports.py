"""One suite for all transports: LocalTransport and an agent behind a pipe behave alike."""

import errno
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from llmctl.errors import ProgramMissing, RecordError, SchedulerError
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, new_folder, write_files
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import identify, is_alive
from llmctl.transport.ssh.agent_program import append
from tests.llmctl.transport.agents import PipeRoute, agent
from tests.waiting import HANG_S, wait_for


@pytest.fixture(params=["local", "agent"])
def transport(request):
    made = LocalTransport(dict(os.environ)) if request.param == "local" else agent(PipeRoute())
    yield made
    made.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_commands_have_input_folder_variables_and_any_exit_status(transport, tmp_path):
    script = "cat; pwd; printf '%s' \"$WORD\"; echo note >&2; exit 3"
    done = transport.run(
        ["sh", "-c", script], timeout_s=HANG_S, cwd=str(tmp_path), env={"WORD": "a 'b'\n\"$c\""}, stdin=b"in\n"
    )
    assert (done.exit_status, done.stdout, done.stderr) == (3, f"in\n{tmp_path}\na 'b'\n\"$c\"", "note\n")


def test_arguments_arrive_byte_for_byte(transport):
    words = ["", "-n", "a b", "'", '"', "$(id)", "`id`", "\\", "!x", "ü", os.fsdecode(b"\xff\xfe"), "a\nb"]
    done = transport.run(
        [sys.executable, "-c", "import os,sys; print([os.fsencode(w) for w in sys.argv[1:]])", *words], timeout_s=HANG_S
    )
    assert done.stdout == f"{[os.fsencode(word) for word in words]}\n"


def test_variables_of_a_login_shell(tmp_path, monkeypatch):
    values = {"SCRATCH": "/scratch/a b\n'c'", "EMPTY": "", "N": "-n"}
    (tmp_path / ".profile").write_text("export FROM_PROFILE=/of/the/profile; NOT_EXPORTED=1\n")
    for name, value in {**values, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    asked = ["N", "SCRATCH", "EMPTY", "UNSET_ONE"]
    for transport in (LocalTransport(dict(os.environ)), agent(PipeRoute())):
        assert transport.variables(asked) == {"N": "-n", "SCRATCH": values["SCRATCH"]}
        assert transport.variables([]) == {}
        if transport.is_remote:
            assert transport.variables(["FROM_PROFILE", "NOT_EXPORTED"]) == {"FROM_PROFILE": "/of/the/profile"}
        transport.close()


def test_an_end_by_signal_and_bytes_that_are_not_text(transport):
    done = transport.run(["sh", "-c", r"printf '\377x'; kill -9 $$"], timeout_s=HANG_S)
    assert (done.exit_status, done.stdout) == (-9, "\ufffdx")


def test_no_process_of_a_timed_out_command_is_left(transport, tmp_path):
    pid_file, limit_s = tmp_path / "pid", 0.25
    # On a busy machine the time may be over before the command begins.
    while not pid_file.exists() or not pid_file.read_text():
        limit_s *= 2
        with pytest.raises(SchedulerError, match=f"sh: no answer within {limit_s:g} s") as caught:
            transport.run(["sh", "-c", f"sleep 1000 & echo $! >{pid_file}; wait"], timeout_s=limit_s)
        assert caught.value.transient
    wait_for(lambda: identify(int(pid_file.read_text())) is None, "the end of the command's child")


def test_a_missing_command(transport):
    with pytest.raises(SchedulerError, match="no-such-command: cannot be started: No such file") as caught:
        transport.run(["no-such-command"], timeout_s=5)
    assert (caught.value.transient, caught.value.exit_status) == (False, None)


def test_a_detached_command_outlives_the_transport(transport, tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    identity = transport.start_detached(
        ["sh", "-c", "echo $PPID $LLMCTL_RUN_DIR; until [ -e go ]; do sleep 0.05; done; echo done"],
        cwd=str(tmp_path),
        log=str(log),
    )
    transport.close()
    assert is_alive(identity)
    (tmp_path / "go").touch()
    wait_for(lambda: log.read_text().endswith("done\n"), "the last line")
    assert log.read_text().startswith("before\n")


def test_file_parts_and_folder_names(transport, tmp_path):
    (tmp_path / "b").write_bytes(b"0123456789\xff")
    (tmp_path / "a").mkdir()
    path = str(tmp_path / "b")
    assert transport.read_parts(
        [FileRead(path, 3, 4), FileRead(path, -2), FileRead(path, 99), FileRead(f"{path}x")]
    ) == [
        FilePart(b"3456", 3, 11),
        FilePart(b"9\xff", 9, 11),
        FilePart(b"", 11, 11),
        None,
    ]
    assert transport.list_names([str(tmp_path), f"{path}x"]) == [["a", "b"], []]


def test_many_large_file_parts(transport, tmp_path):
    content = os.urandom(1 << 20)
    reads = []
    for rank in range(70):
        (tmp_path / str(rank)).write_bytes(content[rank:])
        reads.append(FileRead(str(tmp_path / str(rank))))
    assert [part.data for part in transport.read_parts(reads)] == [content[rank:] for rank in range(70)]


def test_files_are_written_whole_with_their_mode(transport, tmp_path):
    path = tmp_path / "new" / os.fsdecode(b"n\xffme")
    transport.write_files([FileWrite(str(path), b"\0\xff", 0o700), FileWrite(str(tmp_path / "b"), b"")])
    assert path.read_bytes() == b"\0\xff"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    assert names(path.parent) == [path.name]


def test_a_file_is_its_owners_alone_until_it_has_its_mode(tmp_path, monkeypatch):
    """A secret on its way must not be readable, not even for an instant, nor its folder."""
    seen, set_mode = [], os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda file, mode: (seen.append(os.fstat(file).st_mode), set_mode(file, mode)))
    before = os.umask(0)
    try:
        write_files([FileWrite(str(tmp_path / "new/a"), b"s3cret"), FileWrite(str(tmp_path / "b"), b"", 0o644)])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in seen] == [0o600, 0o600]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"new": 0o700, "a": 0o600, "b": 0o644}


def test_errors_have_number_text_and_file(transport, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        transport.make_folder(str(tmp_path / "file" / "x" / "y"))
    error = caught.value.errno, caught.value.strerror, str(caught.value.filename)
    assert error == (errno.ENOTDIR, "Not a directory", str(tmp_path / "file" / "x"))
    transport.make_folder(str(tmp_path / "one"), mode=0o700, exclusive=True)
    with pytest.raises(FileExistsError):
        transport.make_folder(str(tmp_path / "one"), exclusive=True)
    transport.make_folder(str(tmp_path / "one"))


def test_facts_links_and_removing(transport, tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    transport.link({str(tmp_path / "link"): "folder"})
    transport.link({str(tmp_path / "link"): "folder/inner"})
    assert (tmp_path / "link").readlink() == Path("folder/inner")
    facts = transport.stat_paths([str(tmp_path / "folder"), str(tmp_path / "none" / "below")])
    assert [(one.kind, one.nearest, one.nearest_kind) for one in facts] == [
        ("folder", str(tmp_path / "folder"), "folder"),
        ("", str(tmp_path), "folder"),
    ]
    assert facts[0].can_write and facts[0].free_bytes > 0
    transport.remove([str(tmp_path / "link"), str(tmp_path / "folder"), str(tmp_path / "none")])
    assert names(tmp_path) == []


def test_a_tree_is_written_whole_and_never_over_another(transport, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "run").write_bytes(b"#!\n" * 3_000_000)
    (source / "run").chmod(0o755)
    (source / "plain").write_text("x")
    target = tmp_path / "deep" / "target"
    transport.put_tree(str(target), {"a/run": source / "run", "plain": source / "plain"})
    assert (target / "a" / "run").read_bytes() == b"#!\n" * 3_000_000
    assert stat.S_IMODE((target / "a" / "run").stat().st_mode) == 0o755
    assert names(target.parent) == ["target"]
    transport.put_tree(str(target), {"other": source / "plain"})
    assert names(target) == ["a", "plain"]
    with pytest.raises(FileNotFoundError):
        transport.put_tree(str(tmp_path / "deep" / "second"), {"a": source / "plain", "b": source / "none"})
    assert names(target.parent) == ["target"]


def test_a_lock_is_held_once(transport, tmp_path):
    path = str(tmp_path / ".lock")
    with transport.lock(path):
        held = pytest.raises(RecordError, match=f"{tmp_path.name} is being resumed or cancelled")
        with held, LocalTransport({}).lock(path):
            pass
        assert transport.list_names([str(tmp_path)]) == [[".lock"]]
    with LocalTransport({}).lock(path), pytest.raises(RecordError), transport.lock(path):
        pass
    with pytest.raises(RecordError, match="cannot be written"), transport.lock(str(tmp_path / "none" / ".lock")):
        pass


def test_processes_of_a_run(transport, tmp_path):
    run_dir = str(tmp_path / "run")
    leader = transport.start_detached(
        ["env", f"LLMCTL_RUN_DIR={run_dir}", "sleep", "6000"], cwd=str(tmp_path), log=str(tmp_path / "log")
    )
    wait_for(lambda: transport.processes_of_run(run_dir, []) == [leader], "the run's process")
    report = transport.inspect_processes([leader])
    assert (report.host, report.alive) == (os.uname().nodename, (True,))
    assert transport.end_run(run_dir, [leader], grace_s=1e6) == []
    assert transport.inspect_processes([leader]).alive == (False,)


def test_the_home_directory(transport):
    assert transport.home() == str(Path.home())


def test_missing_space_names_the_destination(tmp_path):
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(OSError, match="No space left on device") as caught, new_folder(str(tmp_path / "code")):
        shutil.copy(tmp_path / "source", "/dev/full")
    assert caught.value.filename == str(tmp_path / "code")
    with pytest.raises(OSError, match="No space left on device") as caught:
        append("/dev/full", b"x")
    assert caught.value.filename == "/dev/full"


def test_a_program_that_cannot_be_run_is_told_from_other_errors(transport, tmp_path):
    (tmp_path / "plain").write_text("")
    for program in ("no-such-program", str(tmp_path / "plain"), str(tmp_path / "plain" / "below")):
        with pytest.raises(ProgramMissing, match="cannot be started"):
            transport.run([program], timeout_s=HANG_S)
    with pytest.raises(SchedulerError, match="cannot be started: Argument list too long") as caught:
        transport.run(["true", "x" * (1 << 22)], timeout_s=HANG_S)
    assert not isinstance(caught.value, ProgramMissing)


def test_only_secrets_of_runs_that_are_gone_are_removed(transport, tmp_path):
    root = tmp_path / "runs"
    own, _ = transport.make_own_folder(str(root))
    secrets, other = root / own / "secrets", tmp_path / "other"
    for folder in (secrets, other):
        folder.mkdir(mode=0o700)
    for run in ("here", "here.2"):
        (root / run).mkdir()
    (root / "dangling").symlink_to(tmp_path / "absent")
    (other / "gone.1").touch()
    kept = ["here.1", "here.2.7", "dangling.1", ".here.1.0123456789ab", "notes", ".hidden", "gone.x", "folder.1"]
    left = ["gone.1", "gone.2.12", ".gone.1.123456789012", "link.1"]
    for name in (*kept, *left):
        (secrets / name).touch()
    (secrets / "folder.1").unlink()
    (secrets / "folder.1").mkdir()
    (secrets / "link.1").unlink()
    (secrets / "link.1").symlink_to(other / "gone.1")
    transport.make_own_folder(str(root))
    assert names(secrets) == sorted(kept)
    shutil.rmtree(secrets)
    secrets.symlink_to(other)
    transport.make_own_folder(str(root))
    assert names(other) == ["gone.1"]
