"""Machines behind ssh, without a network: commands, refused jobs, and several transports in a group."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends.base import JobRequest
from llmctl.backends.ssh import BACKEND
from llmctl.errors import SchedulerError
from llmctl.paths import UserFolders
from llmctl.runs.record import Submission
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.check_job import job_problems
from llmctl.submit.checks.hosts import check_hosts_answer, resume_problems
from llmctl.submit.decide import build_request
from llmctl.submit.job import Job
from llmctl.submit.render import render
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.host_group import HostGroup
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import make_run
from tests.llmctl.scripts.script_cases import job_of
from trainer.planning.build_config import build_config

PROFILE = ClusterProfile(name="lab", scheduler="ssh", hosts=("g1", "me@g2", "g3"), runs_root="/runs")
REQUEST = JobRequest(PROFILE, job_name="r", run_dir="/runs/r", nodes=2, hosts=("g1", "me@g2"))
CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
    "training": {"train_iters": 12, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}


class TransportBelow(LocalTransport):
    """Fake host: a transport with paths below a separate folder; can be unreachable."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"HOME": "/home/me"})
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "problem", None)

    def _below(self, path: str) -> str:
        if self.problem is not None:
            raise self.problem
        return f"{self.folder}{path}"

    def home(self):
        return self._below("").removeprefix(str(self.folder)) or "/home/me"

    def read_parts(self, reads):
        return super().read_parts([replace(read, path=self._below(read.path)) for read in reads])

    def list_names(self, directories):
        return super().list_names([self._below(path) for path in directories])

    def write_files(self, files):
        super().write_files([replace(file, path=self._below(file.path)) for file in files])

    def make_folder(self, path, *, mode=0o777, exclusive=False):
        super().make_folder(self._below(path), mode=mode, exclusive=exclusive)

    def remove(self, paths):
        super().remove([self._below(path) for path in paths])


@pytest.fixture
def transport(tmp_path):
    return {host: TransportBelow(tmp_path / host) for host in PROFILE.hosts}


def cut_off(transport: TransportBelow, *, transient: bool = True, words: str = "no answer") -> None:
    object.__setattr__(transport, "problem", SchedulerError(f"{transport.folder.name}: {words}", transient=transient))


def test_one_command_per_host_and_one_for_mpirun():
    commands = BACKEND.submit_commands(REQUEST)
    assert [(command.host, command.argv) for command in commands] == [
        ("g1", ("bash", "/runs/r/job.sh", "0")),
        ("me@g2", ("bash", "/runs/r/job.sh", "1")),
    ]
    (only,) = BACKEND.submit_commands(replace(REQUEST, launcher="mpirun"))
    assert (only.host, only.argv) == ("g1", ("bash", "/runs/r/job.sh"))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize("command", [(), ("echo", "$(touch pwned)")])
def test_the_script_is_bash(shared, launcher, command, tmp_path):
    profile = PROFILE.model_copy(update={"shared": shared})
    places = {"python": "python3", "working_dir": Path("/tmp"), "secrets_file": Path("/home/me/a secret")}
    request = replace(REQUEST, profile=profile, launcher=launcher)
    folders = UserFolders.from_environment({"HOME": str(tmp_path)})
    job = render(job_of(JobSpec(name="r", nodes=2, command=command), request, folders=folders, **places))
    assert subprocess.run(["bash", "-n"], input=job.script, text=True, check=False).returncode == 0
    if shutil.which("shellcheck"):
        checked = ["shellcheck", "-s", "bash", "-S", "error", "-"]
        done = subprocess.run(checked, input=job.script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def problems_of(job, config=None, **changes):
    """Texts of the problems of a job on the hosts of PROFILE with these keys changed."""
    profile = PROFILE.model_copy(update=changes)
    request = build_request(job, profile, BACKEND, name="r", run_dir="/runs/r")
    folders = UserFolders.from_environment({"HOME": "/home/me"})
    asked = Job(
        spec=job,
        config=config,
        folders=folders,
        is_remote=True,
        backend=BACKEND,
        request=request,
        python="python3",
    )
    return [f"{problem.key} {problem.text}" for problem in job_problems(asked)]


def test_too_many_nodes_and_unshared_checkpoints_are_refused():
    one, two, four = (JobSpec(name="r", nodes=nodes) for nodes in (1, 2, 4))
    config = build_config(CONFIG)
    assert problems_of(four) == ["job.nodes 4 is above 3, the hosts of lab; lower it"]
    assert problems_of(one, hosts=("g1", "g1")) == ["hosts g1 is listed twice; each machine is one node"]
    (message,) = problems_of(two, config, shared=False)
    assert message.startswith("checkpoint.save is unset: ") and "share no runs_root" in message
    assert problems_of(one, config, shared=False) == []
    assert problems_of(two, shared=False) == []
    assert problems_of(two, config) == []


def test_the_first_hosts_that_are_not_excluded_are_used():
    job = JobSpec(name="r", nodes=2, exclude=("me@g2",))
    request = build_request(job, PROFILE, BACKEND, name="r", run_dir="/runs/r")
    assert request.hosts == ("g1", "g3")
    assert [(one.host, one.argv[-1]) for one in BACKEND.submit_commands(request)] == [("g1", "0"), ("g3", "1")]
    assert problems_of(job) == []
    (message,) = problems_of(replace(job, exclude=("g2",)))
    assert message == "job.exclude g2: lab has no such host; there are g1, me@g2, g3"
    (message,) = problems_of(replace(job, exclude=("g1", "g3")))
    assert message == "job.exclude leaves 1 of the 3 hosts of lab for 2 nodes; exclude fewer, or lower nodes"
    restarting = replace(job, max_restarts=2)
    assert problems_of(restarting) == []
    (message,) = problems_of(restarting, shared=False)
    assert message.startswith(
        "job.max_restarts is not possible on 2 machines that share no files (shared: false in lab)"
    )
    assert problems_of(replace(restarting, nodes=1), shared=False) == []
    assert problems_of(replace(restarting, launcher="mpirun"), shared=False) == []


def asked_for(job, **changes):
    profile = PROFILE.model_copy(update=changes)
    request = build_request(job, profile, BACKEND, name="r", run_dir="/runs/r")
    folders = UserFolders.from_environment({"HOME": "/home/me"})
    return Job(spec=job, folders=folders, is_remote=True, backend=BACKEND, request=request)


def test_the_refusal_of_a_dead_host_names_the_flag_that_leaves_it_out(transport):
    group = HostGroup(transport, shared=True, runs_root="/runs")
    two = JobSpec(name="r", nodes=2)
    check_hosts_answer(asked_for(two), group)
    cut_off(transport["g1"])
    with pytest.raises(SchedulerError) as refused:
        check_hosts_answer(asked_for(two), group)
    assert refused.value.message.startswith("g1: no answer\nleave it out: --exclude g1 (")
    check_hosts_answer(asked_for(replace(two, exclude=("g1",))), group)
    cut_off(transport["me@g2"])
    with pytest.raises(SchedulerError) as refused:
        check_hosts_answer(asked_for(replace(two, exclude=("g1",))), group)
    assert "\nleave it out: --exclude g1,me@g2 --nodes 1 (" in refused.value.message
    cut_off(transport["g3"])
    with pytest.raises(SchedulerError) as refused:
        check_hosts_answer(asked_for(two), group)
    assert "--exclude" not in refused.value.message


def test_hosts_without_the_files_of_a_run_cannot_resume_it(tmp_path):
    submission = Submission(1, 0.0, hosts=("g1", "me@g2"))
    record = replace(make_run(tmp_path).record, submissions=(submission,))
    two = JobSpec(name="r", nodes=2)
    for changes, exclude, is_refused in (
        ({"shared": True}, ("me@g2",), False),
        ({"shared": False}, (), False),
        ({"shared": False}, ("me@g2",), True),
    ):
        problems = list(resume_problems(record, asked_for(replace(two, exclude=exclude), **changes)))
        assert bool(problems) == is_refused
    one = replace(two, nodes=1)
    assert list(resume_problems(record, asked_for(one, shared=False))) == []
    (problem,) = resume_problems(record, asked_for(replace(one, exclude=("g1",)), shared=False))
    assert "its record on g1" in problem.text


def test_without_a_shared_folder_all_hosts_write_and_the_first_copy_is_read(transport):
    group = HostGroup(transport, shared=False, runs_root="/runs")
    group.write_files([FileWrite("/runs/r/run.json", b"{}")])
    transport["g3"].write_files([FileWrite("/runs/r/rank-00002.log", b"two")])
    assert [part.data for part in group.read_parts([FileRead("/runs/r/rank-00002.log")])] == [b"two"]
    assert group.list_names(["/runs/r"]) == [["rank-00002.log", "run.json"]]
    cut_off(transport["g3"])
    assert group.read_parts([FileRead("/runs/r/rank-00002.log")]) == [None]
    assert group.list_names(["/runs/r"]) == [["run.json"]]
    with pytest.raises(SchedulerError, match="g3: no answer") as failure:
        group.write_files([FileWrite("/runs/r/run.json", b"[]")])
    assert failure.value.transient
    assert group.only(["g1", "me@g2"]).list_names(["/runs"]) == [["r"]]


def test_a_folder_that_exists_on_one_host_is_made_on_none(transport, tmp_path):
    transport["g3"].make_folder("/runs/r")
    with pytest.raises(FileExistsError):
        HostGroup(transport, shared=False, runs_root="/runs").make_folder("/runs/r", exclusive=True)
    assert [(tmp_path / host / "runs/r").exists() for host in transport] == [False, False, True]


def test_shared_files_are_read_through_any_reachable_host_unless_refused(transport, capsys):
    for host in transport:
        transport[host].write_files([FileWrite("/runs/x", host.encode())])
    group = HostGroup(transport, shared=True, runs_root="/runs")
    assert group.read_parts([FileRead("/runs/x")])[0].data == b"g1"
    cut_off(transport["g1"], words="no answer\x1b[2J")
    assert group.read_parts([FileRead("/runs/x")])[0].data == b"me@g2"
    assert "llmctl: g1: no answer; continuing through me@g2" in capsys.readouterr().err
    group.write_files([FileWrite("/runs/y", b"")])
    assert [bool(transport[host].list_names(["/runs"])[0].count("y")) for host in ("me@g2", "g3")] == [True, False]
    with pytest.raises(SchedulerError, match="g1: no answer"):  # files outside the shared folder go to every host
        group.write_files([FileWrite("/home/me/secret", b"")])
    refusing = HostGroup(transport, shared=True, runs_root="/runs")
    cut_off(transport["g1"], transient=False)
    with pytest.raises(SchedulerError, match="g1: no answer"):
        refusing.read_parts([FileRead("/runs/x")])


@pytest.mark.parametrize(("runs_root", "folder"), [("$POOL/runs", "/pool/a/runs"), ("~/runs", "/home/me/runs")])
def test_the_shared_folder_may_have_a_variable_or_the_home_directory(runs_root, folder, transport):
    for host in transport.values():
        host.environment["POOL"] = "/pool/a"
    group = HostGroup(transport, shared=True, runs_root=runs_root)
    group.write_files([FileWrite(f"{folder}/x", b""), FileWrite("/elsewhere/x", b"")])
    assert [host.list_names([folder, "/elsewhere"]) for host in transport.values()] == [
        [["x"], ["x"]], [[], ["x"]], [[], ["x"]]
    ]  # fmt: skip


def test_hosts_are_found_by_their_own_name(transport):
    own = transport["g1"].inspect_processes([])
    group = HostGroup(transport, shared=True, runs_root="/runs")
    assert group.inspect_processes([]).boot_id == own.boot_id
    assert group.called(own.host).host == "this machine"
    with pytest.raises(SchedulerError, match="has the host name nobody"):
        group.called("nobody")
