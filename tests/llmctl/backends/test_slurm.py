"""Slurm backend, tested on recorded output of Slurm (tests/recorded/slurm)."""

import subprocess
from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.backends.base import JobRequest
from llmctl.backends.slurm.backend import SlurmBackend
from llmctl.backends.slurm.nodes import node_state
from llmctl.backends.slurm.words import REASONS, STATES, expand_hosts, in_words
from llmctl.cli.main import main
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.site.container import ContainerPlan
from llmctl.site.job import parse_nodes
from llmctl.site.profile import ClusterProfile
from llmctl.transport.protocol import program_of
from tests.llmctl.backends.job_requests import request_for
from tests.waiting import HANG_S

RECORDED = Path(__file__).parents[2] / "recorded" / "slurm"
BACKEND = SlurmBackend()


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def request_of(profile: dict[str, object] | None = None, **asked: object) -> JobRequest:
    whole = {"gpu": {"gpus": 8, "cores": 96, "gpu_type": "h100"}, "part": {"fraction": True, "memory_gib": 60.5}}
    values = {"name": "site", "scheduler": "slurm", "resource_types": whole, **(profile or {})}
    return request_for(ClusterProfile(**values), job_name="x-1", run_dir="/runs/x-1", **asked)  # type: ignore[arg-type]


def test_the_backend_is_registered_by_name() -> None:
    assert load_queue_backend("slurm") == BACKEND


# --- Requests


def test_whole_nodes_are_requested_exclusively() -> None:
    asked = request_of(nodes=4, ranks_per_node=8, gpus_per_node=8, cores_per_node=96, resource_type="gpu", time_s=3600)
    lines = BACKEND.directives(asked)
    for line in ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=96", "--gpus-per-node=h100:8"):
        assert line in lines
    assert {"--exclusive", "--mem=0", "--time=60:00", "--time=60:00:00"} & set(lines) == {"--exclusive", "--mem=0"}
    assert "--time=1:00:00" in lines
    assert not [line for line in lines if "gres" in line or "gpus-per-task" in line or "export" in line]


def test_tasks_per_rank_divide_the_cores() -> None:
    asked = request_of(nodes=2, ranks_per_node=8, tasks_per_node=8, cores_per_node=96, launcher="srun")
    assert {"--ntasks-per-node=8", "--cpus-per-task=12"} <= set(BACKEND.directives(asked))


def test_nodes_to_leave_out_join_those_of_the_profile() -> None:
    assert not [line for line in BACKEND.directives(request_of()) if "exclude" in line]
    lines = BACKEND.directives(request_of({"options": ["--exclude=n9", "-x n8"]}, exclude=("n[1,3]", "n5")))
    assert lines[-1] == "--exclude=n9,n8,n[1,3],n5"
    assert parse_nodes("n[1,3], n5") == ["n[1,3]", "n5"] and parse_nodes("") == []


def test_a_part_of_a_node_is_not_exclusive() -> None:
    lines = BACKEND.directives(request_of(resource_type="part"))
    assert "--mem=61952M" in lines and "--exclusive" not in lines and "--mem=0" not in lines


def test_values_of_the_user_in_directives() -> None:
    asked = request_of(
        {"options": ["--constraint=a100"], "stop_grace_s": 300},
        queue="big", group="acc", reservation="r1", priority=-100, after=("7", "8"), after_any=False, time_s=86400,
    )  # fmt: skip
    lines = BACKEND.directives(asked)
    wanted = ["--partition=big", "--account=acc", "--reservation=r1", "--nice=100", "--requeue"]
    wanted += ["--dependency=afterok:7:8", "--kill-on-invalid-dep=yes", "--signal=B:USR1@240", "--open-mode=append"]
    assert set(wanted) <= set(lines) and lines[-1] == "--constraint=a100"
    assert "--dependency=afterany:7" in BACKEND.directives(request_of(after=("7",)))


@pytest.mark.parametrize(
    ("time_s", "grace_s", "warning_s"), [(None, 120, 120), (None, 99999, 65535), (60, 120, 30), (86400, 120, 60)]
)
def test_the_warning_signal_leaves_time_to_save(time_s: int | None, grace_s: int, warning_s: int) -> None:
    lines = BACKEND.directives(request_of({"stop_grace_s": grace_s}, time_s=time_s))
    assert f"--signal=B:USR1@{warning_s}" in lines


def test_the_job_gets_named_variables_only() -> None:
    (command,) = BACKEND.submit_commands(request_of())
    export = next(word for word in command.argv if word.startswith("--export="))
    assert program_of(command.argv) == "sbatch" and command.argv[-1] == "job.sh"
    assert "HOME" in export and "ALL" not in export.removeprefix("--export=").replace("LC_ALL", "").split(",")


@pytest.mark.parametrize(
    ("output", "job_id"),
    [
        ("17\n", "17"),
        ("17;cluster2\n", "17"),
        ("Submitted batch job 17\n", "17"),
        ("Submitted batch job 17 on cluster c2", "17"),
        ("-----\nWelcome to 2026\n  17;c\nlua: 3 nodes wanted\n", "17"),
    ],
)
def test_the_job_id(output: str, job_id: str) -> None:
    assert BACKEND.parse_job_id(output) == job_id


@pytest.mark.parametrize("output", ["", "sbatch: queued\n", "17.5\n", "job 17\n"])
def test_a_missing_job_id_is_an_error_that_quotes_the_output(output: str) -> None:
    with pytest.raises(SchedulerError, match="no job id") as caught:
        BACKEND.parse_job_id(output)
    assert repr(output.strip()) in str(caught.value)


# --- The queue


def test_a_queue() -> None:
    reports = BACKEND.parse_status(recorded("squeue-life.txt"))
    assert {job_id: str(report.state) for job_id, report in reports.items()} == {
        "8": "pending", "3": "running", "4": "pending", "6": "pending", "7": "pending", "5": "pending",
        "1": "running", "2": "running",
    }  # fmt: skip
    assert reports["1"].hosts == ("n1", "n2", "n3", "n4") and reports["1"].reason == ""
    assert reports["2"].name == "odd|na me"
    assert reports["4"].expected_start == "2026-11-21T12:49:31" and reports["8"].expected_start is None
    assert reports["7"].expected_start == "2026-11-21T13:44:30"
    assert reports["1"].expected_start is None
    assert reports["5"].reason == "it is held by its user; release it with scontrol release"
    assert reports["8"].reason == "its partition starts no jobs at present"


def test_parsed_endings_of_jobs() -> None:
    reports = BACKEND.parse_status(recorded("squeue-ends.txt"))
    assert reports["14"].state is JobState.COMPLETED and reports["14"].reason == ""
    assert reports["12"].state is JobState.FAILED and reports["12"].reason == "its script ended with an error"
    assert reports["1"].state is JobState.CANCELLED and reports["8"].reason == ""
    # A job that has ended is not to be cancelled, as one that waits in vain is.
    assert reports["16"].state is JobState.CANCELLED
    assert reports["16"].reason == "the job that it waited for did not end as asked"
    assert reports["11"].reason == "a node that it needs is down, drained, reserved or in use: n2"
    assert reports["17"].state is JobState.RUNNING and reports["17"].hosts == ("n1", "n3")


def test_a_job_on_a_powered_off_node() -> None:
    reports = BACKEND.parse_status(recorded("squeue-node-failure.txt"))
    assert reports["21"].state is JobState.NODE_FAIL and reports["21"].reason == "a node that it needs is down"
    assert reports["20"].state is JobState.PENDING and reports["20"].expected_start == "2026-11-21T12:52:30"
    assert reports["22"].state is JobState.TIMEOUT


def test_states_of_later_versions() -> None:
    reports = BACKEND.parse_status(recorded("newer.txt"))
    found = {job_id: str(report.state) for job_id, report in reports.items()}
    assert found == {
        "31": "pending", "32": "pending", "33": "pending", "34": "pending", "35": "running", "36": "running",
        "37": "running", "38": "unknown", "39": "unknown", "40": "pending", "41": "pending", "42": "failed",
        "43": "preempted", "44": "node_fail", "45": "timeout",
    }  # fmt: skip
    assert reports["39"].raw == "TELEPORTING"
    assert reports["40"].reason == "it asks for more than its quality of service gives (QOSMaxGRESPerUser)"
    assert reports["41"].reason == "MoonInWrongPhase"
    assert reports["32"].reason.count("scontrol release") == 2
    assert reports["42"].reason == "it ran out of memory"
    assert all(report.reason for job_id, report in reports.items() if job_id not in ("31", "38", "39"))


def test_one_call_for_all_jobs_even_with_an_unknown_one() -> None:
    argv = BACKEND.status_argv(["1", "2", "99999"])
    assert program_of(argv) == "squeue" and "--me" in argv and not [word for word in argv if "99999" in word]
    assert BACKEND.find_argv("x-1")[-1] == "--name=x-1"


@pytest.mark.parametrize(
    "reason", [*REASONS, "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher"]
)
def test_pending_reasons_are_sentences(reason: str) -> None:
    words = in_words(f"({reason})" if reason in REASONS else reason)
    assert reason not in words or reason in ("None", "null")
    assert words == "" or (words[0].islower() or words.startswith("Slurm")) and not words.endswith(".")


def test_enough_reasons_are_known() -> None:
    assert len(REASONS) >= 40
    assert in_words("AssocGrpGRESRunMinutes") == "its account uses as much as it may use (AssocGrpGRESRunMinutes)"


@pytest.mark.parametrize("reason", ["None", "(None)", "null", "(null)", ""])
def test_none_is_no_reason(reason: str) -> None:
    assert in_words(reason) == ""
    assert in_words(reason, "OUT_OF_MEMORY") == "it ran out of memory"


def test_every_state_has_a_neutral_state() -> None:
    assert JobState.UNKNOWN not in STATES.values()


# --- Accounting


def test_accounting() -> None:
    reports = BACKEND.parse_accounting(recorded("sacct.txt"))
    assert "99999" not in reports
    assert (reports["12"].state, reports["12"].exit_code) == (JobState.FAILED, 3)
    assert (reports["13"].state, reports["13"].exit_code) == (JobState.FAILED, 137)
    assert (reports["14"].state, reports["14"].exit_code) == (JobState.COMPLETED, 0)
    assert (reports["22"].state, reports["22"].exit_code) == (JobState.TIMEOUT, None)
    assert (reports["21"].state, reports["21"].restarts) == (JobState.NODE_FAIL, 0)
    assert (reports["1"].state, reports["1"].raw) == (JobState.CANCELLED, "CANCELLED by 0")
    assert reports["1"].reason == "cancelled by user 0"
    assert reports["4"].hosts == ()
    assert reports["2"].name == "odd|na me"


def test_the_newest_record_of_a_requeued_job_counts() -> None:
    report = BACKEND.parse_accounting(recorded("sacct.txt"))["20"]
    assert (report.state, report.restarts) == (JobState.PENDING, 1)


def test_a_reused_id_is_the_new_job() -> None:
    lines = ["7|2026-11-21T12:00:00|COMPLETED|0:0|n1|new", "7|2025-01-01T00:00:00|FAILED|1:0|n1|old"]
    report = BACKEND.parse_accounting("\n".join(lines))["7"]
    assert (report.name, report.state, report.restarts) == ("new", JobState.COMPLETED, 0)


def test_lines_that_are_no_records_are_skipped() -> None:
    assert BACKEND.parse_accounting("sacct: hello\n7.batch|2026|COMPLETED|0:0|n1|batch\n|||||\n") == {}


def test_one_accounting_call_for_all_jobs() -> None:
    argv = BACKEND.accounting_argv(["1", "2"])
    assert argv is not None and "1,2" in argv and "--duplicates" in argv and "--allocations" in argv


# --- Errors


def refusals() -> list[tuple[str, str, int]]:
    """Tuples (command, error message, exit status) of errors.txt and controller-down.txt."""
    found = []
    for block in (recorded("errors.txt") + recorded("controller-down.txt")).split("$ ")[1:]:
        command, _, rest = block.partition("\n")
        message, _, status = rest.rpartition("rc=")
        found.append((command, message, int(status)))
    return found


def test_only_a_server_that_does_not_answer_is_transient() -> None:
    transient = [command for command, message, status in refusals() if BACKEND.is_transient(status, message)]
    assert transient == ["sacct -n -P -X -j 1", "squeue -h --me", "sbatch /tmp/srec/ok.sh"]


def test_an_unknown_job_is_a_valid_answer_and_a_lost_server_is_not() -> None:
    answers = {command: BACKEND.is_answer(status, message) for command, message, status in refusals()}
    assert answers["squeue -h -j 99999"] and not answers["squeue -h --me"] and not answers["sacct -n -P -X -j 1"]


def test_refusals_come_with_advice() -> None:
    silent = [command for command, message, status in refusals() if status and not BACKEND.advice(message)]
    # Missing objects, and errors that are not the user's, need no advice.
    assert silent == [
        "sacct -n -P -X -j 1", "squeue -h -j 99999", "sbatch nosuchfile.sh", "scontrol requeue 99999",
        "srun --jobid=99999 --overlap hostname", "squeue -h --me", "sbatch /tmp/srec/ok.sh",
    ]  # fmt: skip
    assert "--queue" in BACKEND.advice("sbatch: error: Batch job submission failed: Invalid partition name specified")


def test_mpirun_is_refused_in_a_container_of_pyxis(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["submit", "--cluster", "slurm-pyxis", "--container", "/i.sqsh", "--launcher", "mpirun", "--show-script"]
    assert main([*asked, "--", "true"]) == 2
    assert "mpirun starts its ranks outside the container" in capsys.readouterr().err


def test_errors_of_pyxis_come_with_advice() -> None:
    complaints = recorded("pyxis.txt").split("--\n")
    given = [BACKEND.advice(message) for message in complaints]
    assert all(given) and len(set(given)) == len(given)
    assert "has no pyxis" in given[-1]


# --- Nodes


def test_a_drained_node_has_its_whole_reason() -> None:
    nodes = {node.name: node for node in BACKEND.parse_nodes([recorded("scontrol-nodes-drain.txt")])}
    assert [node.state for node in nodes.values()] == ["mixed", "draining", "mixed", "mixed"]
    assert nodes["n2"].reason == "bad gpu 0, see ticket 12 [ops] = later (root, 2026-11-21T12:48:00)"
    assert (nodes["n1"].gpus, nodes["n1"].gpus_used, nodes["n1"].cores, nodes["n1"].cores_used) == (2, 2, 8, 4)
    assert nodes["n1"].memory_gib == 7.8 and nodes["n1"].queues == ("debug", "gpu", "small", "closed")
    assert nodes["n1"].reason == ""


def test_a_powered_off_node_is_down() -> None:
    nodes = {node.name: node for node in BACKEND.parse_nodes([recorded("scontrol-nodes-down.txt")])}
    assert nodes["n4"].state == "down" and nodes["n4"].raw == "DOWN+NOT_RESPONDING"
    assert nodes["n4"].reason.startswith("Not responding (")


@pytest.mark.parametrize(
    ("raw", "state"),
    [
        ("IDLE", "idle"), ("IDLE+PLANNED", "idle"), ("idle-", "idle"), ("IDLE+CLOUD+POWERED_DOWN", "idle"),
        ("idle~", "idle"), ("MIXED", "mixed"), ("mix#", "mixed"), ("ALLOCATED+COMPLETING", "allocated"),
        ("alloc", "allocated"), ("IDLE+COMPLETING", "allocated"), ("IDLE+DRAIN", "drained"),
        ("drained*", "drained"), ("MIXED+DRAIN", "draining"),
        ("drng", "draining"), ("IDLE+COMPLETING+DRAIN", "draining"), ("DOWN*+DRAIN", "down"), ("down*", "down"),
        ("IDLE*", "down"), ("IDLE+MAINT", "drained"), ("idle$", "drained"), ("ALLOCATED+MAINT", "allocated"),
        ("IDLE+RESERVED", "allocated"), ("resv", "allocated"), ("ALLOCATED+RESERVED", "allocated"),
        ("IDLE+CLOUD+POWERING_DOWN", "down"), ("idle%", "down"), ("IDLE+POWER_DOWN", "down"), ("idle!", "down"),
        ("IDLE+CLOUD+POWERING_UP", "allocated"), ("idle#", "allocated"), ("IDLE+MAINTENANCE", "drained"),
        ("IDLE+REBOOT_REQUESTED", "down"), ("idle@", "down"), ("IDLE+INVALID_REG", "down"), ("IDLE+FAIL", "down"),
        ("IDLE+REBOOT_ISSUED", "down"), ("FUTURE", "down"), ("INVAL", "down"), ("QUANTUM", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_states_of_nodes(raw: str, state: str) -> None:
    assert node_state(raw) == state


def test_gpus_by_type_and_index() -> None:
    line = (
        "NodeName=g1 Gres=gpu:h100:8(S:0-1),shard:16 GresUsed=gpu:h100:3(IDX:0-1,5),shard:0 State=MIXED RealMemory=1024"
    )
    (node,) = BACKEND.parse_nodes([line])
    assert (node.gpus, node.gpus_used, node.memory_gib, node.cores) == (8, 3, 1.0, None)
    (bare,) = BACKEND.parse_nodes(["NodeName=c1 Gres=(null) State=IDLE Reason=x State=DOWN"])
    assert (bare.gpus, bare.gpus_used, bare.state, bare.reason) == (0, None, "idle", "x State=DOWN")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]n[01-02]-ib", ["rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib"]),
        ("", []),
        ("n[1-", []),
        ("n[3-1]", []),
        ("n[0-99999999]", []),
        ("n[1-300]m[1-300]", []),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


# --- A terminal on a node


def stand_ins(folder: Path) -> dict[str, str]:
    """Stand-ins for salloc and srun, which record their arguments and run their command; returns the environment."""
    for name in ("salloc", "srun"):
        body = f'printf "%s\\n" "$@" >{folder}/{name}.arguments\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_a_shell_in_a_new_allocation(tmp_path: Path) -> None:
    asked = request_of(nodes=2, gpus_per_node=8, cores_per_node=96, resource_type="gpu")
    argv = BACKEND.interactive_argv(asked, 'exec "$@"', ["echo", "a b", "$x"])
    env = stand_ins(tmp_path)
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout == "a b $x\n"
    assert done.stderr == "llmctl: requesting 2 nodes with 8 GPUs each; giving up after 60 s if none is free\n"
    arguments = [set((tmp_path / f"{name}.arguments").read_text().split("\n")) for name in ("salloc", "srun")]
    assert {"--immediate=60", "--gpus-per-node=h100:8", "--nodes=2"} <= arguments[0]
    assert {"--overlap", "--nodes=1", "--cpus-per-task=96"} <= arguments[1] and "--pty" not in arguments[1]


def test_attach_beside_a_rank(tmp_path: Path) -> None:
    argv = BACKEND.attach_argv("17", "n3", 'exec "$@"', ["printf", "%s", "a'b\n"], cores=96)
    done = subprocess.run(argv, env=stand_ins(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a'b\n", b"")
    arguments = (tmp_path / "srun.arguments").read_text().split("\n")
    assert {"--jobid=17", "--overlap", "--nodelist=n3", "--ntasks=1", "--cpus-per-task=96"} <= set(arguments)


def test_attach_joins_a_container_by_name(tmp_path: Path) -> None:
    site = {"runtime": "pyxis", "name": "llm:create", "save": "/shared/changed.sqsh"}
    profile = ClusterProfile(name="s", scheduler="slurm", container=site)  # type: ignore[arg-type]
    plan = ContainerPlan("pyxis", "reg#img", None, ("/a:/a",), profile.container)
    argv = BACKEND.attach_argv("17", "n3", "true", (), plan)
    subprocess.run(argv, env=stand_ins(tmp_path), stdin=subprocess.DEVNULL, timeout=HANG_S, check=True)
    given = (tmp_path / "srun.arguments").read_text().split("\n")
    # An attached step must not overwrite the run's own image.
    assert "--container-name=llm:exec" in given and not [word for word in given if word.startswith("--container-save")]
    unnamed = profile.container.model_copy(update={"name": None})
    nameless = BACKEND.attach_argv("17", "n3", "true", (), ContainerPlan("pyxis", "/i.sqsh", None, (), unnamed))
    assert "--container" not in nameless[-1]
