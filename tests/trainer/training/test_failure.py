"""Ranks that raise, are killed or hang.

The others exit in time, and the records name the first cause.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.resume_torture import free_port
from tests.trainer.training.pretraining_job import Job, reaches_iteration
from tests.waiting import HANG_S
from trainer.checkpoint.directory import CheckpointError
from trainer.distributed.mesh import ParallelMesh
from trainer.process.heartbeat import Heartbeat
from trainer.process.progress import TrainingProgress
from trainer.process.run_directory import RunDirectory
from trainer.training.missing_nodes import missing_nodes, words_on
from trainer.training.peer_failure import PeerFailure
from trainer.training.pretraining import _Attempt, _report

WORLD_SIZE = 4
# Timeouts of ranks that wait for a hanging one. A busy machine needs the longer ones to start its ranks at all.
TIMEOUTS_S = (8.0, 60.0, 300.0)
# Timeout of ranks with a dead peer, longer than any test: they must notice the failure.
LONG_S = 3600.0
MESH = ParallelMesh(tp=2, pp=2, dp=1, rank=0)


def write_config(run, timeout_s=LONG_S, **parallel):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": 100000, "seq_length": 16, "global_batch_size": 4, "eval_iters": 0},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "parallel": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "distributed_timeout_minutes": timeout_s / 60,
            **parallel,
        },
    }
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))


def errors(run):
    found = [json.loads(path.read_text()) for path in (run / "attempts/1/errors").glob("rank-*.json")]
    return sorted(found, key=lambda error: error["time"])


def log(run, rank):
    return (run / f"attempts/1/rank-{rank:05d}.log").read_text()


def raise_in_third_iteration():
    from trainer.process.progress import TrainingProgress

    whole = TrainingProgress.count

    def count(self, *arguments):
        if self.iteration == 2:
            raise ValueError("a fault in the third iteration")
        whole(self, *arguments)

    TrainingProgress.count = count


def test_the_rank_that_raises_is_the_cause_and_the_others_are_consequences(tmp_path):
    write_config(tmp_path / "run")
    with Job(tmp_path / "run", WORLD_SIZE, {3: raise_in_third_iteration}) as job:
        assert job.ends(range(WORLD_SIZE)) == [1] * WORLD_SIZE
    first, *others = errors(job.run)
    assert (first["rank"], first["coordinates"]) == (3, "rank 3 (pp 1, dp 0, tp 1)")
    assert (first["type"], first["message"]) == ("ValueError", "a fault in the third iteration")
    assert first["iteration"] == 2
    assert first["consequence"] is False
    assert "rank 3 (pp 1, dp 0, tp 1) failed at iteration 2" in log(job.run, 3)
    assert sorted(error["rank"] for error in others) == [0, 1, 2]
    for error in others:
        assert error["consequence"] is True
        assert error["message"].startswith("peer failure in ")
        # A rank with its own error record is not reported as silent.
        assert "no error record from rank 3" not in error["message"]
        coordinates = error["coordinates"]
        assert f"trainer: {coordinates} at iteration {error['iteration']}: peer failure" in log(job.run, error["rank"])
        assert "Traceback" not in log(job.run, error["rank"])


def test_peers_of_a_killed_rank_report_it(tmp_path):
    write_config(tmp_path / "run")
    with Job(tmp_path / "run", WORLD_SIZE) as job:
        job.wait_for_iteration(2)
        killed = time.time()
        job.ranks[1].kill()
        assert job.ends([0, 2, 3]) == [1, 1, 1]
    found = errors(job.run)
    assert sorted(error["rank"] for error in found) == [0, 2, 3]
    assert all(error["consequence"] for error in found)
    assert all(killed <= error["time"] for error in found)
    # The peers that communicated with it at that moment differ from run to run.
    assert any("no error record from rank 1 (pp 0, dp 0, tp 1) (process " in error["message"] for error in found)


def die_in_the_middle_of_the_second_iteration():
    from trainer.pipeline.executor import TrainingStep

    whole, calls = TrainingStep._forward, []

    def forward(self, *arguments):
        calls.append(arguments)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *arguments)

    TrainingStep._forward = forward


def test_replicas_of_a_rank_killed_under_zero_3_report_it(tmp_path):
    alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    write_config(tmp_path / "run", data_parallel_sharding_strategy="optim_grads_params", **alone)
    with Job(tmp_path / "run", 2, {1: die_in_the_middle_of_the_second_iteration}) as job:
        assert job.ends([0, 1]) == [1, -signal.SIGKILL]
    (found,) = errors(job.run)
    # Between two micro-batches only torch's own wrappers communicate.
    assert found["message"].startswith("peer failure in 'forward and backward' over dp x cp (rank 1): ")
    assert "no error record from rank 1 (pp 0, dp 1, tp 0) (process " in found["message"]


def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path):
    for timeout_s in TIMEOUTS_S:
        run = tmp_path / f"run-{timeout_s:.0f}"
        write_config(run, timeout_s)
        with Job(run, WORLD_SIZE) as job:
            if not job.reaches_iteration(2):
                continue
            os.kill(job.ranks[2].pid, signal.SIGSTOP)
            assert job.ends([0, 1, 3]) == [1, 1, 1]
            break
    found = errors(job.run)
    assert sorted(error["rank"] for error in found) == [0, 1, 3]
    assert all(error["consequence"] for error in found)
    # Some ranks wait for the hanging one, and others for those.
    waiting = next(e for e in found if "no error record from rank 2 (pp 1, dp 0, tp 0) (process " in e["message"])
    assert waiting["message"].startswith("peer timeout in '")
    assert "Timed out" in waiting["message"]
    assert "at the start of '" in waiting["message"]
    assert "Traceback" in log(job.run, waiting["rank"])  # where it waited


def test_a_rank_that_never_starts_is_reported_by_the_rendezvous(tmp_path):
    write_config(tmp_path / "run", TIMEOUTS_S[0])
    attempt, here = tmp_path / "run/attempts/1", socket.gethostname()
    attempt.mkdir(parents=True)
    (attempt / "hostfile").write_text(f"{here} slots=2\ngone7 slots=1\n{here} slots=1\n")
    with Job(tmp_path / "run", WORLD_SIZE, absent=(2,)) as job:
        assert job.ends([0, 1, 3]) == [1, 1, 1]
    for error in errors(job.run):
        assert "'rendezvous'" in error["message"]
        assert error["consequence"] is True
    silent = "no error record from rank 2 (pp 1, dp 0, tp 0) (no heartbeat); no rank has begun on node gone7"
    assert any(silent in error["message"] for error in errors(job.run))


@pytest.mark.parametrize(
    ("hostfile", "words"),
    [
        ("HERE slots=1\nn2 slots=2\nn3.site slots=1\n", "no rank has begun on node n2"),
        ("HERE slots=1\nn2 slots=1\nn3 slots=1\nn4 slots=1\n", "no rank has begun on node n2, n3"),
        ("HERE slots=4\n", ""),
        ("127.0.0.1 slots=1\nn2 slots=3\n", ""),
        ("n2 slots=1\nHERE slots=1\nn4 slots=2\n", ""),
        *((text, "") for text in ("", "HERE", "HERE slots=x\nn2 slots=-1", " slots=4", "\0\xff")),
    ],
)
def test_nodes_without_a_rank_are_named_if_the_hosts_are_known(tmp_path, hostfile, words):
    run = RunDirectory(tmp_path)
    assert missing_nodes(run, 0) == ""
    run.heartbeat(0).parent.mkdir(parents=True)
    for rank in (0, 3):
        run.heartbeat(rank).write_text("")
    (run.attempt_dir / "hostfile").write_text(hostfile.replace("HERE", f"{socket.gethostname()}.some.site"))
    assert missing_nodes(run, 0) == words


def test_many_missing_nodes_are_counted():
    assert words_on([f"n{number}" for number in range(9)]) == "no rank has begun on node n0, n1, n2, n3 and 5 more"


def test_under_torchrun_a_killed_rank_ends_the_job(tmp_path):
    run = tmp_path / "run"
    write_config(run, pipeline_model_parallel_size=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--log-dir", str(run / "torchrun")]
    command += ["-m", "trainer", "pretrain", "--config", str(run / "config.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LLMCTL_RUN_DIR": str(run), "LLMCTL_ATTEMPT": "1"}
    with (tmp_path / "agent.log").open("w") as out:
        agent = subprocess.Popen(command, cwd=Path(__file__).parents[3], env=environment, stdout=out, stderr=out)
        try:
            assert reaches_iteration(run, 2, lambda: agent.poll() is None)
            victim = json.loads((run / "attempts/1/heartbeat/rank-00001.json").read_text())["pid"]
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            assert agent.wait(timeout=HANG_S) == 1
        finally:
            agent.terminate()
            agent.wait(timeout=HANG_S)
    assert errors(run)
    assert all(error["rank"] != 1 and error["consequence"] for error in errors(run))
    assert all(killed <= error["time"] for error in errors(run))


GLOO_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:41872. This is "
    "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
)


@pytest.mark.parametrize(
    ("error", "is_late"),
    [
        (RuntimeError(GLOO_GONE), False),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 9000ms for recv operation to complete"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), False),
        (RuntimeError("Timed out after 10 seconds waiting for clients. 3/4 clients joined."), True),
        (RuntimeError("failed to recv, got 0 bytes"), False),
        (
            RuntimeError("[2] is setting up NCCL communicator, but store->get('0') got error: wait timeout after 9ms"),
            True,
        ),
        (RuntimeError("ncclRemoteError: a network error or a remote process exiting prematurely"), False),
        (RuntimeError("Application timeout caused pair closure"), True),
    ],
)
def test_messages_of_the_backends(error, is_late):
    failure = PeerFailure.of(error, MESH, "optimizer")
    assert failure is not None
    assert failure.is_late == is_late
    assert (failure.axis, failure.peers) == (
        "",
        (1, 2, 3),
    )  # no frame belongs to a module that communicates over an axis
    assert "typically" not in failure.sentence(MESH, None)
    assert "pair.cc" not in failure.sentence(MESH, None)


LOCAL_CAUSES = [
    ValueError("Connection closed by peer"),
    ConnectionResetError("Connection reset by peer"),
    RuntimeError("shape"),
    CheckpointError("the checkpoint of iteration 5 could not be written to /nfs: Connection timed out"),
    RuntimeError("/work/timeout-sweep/socket: no such folder"),
    RuntimeError("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE"),
    RuntimeError("NCCL error: ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    RuntimeError("Bootstrap : no socket interface found"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
]


@pytest.mark.parametrize("error", LOCAL_CAUSES, ids=str)
def test_other_errors_are_causes(error):
    assert PeerFailure.of(error, MESH, "data") is None


def test_a_rank_alone_has_no_peer_failure():
    alone = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    assert PeerFailure.of(RuntimeError(GLOO_GONE), alone, "data") is None


def failure_in(module, mesh):
    """The peer failure for an error in a function of ``module``."""

    def fail():
        raise RuntimeError(GLOO_GONE)

    names = {"__name__": module, "fail": fail}
    exec("def talk():\n    fail()", names)
    with pytest.raises(RuntimeError) as caught:
        names["talk"]()
    failure = PeerFailure.of(caught.value, mesh, "forward and backward")
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("module", "axis", "peers"),
    [
        ("trainer.model.tensor_parallel.collectives", "tp", (1,)),
        ("trainer.model.context_parallel.ring", "cp", (2,)),
        ("trainer.model.moe.losses", "cp", (2,)),
        ("trainer.model.moe.dispatch", "ep", (2, 4, 6)),
        ("trainer.data_parallel.gradient_buckets", "dp_cp", (2, 4, 6)),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "dp_cp", (2, 4, 6)),
        ("trainer.pipeline.communication", "pp", (8,)),
        # These modules communicate over more than one axis.
        ("trainer.pipeline.executor", "", tuple(range(1, 16))),
        ("trainer.distributed.collectives", "", tuple(range(1, 16))),
        ("trainer.data_parallel.shared_gradients", "", tuple(range(1, 16))),
    ],
)
def test_the_axis_is_that_of_the_innermost_frame_that_communicates(module, axis, peers):
    failure = failure_in(module, ParallelMesh(tp=2, pp=2, dp=2, cp=2, ep=4, rank=0))
    assert (failure.axis, failure.peers) == (axis, peers)


def test_the_sentence_names_axis_and_ranks():
    assert failure_in("trainer.pipeline.communication", MESH).sentence(MESH, None) == (
        "peer failure in 'forward and backward' over pp (rank 2): Connection closed by peer [10.0.0.2]:41872"
    )


def test_an_axis_of_one_rank_has_no_peer_failure():
    failure = failure_in("trainer.pipeline.communication", ParallelMesh(tp=1, pp=1, dp=3, rank=1))
    assert (failure.axis, failure.peers) == ("", (0, 2))


def test_without_a_run_directory_the_place_is_printed(capsys):
    attempt = _Attempt(None, None, None, None, MESH, TrainingProgress(), Heartbeat(None, 0), None, None)
    try:
        raise RuntimeError(GLOO_GONE)
    except RuntimeError as error:
        assert _report(attempt, error) == 1
    printed = capsys.readouterr().err
    assert "rank 0 (pp 0, dp 0, tp 0) at iteration 0: peer failure in 'start' (rank 1, 2, 3): " in printed
    assert "Traceback" in printed


def test_many_silent_ranks_are_counted(tmp_path):
    mesh = ParallelMesh(tp=1, pp=1, dp=20, rank=0)
    failure = PeerFailure.of(RuntimeError("Timed out waiting 9000ms"), mesh, "optimizer")
    run = RunDirectory(tmp_path)
    sentence = failure.sentence(mesh, run, failure.peers)
    assert "(rank 1, 2, 3, 4, 5, 6, 7, 8, ...)" in sentence
    assert sentence.endswith("rank 4 (pp 0, dp 4, tp 0) (no heartbeat) and 15 more")
