"""One job per submission: safe retries, and a second job of the same submission."""

import pytest

from llmctl.backends import load_queue_backend
from llmctl.site.job import JobSpec
from llmctl.site.profile import SCHEDULERS
from tests.llmctl.scripts.script_cases import RUN_ID, ScriptCase, render_case
from tests.llmctl.scripts.test_run import PYTHON, Stage

SLURM, PBS, SGE, LSF = (load_queue_backend(name) for name in ("slurm", "pbs", "sge", "lsf"))
FAILED = "sbatch: error: Batch job submission failed: "
AWAY = (
    "error: commlib error: got select error (Connection refused)\n"
    'error: unable to send message to qmaster using port 6444 on host "es1": got send error\n'
)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (SLURM, f"{FAILED}Unable to contact slurm controller (connect failure)"),
        (SLURM, f"{FAILED}Slurm backup controller in standby mode"),
        (SLURM, f"sbatch: error: Munge encode failed: Invalid credential\n{FAILED}Protocol authentication error"),
        (PBS, "Connection refused\nqsub: cannot connect to server pbs1 (errno=111)\n"),
        (PBS, "qsub: No free connections\n"),
        (SGE, AWAY),
        (LSF, "Cannot connect to LSF. Please wait ...\n"),
        (LSF, "Request from non-LSF host rejected\n"),
    ],
)
def test_a_submit_that_was_never_sent_or_was_refused_may_be_repeated(backend, message):
    assert backend.is_transient(1, message) and backend.was_not_taken(1, message)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (SLURM, f"{FAILED}Socket timed out on send/recv operation"),
        (SLURM, f"{FAILED}Zero bytes were transmitted or received"),
        (SLURM, f"{FAILED}Unexpected message received"),
        (SLURM, f"{FAILED}Unable to contact slurm controller (receive failure)"),
        (SLURM, f"{FAILED}Protocol authentication error"),
        (SLURM, f"sbatch: error: Munge decode failed: Expired credential\n{FAILED}Protocol authentication error"),
        (SLURM, f"sbatch: RPC rate limit exceeded\n{FAILED}Socket timed out on send/recv operation"),
        (PBS, "qsub: End of File\n"),
        (PBS, "qsub: Premature end of message\n"),
        (PBS, "qsub: Batch protocol error\n"),
        (PBS, "qsub: Request timed out\n"),
        (PBS, "qsub: Connection reset by peer\n"),
        (LSF, "Contacting batch daemon: Communication timeout. Job not submitted.\n"),
        (SGE, "error: failed receiving gdi request response for mid=1 (got syncron message receive timeout error)."),
        (SGE, f'{AWAY}error: commlib error: got read error (closing "es1/qmaster/1")'),
    ],
)
def test_a_submit_that_may_have_been_accepted_is_not_repeated(backend, message):
    assert backend.is_transient(1, message) and not backend.was_not_taken(1, message)


@pytest.mark.parametrize("cluster", [name for name in SCHEDULERS if load_queue_backend(name)])
@pytest.mark.parametrize(
    ("claims", "starts"),
    [({}, True), ({1: "same"}, True), ({1: "4100"}, False), ({2: "4300"}, False), ({1: "same", 10: "4300"}, False)],
    ids=["first", "requeued", "taken twice", "late", "requeued late"],
)
def test_a_second_job_of_a_submission_starts_nothing(tmp_path, cluster, claims, starts):
    """A job that starts after a later submission starts nothing either."""
    # Grid Engine and PBS have profiles of sites only.
    profile = ScriptCase(
        {"sge": "tsubame4", "pbs": "abci3"}.get(cluster, cluster), "torchrun", in_container=False
    ).profile()
    software = profile.environment.model_copy(update={"module_init": None, "modules": (), "setup": ()})
    profile = profile.model_copy(update={"runs_root": str(tmp_path / "runs"), "environment": software})
    job = JobSpec(name="gpt", nodes=2, time_s=7200, launcher="torchrun", command=(PYTHON,))
    same = "4242.pbs1" if cluster == "pbs" else "4242"
    run_dir = tmp_path / "runs" / RUN_ID
    (run_dir / "attempts").mkdir(parents=True)
    for submission, owner in claims.items():
        (run_dir / f"attempts/.submission-{submission}").symlink_to(same if owner == "same" else owner)
    rendered = render_case(profile, job, python=PYTHON, working_dir=tmp_path)
    Stage(tmp_path).run(rendered, run_dir, code=0 if starts else 1)
    assert (run_dir / "attempts/1/exit.json").exists() is starts
    if starts:
        assert str((run_dir / "attempts/.submission-1").readlink()) == same
