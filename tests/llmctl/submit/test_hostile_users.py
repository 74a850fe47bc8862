"""A folder of runs that several users share, some of them hostile: alice attacks, bob and carol run jobs.

Needs root, which becomes the users. They have numbers that no machine gives to its users, and no names.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.testbeds.hostile_users import LAB, ROOTS, UMASKS, USERS, plant_supervisor, swap_run
from tests.waiting import HANG_S, wait_for

ALICE, BOB, CAROL = USERS.values()
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


@dataclass(frozen=True)
class Shared:
    """A folder of runs, and a home of each user beside it."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    def environ(self, uid: int) -> dict[str, str]:
        home = self.folder / f"home-{uid}"
        # The supervisor runs on the python3 of the PATH; a job does not see root's Python.
        return {"HOME": str(home), "PATH": "/usr/bin:/bin", "LLMCTL_RUNS_ROOT": str(self.root)}

    def llmctl(self, uid: int, *arguments: str, umask: int = 0o022) -> tuple[int, str]:
        """Run a command of llmctl as a user; its exit code and its output."""
        with tempfile.TemporaryFile("w+") as output:

            def call() -> int:
                with redirect_stdout(output), redirect_stderr(output):
                    code = main(list(arguments), self.environ(uid))
                output.flush()
                return code

            code = as_user(uid, call, self.folder / f"home-{uid}", umask)
            output.seek(0)
            return code, output.read()

    def submit(self, uid: int, name: str, *, umask: int = 0o022) -> Path:
        """Submit a job that writes its user's number to a file, and wait for its end."""
        witness = self.folder / f"home-{uid}" / name
        command = f"id -u >> {witness}"
        code, output = self.llmctl(uid, "submit", "--run-id", name, "--", "bash", "-c", command, umask=umask)
        assert code == 0, output
        wait_for((self.root / name / "attempts/1/exit.json").exists, "the end of the job")
        return self.root / name

    def ran_as(self, uid: int, name: str) -> list[str]:
        """Lines that the jobs of a user have written."""
        witness = self.folder / f"home-{uid}" / name
        return witness.read_text().split() if witness.exists() else []

    def start_again(self, uid: int, script: str) -> "subprocess.CompletedProcess[str]":
        """Run a scheduler's own copy of job.sh, as after a wait or a requeue."""
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as spooled:
            spooled.write(script)
            spooled.flush()
            os.chmod(spooled.name, 0o755)  # noqa: PTH101
            return subprocess.run(
                ["setpriv", f"--reuid={uid}", f"--regid={LAB}", "--clear-groups", "bash", spooled.name],
                env=self.environ(uid), cwd="/", capture_output=True, text=True, timeout=HANG_S, check=False,
            )  # fmt: skip


def as_user(uid: int, call: Callable[[], int], cwd: Path, umask: int) -> int:
    """Exit code of a call in a process of its own, as a user of the group."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([LAB])
            os.setgid(LAB)
            os.setuid(uid)
            os.umask(umask)
            os.chdir(cwd)
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_alice(act: Callable[[], object]) -> None:
    """Do something as alice, which must be possible for her."""

    def call() -> int:
        act()
        return 0

    assert as_user(ALICE, call, Path("/"), 0o022) == 0


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what the commands need, once: users may not be able to read root's Python."""
    folder = tmp_path_factory.mktemp("root")
    environ = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "LLMCTL_RUNS_ROOT": f"{folder}/runs"}
    assert main(["submit", "--run-id", "warm", "--", "true"], environ) == 0
    for attempt, command in enumerate((["resume", "warm"], ["status", "warm"]), 1):
        wait_for((folder / f"runs/warm/attempts/{attempt}/exit.json").exists, f"the end of attempt {attempt}")
        assert main(command, environ) == 0
    for command in (["interactive", "--run", "warm", "--", "true"], ["cancel", "warm"]):
        assert main(command, environ) in (0, 5)


@pytest.fixture
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(prefix="llmctl-users-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        for uid in (ALICE, BOB, CAROL):
            home = Path(folder, f"home-{uid}")
            home.mkdir(mode=0o700)
            os.chown(home, uid, LAB)
        yield Shared(Path(folder))
        for uid in (ALICE, BOB, CAROL):
            # Locks of the users' jobs on their ports.
            shutil.rmtree(f"/tmp/llmctl-ports-{uid}", ignore_errors=True)


def make_root(shared: Shared, owner: int, mode: int) -> None:
    shared.root.mkdir()
    os.chown(shared.root, owner, LAB)
    shared.root.chmod(mode)


def make_root_of(shared: Shared, kind: str, umask: int) -> None:
    """Make a folder of runs of a kind; a run of its owner sets a missing sticky bit."""
    owner, mode = ROOTS[kind]
    make_root(shared, USERS[owner], mode)
    shared.submit(USERS[owner], "first", umask=umask)
    assert shared.root.stat().st_mode & 0o1000 or kind == "0700"


def attack(kind: str, umask: int, script: str) -> bool:
    """Run a script of alice; False if bob has the folder of runs alone, so that she cannot do anything."""
    done = subprocess.run(
        ["setpriv", f"--reuid={ALICE}", f"--regid={LAB}", "--clear-groups", "bash", "-c", script],
        cwd="/", umask=umask, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    if kind == "0700":
        assert done.returncode != 0 and "Permission denied" in done.stderr, done
        return False
    assert done.returncode == 0, done
    return True


def every_place(test: Callable[..., None]) -> Callable[..., None]:
    """A test for every kind of a folder of runs and every umask."""
    test = pytest.mark.parametrize("umask", UMASKS, ids="umask-{:03o}".format)(test)
    return pytest.mark.parametrize("kind", ROOTS)(test)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=["022", "077", "002"])
@pytest.mark.parametrize(
    ("owner", "mode"), [(0, 0o1777), (0, 0o3775), (ALICE, 0o3775), (BOB, 0o700)], ids=["1777", "3775", "alice's", "own"]
)
def test_ordinary_users_share_a_folder_of_runs(shared, owner, mode, umask):
    make_root(shared, owner, mode)
    users = (BOB,) if mode == 0o700 else (ALICE, BOB, CAROL)
    for uid in users:
        run_dir = shared.submit(uid, f"run-{uid}", umask=umask)
        assert shared.ran_as(uid, run_dir.name) == [str(uid)]
        assert shared.llmctl(uid, "resume", run_dir.name, umask=umask)[0] == 0
        wait_for((run_dir / "attempts/2/exit.json").exists, "the end of the second attempt")
        code, output = shared.llmctl(uid, "status", run_dir.name)
        assert (code, "completed" in output) == (0, True), output
    if BOB in users and ALICE in users:
        # A run is private until its owner opens it.
        bobs = shared.root / f"run-{BOB}"
        bobs.chmod(0o755)
        (bobs / "run.json").chmod(0o644)
        shared.llmctl(CAROL, "status", "--cluster", "local")
        code, output = shared.llmctl(CAROL, "status", bobs.name)
        assert (code, f"a run of user {BOB}" in output) == (0, True), output
        code, output = shared.llmctl(CAROL, "resume", bobs.name)
        assert code == 5 and f"{bobs} belongs to user {BOB}, not to you" in output


@pytest.mark.parametrize("mode", [0o2775, 0o777])
def test_a_root_in_which_others_can_rename_is_refused_or_repaired(shared, mode):
    make_root(shared, ALICE, mode)
    code, output = shared.llmctl(BOB, "submit", "--", "true")
    assert code == 3
    assert f"{shared.root} has no sticky bit" in output and f"Ask user {ALICE} for: chmod +t {shared.root}" in output
    assert list(shared.root.iterdir()) == []
    code, output = shared.llmctl(ALICE, "submit", "--run-id", "hers", "--", "true")
    assert (code, f"{shared.root} now has the sticky bit" in output) == (0, True), output
    assert shared.root.stat().st_mode & 0o7777 == mode | 0o1000
    shared.submit(BOB, "his")


@every_place
def test_code_of_another_user_is_not_run_by_a_job_that_waited(shared, kind, umask):
    make_root_of(shared, kind, umask)
    run_dir, planted = shared.submit(BOB, "waits", umask=umask), shared.folder / f"home-{ALICE}/ran"
    own = shared.root / f".llmctl-{BOB}"
    address = (run_dir / "code/supervisor").resolve().parent.name
    shared.folder.joinpath(f"home-{ALICE}").chmod(0o755)
    if not attack(kind, umask, plant_supervisor(own, address, planted)):
        return
    done = shared.start_again(BOB, (run_dir / "job.sh").read_text())
    assert done.returncode == 1
    assert f"is of {ALICE}" in done.stderr or f"belongs to user {ALICE}" in done.stderr, done.stderr
    assert planted.read_text() == ""
    assert not (run_dir / "attempts/2").exists()
    code, output = shared.llmctl(BOB, "submit", "--", "true", umask=umask)
    assert code == 3 and str(own) in output and f"belongs to user {ALICE}" in output


def test_a_folder_that_alice_made_first_is_refused(shared):
    make_root(shared, 0, 0o1777)
    own = shared.root / f".llmctl-{BOB}"
    as_alice(lambda: own.mkdir(mode=0o777))
    code, output = shared.llmctl(BOB, "submit", "--", "true")
    assert code == 3 and f"{own} belongs to user {ALICE}" in output, output
    own.rmdir()
    own.symlink_to(f"home-{ALICE}")
    code, output = shared.llmctl(BOB, "submit", "--", "true")
    assert code == 3 and str(own) in output, output


@every_place
def test_a_run_that_alice_put_in_the_place_of_bobs_is_neither_resumed_nor_believed(shared, kind, umask):
    make_root_of(shared, kind, umask)
    run_dir = shared.submit(BOB, "demo", umask=umask)
    if kind != "0700":
        shared.submit(ALICE, "hers", umask=umask)
    if not attack(kind, umask, swap_run(shared.root / "hers", run_dir)):
        return
    code, output = shared.llmctl(BOB, "resume", "demo", umask=umask)
    assert code == 5 and f"{run_dir} belongs to user {ALICE}, not to you" in output, output
    code, output = shared.llmctl(BOB, "status", "demo")
    assert f"a run of user {ALICE}" in output, output
    code, output = shared.llmctl(BOB, "interactive", "--run", "demo", "--", "true")
    assert code == 5 and f"belongs to user {ALICE}" in output, output
    code, output = shared.llmctl(BOB, "cancel", "demo")
    assert code == 5 and f"belongs to user {ALICE}" in output, output
    assert shared.ran_as(BOB, "demo") == [str(BOB)]


def test_another_of_bobs_runs_in_the_place_of_one_is_refused(shared):
    """A rename gives the folder no other owner."""
    make_root(shared, ALICE, 0o1777)
    old, new = shared.submit(BOB, "old"), shared.submit(BOB, "new")
    script = (new / "job.sh").read_text()

    def attack() -> None:
        new.rename(new.with_name("away"))
        old.rename(new)

    as_alice(attack)
    code, output = shared.llmctl(BOB, "resume", "new")
    assert code == 5 and "holds the record of another run, old" in output, output
    done = shared.start_again(BOB, script)
    assert done.returncode == 1 and "job.json is of another run, old" in done.stderr, done.stderr


def test_a_group_that_may_read_a_run_cannot_add_or_replace_its_attempts(shared):
    make_root(shared, 0, 0o3775)
    run_dir = shared.submit(BOB, "demo", umask=0o002)
    run_dir.chmod(0o755)
    for act in ("mkdir {0}/2", "ln -s /x {0}/1/.exit.json", "rm -f {0}/1/exit.json", "echo >>{0}/1/exit.json"):
        done = subprocess.run(
            ["setpriv", f"--reuid={ALICE}", f"--regid={LAB}", "--clear-groups", "sh", "-c",
             act.format(run_dir / "attempts")],
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and "ermission denied" in done.stderr, (act, done)


def test_a_pipe_in_the_place_of_a_record_keeps_nobody_waiting(shared):
    make_root(shared, 0, 0o1777)

    def attack() -> None:
        (shared.root / "trap").mkdir()
        os.mkfifo(shared.root / "trap/run.json", 0o666)

    as_alice(attack)
    code, output = shared.llmctl(BOB, "status", "--cluster", "local")
    assert code == 0, output


def test_a_hard_link_to_bobs_file_gives_alice_nothing(shared):
    make_root(shared, 0, 0o1777)
    run_dir = shared.submit(BOB, "demo")
    shutil.copytree(run_dir, shared.root / "trap", symlinks=True)
    for path in (shared.root / "trap", *(shared.root / "trap").rglob("*")):
        os.chown(path, ALICE, LAB, follow_symlinks=False)
    # As root: the kernel keeps alice from it (proc_sys_fs(5), protected_hardlinks).
    (shared.root / "trap/run.json").unlink()
    os.link(run_dir / "run.json", shared.root / "trap/run.json")
    run_dir.rename(shared.root / "away")
    (shared.root / "trap").rename(run_dir)
    run_dir.chmod(0o755)
    code, output = shared.llmctl(BOB, "resume", "demo")
    assert code == 5 and f"{run_dir} belongs to user {ALICE}" in output, output
