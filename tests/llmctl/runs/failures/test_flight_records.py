"""Flight records of torch: who holds the others up."""

import pickle

import pytest

from llmctl.runs.failures.flight_records import FlightRecordError, find_guilty, parse_record

WORLD, TP, PP = "0", "1", "2"


def entry(group, number, name="all_reduce", *, ended=False):
    is_message = name.startswith(("send", "recv"))
    return {
        "process_group": (group, f"words of {group}"),
        "collective_seq_id": 0 if is_message else number,
        "p2p_seq_id": number if is_message else 0,
        "profiling_name": f"nccl:{name}",
        "state": "completed" if ended else "scheduled",
        "retired": False,
        "is_p2p": is_message,
    }


def record(rank, *entries, groups):
    config = {name: {"name": name, "desc": f"words of {name}", "ranks": str(ranks)} for name, ranks in groups.items()}
    return parse_record(rank, pickle.dumps({"version": "2.10", "pg_config": config, "entries": list(entries)}))


def ranks_of(guilty):
    return [(one.rank, one.is_stuck_device) for one in guilty]


def test_the_rank_that_has_not_entered_a_collective_is_named_with_those_that_wait():
    groups = {WORLD: [0, 1, 2]}
    (one,) = find_guilty(
        [
            record(0, entry(WORLD, 7, ended=True), entry(WORLD, 8), groups=groups),
            record(1, entry(WORLD, 7, ended=True), groups=groups),
            record(2, entry(WORLD, 8), groups=groups),
        ]
    )
    assert (one.rank, one.waiting, one.operation.number) == (1, (0, 2), 8)
    assert (one.operation.name, one.is_stuck_device) == ("all_reduce", False)


def test_a_rank_that_waits_itself_is_no_cause():
    # 0 waits for 1 in the world, 1 for 2 in its own group: 2 is the cause.
    found = find_guilty(
        [
            record(0, entry(WORLD, 4), groups={WORLD: [0, 1, 2]}),
            record(1, entry(TP, 9), groups={WORLD: [0, 1, 2], TP: [1, 2]}),
            record(2, groups={WORLD: [0, 1, 2], TP: [1, 2]}),
        ]
    )
    assert ranks_of(found) == [(2, False)]


def test_a_device_that_has_not_ended_what_the_others_have_is_stuck():
    groups = {TP: [0, 1]}
    stuck = record(0, entry(TP, 5), entry(TP, 6), entry(TP, 7), groups=groups)
    other = record(1, entry(TP, 7), groups=groups)
    (one,) = find_guilty([stuck, other])
    assert (one.rank, one.operation.number, one.is_stuck_device) == (0, 5, True)
    # The source of a broadcast may end it before the others.
    early = [record(0, entry(TP, 5, "broadcast"), groups=groups), record(1, entry(TP, 6, "broadcast"), groups=groups)]
    assert ranks_of(find_guilty(early)) == [(0, False)]


def test_a_rank_without_a_record_is_named():
    groups = {WORLD: [0, 1]}
    assert ranks_of(find_guilty([record(0, entry(WORLD, 1), groups=groups)])) == [(1, False)]


def test_messages_count_if_no_collective_tells():
    groups = {PP: [4, 5, 6]}
    records = [
        record(4, entry(PP, 3, "recv 0<-1"), groups=groups),
        record(5, entry(PP, 3, "recv 1<-2"), groups=groups),
        record(6, groups=groups),
    ]
    assert ranks_of(find_guilty(records)) == [(6, False)]


def test_ranks_that_wait_for_each_other_alone_name_nobody():
    groups = {WORLD: [0, 1]}
    assert find_guilty([record(rank, entry(WORLD, 3), groups=groups) for rank in (0, 1)]) == []
    assert find_guilty([record(rank, groups=groups) for rank in (0, 1)]) == []


class _Harmful:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickle.dumps(_Harmful()), "it would run builtins.print"),
        (b"", "EOFError"),
        (b"not a pickle", "not a flight record"),
        (pickle.dumps({"entries": []}), "pg_config"),
        (pickle.dumps({"pg_config": {}, "entries": [{"state": "scheduled"}]}), "KeyError"),
    ],
)
def test_a_file_that_is_no_record_runs_nothing_and_is_refused(data, words, capsys):
    with pytest.raises(FlightRecordError, match=words):
        parse_record(0, data)
    assert capsys.readouterr().out == ""
