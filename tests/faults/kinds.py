"""The kinds of faults: where they exist, what must be told, and what the run must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tests.faults import acts

if TYPE_CHECKING:
    from tests.faults.trial import Trial

BEDS = ("local", "slurm", "sge", "ssh", "pbs")
RANK = r"rank 1( \([^)]*\))? on {host}"
LAUNCHER = r"(rank 1|torchrun) on {host}"
BOTH = r"\S+ and {host} do not reach each other"
"""Between two nodes nothing tells which one is cut off."""
ALONE = r"(?<!and ){host} \(rank 1\) does not answer"
SLURM = ("slurm",)
LOCAL = ("local",)
NO_SCHEDULER = "no scheduler"
SPIKES = ("--set", "training.loss_spike_window=16")
THREE = ("--nodes", "3", "--set", "training.global_batch_size=6")
ENDLESS = ("--set", "training.train_iters=100000")
NO_GRACE = ("--set", "checkpoint.missed_saves_grace_s=0")
ONE_DISK = {"slurm": "the nodes of the test share this machine's disk"}


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: on the command line, and of ``FAULT`` in user_faults.py if a rank makes the fault by itself.
        what: words of the page.
        act: makes the fault from outside; None: rank 1 makes the fault.
        classes: classes of which exit.json of the first attempt must name one; none: no class is asked for.
        told: pattern in causes and detail of ``llmctl status`` and in the words on a hang, with ``{host}`` of rank 1.
        logged: pattern in the logs of the first attempt.
        end: state in which the run must end without a person.
        attempts: number of attempts that this takes.
        restarts: ``--max-restarts``.
        live: pattern in the document of ``llmctl status`` that must come before the end; empty: none is asked for.
        prepare: act before the submission; returns further words of ``llmctl submit``.
        after: act once the fault is told, such as one that heals the machine.
        is_damaged: the newest checkpoint cannot be used.
        passes_over: iteration up to which the second attempt makes no step.
        most_lost: steps that may be lost.
        is_same: the losses must be those of a run without a fault, bit for bit.
        words: further words of ``llmctl submit``.
        beds: where the kind exists.
        absent: bed -> reason why the kind does not exist there.
    """

    name: str
    what: str
    act: Callable[[Trial], None] | None = None
    classes: tuple[str, ...] = ()
    told: str = ""
    logged: str = ""
    end: str = "completed"
    attempts: int = 2
    restarts: int = 2
    live: str = ""
    prepare: Callable[[Trial], tuple[str, ...]] = acts.no_words
    after: Callable[[Trial], None] = acts.nothing
    is_damaged: bool = False
    passes_over: int = 0
    most_lost: int = 20
    is_same: bool = True
    words: tuple[str, ...] = ()
    beds: tuple[str, ...] = BEDS
    absent: dict[str, str] = field(default_factory=dict)


on_own_disk = partial(Kind, prepare=acts.own_disk, beds=LOCAL, absent=ONE_DISK)
"""A kind for which the checkpoints have a disk of their own."""
KINDS = (
    Kind("killed-rank", "SIGKILL of rank 1", acts.kill_rank, ("killed",), RANK),
    Kind("segv", "rank 1 has a segmentation fault", None, ("killed",), RANK),
    Kind("killed-agent", "SIGKILL of rank 1's torchrun", acts.kill_agent, ("killed",), LAUNCHER),
    Kind("frozen", "SIGSTOP of rank 1", acts.freeze_rank, ("hang",), RANK),
    Kind("error", "an exception in rank 1", None, ("error",), RANK),
    Kind("exit", "rank 1 leaves with code 7, without a word", None, ("lost_peer",), RANK),
    Kind("memory", "rank 1 gets no host memory", None, ("out_of_memory",), RANK),
    Kind(
        "nan",
        "the loss of rank 1 is not finite in one step",
        logged="computed again, .* on rank 1",
        attempts=1,
        is_same=False,
    ),
    Kind(
        *("nan-once", "the loss of rank 1 is not finite, but the same step again is: a machine computes wrongly"),
        logged="a machine has computed wrongly",
        attempts=1,
        is_same=False,
    ),
    Kind(
        *("nan-forever", "the loss of rank 1 is not finite any more: the run must end", None, ("not_finite",)),
        told="computed again, .* on rank 1",
        end="failed",
        attempts=1,
        is_same=False,
    ),
    Kind(
        *("wrong-bit", "a flipped bit in a weight of rank 1", None, ("error",), "differ"),
        words=("--set", "training.check_weight_hash_across_dp_replicas_interval=5"),
    ),
    Kind("truncated", "the newest checkpoint is cut off, and rank 1 killed", acts.truncate, is_damaged=True),
    Kind("flipped", "a bit of the newest checkpoint is flipped, and rank 1 killed", acts.flip, is_damaged=True),
    Kind("deleted", "a file of the newest checkpoint is deleted, and rank 1 killed", acts.delete, is_damaged=True),
    Kind("pointer", "the pointer to the checkpoint is damaged, and rank 1 killed", acts.damage_pointer),
    Kind("clock", "the clock of rank 1 jumps an hour ahead", attempts=1),
    Kind(
        *("spike", "the loss of rank 1 is a thousand times higher in one step"),
        told="the loss of iteration 26 was a spike",
        attempts=1,
        is_same=False,
        words=SPIKES,
    ),
    Kind(
        *("roll-back", "the same, and the run is rolled back and passes over the samples", None, ("roll_back",)),
        told="the loss of iteration 26, .* is a spike",
        passes_over=26,
        is_same=False,
        words=(*SPIKES, "--set", "training.on_loss_spike=roll_back"),
    ),
    Kind(
        *("slow", "rank 1 takes half a second more for each step; then a person cancels"),
        live="slower than the other ranks of its stage for two minutes: rank 1 on ",
        after=acts.cancel,
        end="cancelled",
        attempts=1,
        is_same=False,
        words=ENDLESS,
    ),
    on_own_disk(
        *("disk-full", "the disk is full: the run must end", acts.fill_disk, ("disk",), "No space left"),
        end="failed",
        attempts=1,
        words=(*NO_GRACE, *ENDLESS),
        most_lost=60,
    ),
    on_own_disk(
        *("disk-room", "the disk of checkpoints is full until somebody makes room", acts.fill_disk),
        live="No space left",
        after=acts.make_room,
        attempts=1,
    ),
    on_own_disk(
        *("read-only", "the disk of checkpoints is read-only until somebody mends it", acts.set_read_only),
        live="Read-only file system",
        after=acts.set_writable,
        attempts=1,
    ),
    Kind(
        *("quota", "the quota of checkpoints is used up (EDQUOT by strace): the run must end", acts.use_up_quota),
        *(("disk",), "quota"),
        end="failed",
        attempts=1,
        words=(*NO_GRACE, *ENDLESS),
        most_lost=60,
        beds=("local", "slurm"),
    ),
    Kind("oom", "the kernel kills rank 1 for its memory (a control group)", acts.limit_memory, ("killed",), RANK),
    Kind(
        *("crash-loop", "rank 1 fails at the same step each time: the run must end", None, ("error",), RANK),
        end="failed",
        attempts=3,
        restarts=9,
    ),
    Kind(
        *("config-error", "a hook cannot be imported: the run must end", None, ("config",), "not started again"),
        end="failed",
        attempts=1,
    ),
    Kind(
        *("killed-supervisor", "SIGKILL of the supervisor: the ranks train on", acts.kill_supervisor),
        attempts=1,
        beds=("local",),
    ),
    Kind(
        *("killed-batch", "SIGKILL of the supervisor, with which the job ends", acts.kill_supervisor),
        told="SIGKILL|killed|signal 9",
        end="failed",
        attempts=1,
        live='"state": "(failed|cancelled)"',
        beds=SLURM,
        absent={"local": NO_SCHEDULER, "ssh": NO_SCHEDULER, "sge": "qacct does not tell a kill from qdel"},
    ),
    Kind(
        *("double", "a stopped run is resumed by two people at once", acts.ask_to_stop),
        live='"state": "cancelled"',
        after=acts.resume_twice,
    ),
    Kind("asked", "SIGTERM of the supervisor: the run must save", acts.ask_to_stop, end="cancelled", attempts=1),
    Kind(
        *("by-hand", "the scheduler's own cancel by hand: the run must end", acts.cancel_by_hand),
        words=ENDLESS,
        end="cancelled",
        attempts=1,
        beds=("slurm", "sge"),
        absent={"local": NO_SCHEDULER, "ssh": NO_SCHEDULER},
    ),
    Kind("requeue", "the scheduler requeues the job", acts.requeue, beds=SLURM, absent={"local": NO_SCHEDULER}),
    Kind(
        *("preempted", "Slurm gives the nodes to an urgent job, and requeues the run", acts.preempt),
        beds=SLURM,
        absent={"local": NO_SCHEDULER},
    ),
    Kind(
        *("limit", "the time limit comes: the run must save and end", acts.shorten),
        end="timeout",
        attempts=1,
        most_lost=0,
        words=ENDLESS,
        beds=SLURM,
        absent={"local": NO_SCHEDULER},
    ),
    Kind(
        *("lost-answer", "the answer of sbatch is lost: one job runs, and no second", acts.count_jobs),
        prepare=acts.lose_answer,
        attempts=1,
        beds=SLURM,
        absent={"local": NO_SCHEDULER},
    ),
    Kind(
        *(
            "bad-node",
            "the second node has no Python: the run must end and name the node",
            acts.nothing,
            ("node",),
            "n2 could not start .*: Permission denied; n1 started it",
        ),
        prepare=acts.break_node,
        end="failed",
        attempts=1,
        beds=SLURM,
        absent={"local": "both agents have one machine"},
    ),
    Kind(
        *("controller", "slurmctld is down, while a person asks and resumes", acts.stop_controller),
        attempts=1,
        beds=SLURM,
        absent={"local": NO_SCHEDULER},
    ),
    Kind("slurmd", "slurmd of rank 1's node is killed and starts again", acts.stop_slurmd, attempts=1, beds=SLURM),
    Kind("power", "the power of rank 1's node is cut", acts.cut_power, after=acts.restore_power, beds=SLURM),
    Kind(
        *("cut", "the network of rank 1's node is cut both ways, and healed once the hang is told"),
        *(acts.cut_network("INPUT", "OUTPUT"), (), BOTH),
        after=acts.heal_network,
        attempts=1,
        beds=SLURM,
    ),
    Kind(
        *("cut-long", "the network of rank 1's node is cut both ways until the attempt has ended"),
        *(acts.cut_network("INPUT", "OUTPUT"), ("hang", "node", "lost_peer"), BOTH),
        after=acts.heal_after_the_end,
        beds=SLURM,
    ),
    Kind(
        *("cut-in", "packets to rank 1's node are lost until the attempt has ended"),
        *(acts.cut_network("INPUT"), ("hang", "node", "lost_peer"), BOTH),
        after=acts.heal_after_the_end,
        beds=SLURM,
    ),
    Kind(
        *("cut-of-three", "the network of one of three nodes is cut both ways, and healed once the hang is told"),
        *(acts.cut_network("INPUT", "OUTPUT"), (), ALONE),
        after=acts.heal_network,
        attempts=1,
        is_same=False,
        words=THREE,
        beds=SLURM,
    ),
    Kind(
        *("cut-in-of-three", "packets to one of three nodes are lost until the attempt has ended"),
        *(acts.cut_network("INPUT"), ("hang", "node", "lost_peer"), ALONE),
        after=acts.heal_after_the_end,
        is_same=False,
        words=THREE,
        beds=SLURM,
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
