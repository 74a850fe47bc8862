"""Ranks that wait for each other: the one that does not come is named, and never its victims."""

import json
from dataclasses import replace

import pytest

from llmctl.runs.facts import AttemptFacts, Ending, Heartbeat, RankError, parse_heartbeat
from llmctl.runs.hang import hanging_ranks, lagging_ranks
from llmctl.runs.state import decide
from llmctl.supervisor.hangs.cuts import Network, Unanswered
from tests.llmctl.runs.test_state import NOW, ended, facts

STEP = "forward and backward"


def at(rank, groups, inside="", age_s=20.0, *, phase=STEP, written_s=1.0, iteration=7):
    """A heartbeat; ``groups``: ``world 5, dp 3@1`` (name, number, first rank); ``inside``: ``NAME GROUP``."""
    entered = {}
    for entry in filter(None, groups.split(", ")):
        name, _, number = entry.rpartition(" ")
        number, _, first = number.partition("@")
        entered[name] = (int(first or 0), int(number))
    name, _, group = inside.partition(" ")
    return Heartbeat(
        rank,
        f"n{rank}",
        iteration,
        phase,
        NOW - age_s,
        written=NOW - written_s,
        first_iteration=0,
        groups=entered,
        inside=name,
        group=group,
    )


def told(*beats, iteration_time_s=0.5):
    return lagging_ranks(beats, NOW, iteration_time_s)


def causes(*beats, iteration_time_s=0.5):
    return sorted(hanging_ranks(beats, NOW, iteration_time_s))


WAITS = "all_reduce world"
HANGS = {
    "one of two outside": ([at(0, "world 5", WAITS), at(1, "world 4")], [1]),
    "the same stack everywhere": ([at(0, "world 5"), at(1, "world 5"), at(2, "world 4"), at(3, "world 5")], [2]),
    "two of four outside": (
        [at(0, "world 5", WAITS), at(1, "world 4"), at(2, "world 5", WAITS), at(3, "world 4")],
        [1, 3],
    ),
    "stopped in a collective that the others have left": (
        [at(0, "world 5", WAITS), at(1, "world 4", WAITS, written_s=20)],
        [1],
    ),
    "held in a collective that all have entered, and one has left for another group": (
        [at(0, "world 100, dp 26", WAITS, phase="optimizer"), at(1, "world 99, dp 26", "wait dp")],
        [1],
    ),
    "the same with two that have left it": (
        [at(0, "world 100, dp 26", WAITS), at(1, "world 99, dp 26", "wait dp"), at(2, "world 100, dp 26", WAITS)],
        [1],
    ),
    "two in collectives of different groups, each without the other": (
        [at(0, "world 100, dp 25", WAITS), at(1, "world 99, dp 26", "all_reduce dp")],
        [],
    ),
    "stopped in the collective that the others wait in": (
        [at(0, "world 5", WAITS), at(1, "world 5", WAITS, written_s=20)],
        [1],
    ),
    "inside of a collective that the others have left": ([at(0, "world 6", WAITS), at(1, "world 5", WAITS)], [1]),
    "stopped before it had groups": ([at(0, "world 5", WAITS), at(1, "", written_s=20)], [1]),
    "left the loop": ([at(0, "world 5", WAITS), at(1, "world 4", phase="completed")], [1]),
    "the others have completed": (
        [at(0, "world 9", "barrier world", phase="completed"), at(1, "world 8", phase="optimizer")],
        [1],
    ),
    "failed without an end": ([at(0, "world 5", WAITS), at(1, "world 4", phase="failed", written_s=20)], [1]),
    # tp 2 x dp 2: rank 3 has not come to tp; rank 2 waits for it, and so ranks 0 and 1 wait in dp for 2 and 3.
    "a tp group behind holds up two dp groups": (
        [
            at(0, "tp 10, dp_cp 5", "all_reduce dp_cp"),
            at(1, "tp 10, dp_cp 5@1", "all_reduce dp_cp"),
            at(2, "tp 10@2, dp_cp 4", "all_reduce tp"),
            at(3, "tp 9@2, dp_cp 4@1"),
        ],
        [3],
    ),
    "a dp group behind holds up two tp groups": (
        [
            at(0, "tp 11, dp_cp 5", "all_reduce tp"),
            at(1, "tp 10, dp_cp 5@1", "wait dp_cp"),
            at(2, "tp 11@2, dp_cp 5", "all_reduce tp"),
            at(3, "tp 10@2, dp_cp 4@1"),
        ],
        [3],
    ),
    # Numbers of messages differ between stages, without meaning.
    "pp: the last of three stages": (
        [
            at(0, "pp 8, world 2", "wait pp"),
            at(1, "pp 16, world 2", "wait pp"),
            at(2, "pp 7, world 2"),
        ],
        [2],
    ),
    "pp: idle stages, and another pipeline that has finished": (
        [
            at(0, "pp 8, dp_cp 3", "wait pp"),
            at(1, "pp 4@1, dp_cp 4@1", "all_reduce dp_cp"),
            at(2, "pp 8, dp_cp 3@2"),
            at(3, "pp 4@1, dp_cp 4@2", "all_reduce dp_cp"),
        ],
        [2],
    ),
    "ep: one of the experts' ranks": (
        [
            at(0, "ep 6, dp_cp 1", "all_to_all_single ep"),
            at(1, "ep 5, dp_cp 1"),
            at(2, "ep 6@2, dp_cp 2", "all_reduce dp_cp"),
            at(3, "ep 6@2, dp_cp 2", "all_reduce dp_cp"),
        ],
        [1],
    ),
    "a group without a name": ([at(0, "group 7 3", "broadcast group 7"), at(1, "group 7 2")], [1]),
    "a save beside the step": (
        [at(0, "world 4, save 9"), at(1, "world 5, save 8", WAITS), at(2, "world 5, save 9", WAITS)],
        [0],
    ),
    "another collective": (
        [at(0, "world 5", WAITS), at(1, "world 5", "broadcast world"), at(2, "world 5", WAITS)],
        [1],
    ),
    "a collective of another group": (
        [
            at(0, "world 5, tp 3", WAITS),
            at(1, "world 4, tp 4", "all_reduce tp"),
            at(2, "world 5, tp 1@2", WAITS),
            at(3, "world 5, tp 1@2", WAITS),
        ],
        [1],
    ),
    "messages do not arrive": ([at(0, "world 5", WAITS), at(1, "world 5", WAITS)], []),
}


@pytest.mark.parametrize(("beats", "ranks"), HANGS.values(), ids=HANGS.keys())
def test_the_cause_of_a_hang_is_named(beats, ranks):
    assert told(*beats)
    assert causes(*beats) == ranks
    assert causes(*reversed(beats)) == ranks
    # The same long before the patience with a step is over.
    assert told(*(replace(beat, time=NOW - 5, written=NOW - 1) for beat in beats)) == ""


def test_sentences():
    assert told(at(0, "dp_cp 227", "all_reduce dp_cp"), at(1, "dp_cp 226"), at(2, "dp_cp 227"), at(3, "dp_cp 227")) == (
        "rank 1 on n1 (phase forward and backward, iteration 7) has not entered all_reduce 227 of dp x cp for 20 s; "
        "ranks 0, 2 and 3 wait for it"
    )
    stopped = at(1, "world 5", WAITS, written_s=20.0)
    assert told(at(0, "world 5", WAITS), stopped, at(2, "world 5", WAITS)) == (
        "rank 1 on n1 (phase forward and backward, iteration 7) is stopped, or its node does not answer: "
        "no sign of life for 20 s; the other ranks wait for it"
    )
    behind = at(1, "world 4", written_s=20.0)
    assert told(at(0, "world 5", WAITS), behind).endswith("for 20 s; rank 0 waits for it in all_reduce 5 of world")
    assert told(at(0, "world 5", WAITS), at(1, "world 4", phase="completed")).endswith(
        " has ended, and will not enter all_reduce 5 of world: rank 0 waits for it"
    )
    assert told(at(0, "pp 3", "wait pp"), at(1, "pp 7")).endswith(
        "has not sent its next message for 20 s; rank 0 waits for it"
    )
    assert told(*(at(rank, "world 5", WAITS) for rank in range(4))) == (
        "no progress for 20 s: all ranks are in all_reduce 5 of world"
    )
    mixed = [at(rank, "world 5", "broadcast world" if rank == 2 else WAITS) for rank in range(8)]
    assert told(*mixed) == (
        "no progress for 20 s: ranks wait for each other, rank 2 on n2 (phase forward and backward, iteration 7) in "
        "broadcast 5 of world, ranks 0, 1, 3, 4 and 3 more in all_reduce 5 of world"
    )
    absent = [at(rank, "world 4" if rank > 1 else "world 5", "" if rank > 1 else WAITS) for rank in range(64)]
    assert told(*absent).count(" has not entered ") == 4
    assert told(*absent).endswith("; and 58 more")


@pytest.mark.parametrize(
    ("phase", "patience_s"),
    [("data", 60), ("evaluation", 1800), ("checkpoint", 1800), ("export", 3600), ("hooks", 300), ("loading", 1800)],
)
def test_phases_that_may_be_long_are_no_hang(phase, patience_s):
    def after(age_s):
        return told(at(0, "world 5", WAITS, age_s, phase=phase), at(1, "world 4", "", age_s, phase=phase))

    assert after(patience_s - 1) == ""
    assert "rank 1 on n1" in after(patience_s + 2)


def test_patience_follows_the_time_of_an_iteration_and_the_first_step():
    beats = [at(0, "world 5", WAITS), at(1, "world 4")]
    assert "rank 1" in told(*beats, iteration_time_s=8.0)
    assert told(*beats, iteration_time_s=16.0) == ""
    assert told(*beats, iteration_time_s=None) == ""
    assert told(*(replace(beat, first_iteration=7) for beat in beats)) == ""
    assert "rank 1" in told(*(replace(beat, first_iteration=7, time=NOW - 200) for beat in beats))


def test_a_rank_that_computes_while_others_go_on_is_no_hang():
    assert told(at(0, "world 5", WAITS, 1.0), at(1, "world 4", "", 20.0)) == ""


def test_a_living_rank_that_waits_for_a_long_save_is_not_taken_for_stopped():
    slow = at(1, "world 4", "", 50, phase="checkpoint", written_s=20)
    assert told(at(0, "world 5", WAITS, 50, phase="checkpoint"), slow) == ""
    assert "is stopped" in told(at(0, "world 5", WAITS, 90, phase="checkpoint"), replace(slow, written=NOW - 80))


@pytest.mark.parametrize("phase", ["data", "logging", "hooks"])
def test_a_rank_that_is_stopped_between_two_steps_is_told_as_soon_as_one_in_a_step(phase):
    stopped = at(1, "world 4", "", 20, phase=phase, written_s=20)
    assert "is stopped, or its node does not answer" in told(at(0, "world 5", WAITS, 20), stopped)
    # A file server that keeps all ranks waiting.
    assert told(at(0, "world 4", "", 20, phase=phase, written_s=20), stopped) == ""


def test_ranks_that_compute_alone_have_the_patience_of_their_phase():
    alone = at(0, "world 5", "", 100, phase="evaluation")
    assert told(alone) == ""
    assert (
        told(replace(alone, time=NOW - 2400)) == "no heartbeat for 40 min: all ranks in phase evaluation of iteration 7"
    )


HUNG = (at(0, "world 5", "", 4000, written_s=3400), at(1, "world 4", "", 4000, written_s=4000))


def test_a_hang_is_told_after_the_timeout_of_the_collectives():
    error = RankError(0, "", "n0", 7, "RuntimeError", "timed out", NOW - 3400, consequence=True)
    failed = AttemptFacts(1, ending=Ending(1, "failed", None, NOW - 3380), heartbeats=HUNG, errors=(error,))
    detail = decide(facts(None, failed, iteration_time_s=0.5)).detail
    assert "after rank 1 on n1 (phase forward and backward, iteration 7) is stopped" in detail
    own = replace(error, consequence=False)
    assert "is stopped" not in decide(facts(None, replace(failed, errors=(own,)), iteration_time_s=0.5)).detail


def test_what_happened_after_the_last_sign_of_life_is_no_hang():
    """A job that is killed at its time limit: the ranks were well until its end."""
    well = (at(0, "world 5", WAITS, 100, written_s=100), at(1, "world 5", "", 100, written_s=100))
    assert decide(facts(None, ended("timeout", 137, heartbeats=well), iteration_time_s=0.5)).detail == (
        "reached its time limit; llmctl resume demo-1 continues"
    )


def test_numbers_that_cannot_be_read_are_left_out():
    values = {"rank": 1, "host": "n1", "iteration": 3, "phase": "data", "time": 5.0, "written": 7, "first_iteration": 2}
    values |= {
        "groups": {"tp": [0, 4], "dp": "x", "cp": [1], "ep": [0, None]},
        "inside": {"name": "barrier", "group": "tp"},
    }
    beat = parse_heartbeat(json.dumps(values).encode())
    assert (beat.groups, beat.inside, beat.group) == ({"tp": (0, 4)}, "barrier", "tp")
    assert (beat.written, beat.first_iteration) == (7.0, 2)
    broken = parse_heartbeat(json.dumps({**values, "groups": [], "inside": "x"}).encode())
    assert (broken.groups, broken.inside) == ({}, "")


def cut(beat, *silent, silent_s=12.0, retransmissions=5, addresses=None):
    """A heartbeat on host nN with the address 10.0.0.N, and the ranks on hosts that do not answer."""
    unanswered = tuple(Unanswered(f"10.0.0.{rank}", 900, retransmissions, silent_s) for rank in silent)
    own = (f"10.0.0.{beat.rank}",) if addresses is None else addresses
    return replace(beat, network=Network(own, unanswered), written=NOW)


def waiting(rank):
    return at(rank, "world 5", WAITS)


def test_a_node_that_answers_none_of_several_others_is_named_alone():
    star = [cut(waiting(0), 2), cut(waiting(1), 2), cut(waiting(2), 0, 1), cut(waiting(3))]
    assert told(*star) == (
        "n2 (rank 2) does not answer: n0 and n1 have sent to it for 12 s without an answer, and it to them; "
        "no progress for 20 s: all ranks are in all_reduce 5 of world"
    )
    assert causes(*star) == [2]
    ring = [cut(waiting(0)), cut(waiting(1), 2), cut(waiting(2), 0)]
    assert told(*ring).startswith(
        "n2 (rank 2) does not answer: n1 has sent to it for 12 s without an answer, and it to n0; no progress for 20 s"
    )
    assert causes(*ring) == causes(*reversed(ring)) == [2]


def test_all_ranks_of_a_node_that_does_not_answer_are_causes():
    of_n2 = [replace(cut(waiting(rank), 0, addresses=("10.0.0.2",)), host="n2") for rank in (2, 3)]
    beats = [cut(waiting(0)), cut(waiting(1), 2), *of_n2]
    assert told(*beats).startswith("n2 (ranks 2 and 3) does not answer: n1 has sent to it ")
    assert causes(*beats) == [2, 3]


def test_a_cut_between_two_nodes_names_both_and_blames_none():
    both = [cut(waiting(0), 1), cut(waiting(1), 0)]
    assert told(*both) == (
        "n0 and n1 do not reach each other: n0 has sent to n1 for 12 s without an answer, and n1 to n0; "
        "no progress for 20 s: all ranks are in all_reduce 5 of world"
    )
    assert causes(*both) == []
    # A third node that answers does not tell which of the two is at fault.
    assert causes(*both, cut(waiting(2))) == []
    one_way = told(cut(waiting(0)), cut(waiting(1), 0), cut(waiting(2)))
    assert one_way.startswith("n0 and n1 do not reach each other: n1 has sent to n0 for 12 s without an answer; ")


def test_nobody_is_blamed_if_a_network_between_many_is_cut():
    ring = [cut(waiting(0), 1), cut(waiting(1), 2), cut(waiting(2), 0)]
    assert told(*ring).startswith(
        "nodes do not reach each other for 12 s: n0 and n1; n0 and n2; n1 and n2; no progress"
    )
    assert causes(*ring) == []
    halves = [cut(waiting(0), 2), cut(waiting(1), 3), cut(waiting(2), 0), cut(waiting(3), 1)]
    assert causes(*halves) == []
    # A dead switch looks like this while the first rank collects.
    collected = [cut(waiting(0)), cut(waiting(1), 0), cut(waiting(2), 0)]
    assert told(*collected).startswith("n1 and n2 do not reach n0: they have sent to it for 12 s without an answer; no")
    sent_out = [cut(waiting(0), 1, 2), cut(waiting(1)), cut(waiting(2))]
    assert told(*sent_out).startswith("n0 does not reach n1 and n2: it has sent to them for 12 s without an answer; no")
    assert causes(*collected) == causes(*sent_out) == []


def test_a_rank_whose_messages_are_lost_is_not_behind_by_its_own_fault():
    """n1 has entered the next collective; n0 and n2 wait for messages in the one before, because n2 is cut off."""
    beats = [cut(at(0, "world 4", WAITS)), cut(at(1, "world 5", WAITS), 2), cut(at(2, "world 4", WAITS), 0)]
    assert causes(*(replace(beat, network=Network()) for beat in beats)) == [0, 2]
    assert told(*beats).startswith("n2 (rank 2) does not answer: ") and told(*beats).endswith("; no progress for 20 s")
    assert causes(*beats) == [2]


@pytest.mark.parametrize(
    "beats",
    [
        [cut(waiting(0), 1, silent_s=2.0), cut(waiting(1), 0, silent_s=2.0)],
        [cut(waiting(0), 1, retransmissions=1), cut(waiting(1))],
        [cut(waiting(0), 9), cut(waiting(1))],
        [cut(waiting(0), 1, addresses=("10.0.0.0", "10.0.0.1")), cut(waiting(1))],
        [replace(cut(waiting(0), 1), host="n0"), replace(cut(waiting(1)), host="n0")],
    ],
    ids=["a moment", "one lost packet", "a machine without ranks", "an address of several hosts", "one host"],
)
def test_other_silent_connections_are_no_cut(beats):
    assert told(*beats) == "no progress for 20 s: all ranks are in all_reduce 5 of world"


def test_a_stopped_rank_is_told_before_its_connections():
    beats = [cut(waiting(0), 1), replace(cut(waiting(1)), written=NOW - 20)]
    assert "is stopped, or its node does not answer" in told(*beats)
    assert causes(*beats) == [1]


def test_connections_that_cannot_be_read_are_left_out():
    values = {"rank": 1, "host": "n1", "iteration": 3, "phase": "data", "time": 5.0}
    network = {"addresses": ["10.0.0.1", 7], "unanswered": [["10.0.0.2", 900, 5, 12.5], ["10.0.0.3", None, 5, 1], 7]}
    beat = parse_heartbeat(json.dumps({**values, "network": network}).encode())
    assert beat.network == Network(("10.0.0.1",), (Unanswered("10.0.0.2", 900, 5, 12.5),))
    for broken in (None, [], {"addresses": 3, "unanswered": "x"}):
        assert parse_heartbeat(json.dumps({**values, "network": broken}).encode()).network == Network()
