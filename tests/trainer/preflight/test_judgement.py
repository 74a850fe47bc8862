"""The judgement of the preflight: tables of facts, hostile values, and any bad node of up to nine."""

from __future__ import annotations

import itertools
import json

import pytest

from trainer.preflight.facts import FolderFacts, RankFacts, nodes_of
from trainer.preflight.judgement import Trial, judge
from trainer.preflight.measuring import read_reported, write_folder
from trainer.preflight.pairs import judge_trials, rounds

GIB = 2.0**30
SOUND = {"device": "GPU X", "is_gpu": True, "devices": 2, "devices_asked": 2, "speed": 4e14, "memory_free": 79 * GIB}
NOTHING = FolderFacts("run directory", "/runs/a")


def facts_of(changes, nodes=4, per_node=2):
    """Facts of all ranks: sound ones, with ``changes`` by rank."""
    found = []
    for rank in range(nodes * per_node):
        values = {**SOUND, "host_memory_free": 500 * GIB, "clock": 1e9, "folders": (NOTHING,), **changes.get(rank, {})}
        found.append(RankFacts(rank, f"n{rank // per_node}", rank % per_node, **values))
    return found


def denied(rank, problem="[Errno 13] Permission denied", *, is_full=False):
    return {rank: {"folders": (FolderFacts("run directory", "/runs/a", problem, is_full),)}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({5: {"speed": 2.7e14}}, [(5, True, ("n2",), "270 TFLOP/s, 0.68 of the median, expected 0.7 of 400 TFLOP/s")]),
        ({5: {"speed": 2.9e14}}, [(5, False, (), "290 TFLOP/s, 0.72 of the median, expected 0.85 of 400 TFLOP/s")]),
        ({5: {"speed": 3.5e14}}, []),
        ({5: {"speed": 9e14}}, []),
        ({5: {"speed": None}}, []),
        ({6: {"memory_free": 40 * GIB}}, [(6, True, ("n3",), "40.0 GiB, expected about 79.0 GiB; another process")]),
        ({2: {"devices": 1}, 3: {"devices": 1}}, [(2, True, ("n1",), "number of GPUs: 1, expected 2, as asked")]),
        ({7: {"device": "GPU Y"}}, [(7, False, (), "device: GPU Y, expected GPU X, as 7 of 8 ranks")]),
        ({4: {"clock": 1e9 + 31}}, [(4, False, (), "clock: 31 s ahead, expected within 30 s of the median")]),
        ({4: {"clock": 1e9 - 29}}, []),
        ({0: {"host_memory_free": 200 * GIB}}, [(0, False, (), "200.0 GiB, expected about 500.0 GiB")]),
        (
            denied(2),
            [(2, True, ("n1",), "run directory /runs/a: [Errno 13] Permission denied, expected a folder that")],
        ),
        ({3: {"broken": "a row"}}, [(3, True, ("n1",), "errors that the GPU reports: a row, expected none")]),
        ({3: {"worn": "2 errors"}}, [(3, False, (), "errors that the GPU reports: 2 errors, expected none")]),
        ({3: {"problem": "no end after 10 s"}}, [(3, True, ("n1",), "measurements: no end after 10 s")]),
        (
            {1: {"speed": 1e14}, 6: {"clock": 0.0}, 7: {"broken": "a row"}},
            [(1, True, ("n0",), "100 TFLOP/s"), (7, True, ("n3",), "a row"), (6, False, (), "behind")],
        ),
    ],
)
def test_findings(changes, expected):
    found = judge(facts_of(changes))
    assert [(one.rank, one.is_fatal, one.culprits) for one in found] == [one[:3] for one in expected]
    assert all(words in one.sentence() for one, (*_, words) in zip(found, expected, strict=True))


def test_a_full_disk_and_a_folder_that_nobody_can_write_are_no_fault_of_a_node():
    everywhere = {rank: denied(rank)[rank] for rank in range(8)}
    (found,) = judge(facts_of(everywhere))
    assert found.is_fatal and found.culprits == () and "correct its owner or mode" in found.remedy
    for full in (denied(6, "[Errno 28] No space left on device", is_full=True), denied(1, "Quota", is_full=True)):
        (found,) = judge(facts_of({**denied(2), **full}))
        assert found.is_fatal and found.culprits == () and found.remedy.startswith("make room there")


@pytest.mark.parametrize(("free", "told"), [(None, 0), (12 * GIB, 0), (3 * GIB, 1), (0.0, 1)])
def test_too_little_room_for_a_checkpoint_is_a_remark_on_the_node_with_the_least(free, told):
    folders = {
        rank: {"folders": (FolderFacts("checkpoint folder", "/big", free=free and free - rank),)} for rank in (0, 2)
    }
    found = judge(facts_of(folders), save_bytes=11 * GIB)
    assert len(found) == told and not any(one.is_fatal or one.culprits for one in found)
    assert all("room in the checkpoint folder /big" in one.sentence() for one in found)
    assert judge(facts_of(folders)) == []


def test_too_many_devices_asked_of_all_nodes_is_no_fault_of_a_node():
    found = judge(facts_of({rank: {"devices": 1} for rank in range(8)}))
    assert len(found) == 4 and all(one.is_fatal and one.culprits == () for one in found)


def test_half_of_two_nodes_is_slow():
    assert [one.culprits for one in judge(facts_of({2: {"speed": 2e14}, 3: {"speed": 2e14}}, nodes=2))] == [("n1",)] * 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '"n0"', "{", "7", "{}", '{"rank": 0}', '{"rank": 1, "host": "n0"}'),
        *('{"rank": 0, "host": 3}', '{"rank": "0", "host": "n0"}'),
    ],
)
def test_texts_that_are_not_facts(text):
    assert RankFacts.from_text(text, 0) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "7", True, [], {}, None])
def test_hostile_values_are_unknown_and_blame_nobody(value):
    keys = ("speed", "memory_free", "host_memory_free", "clock", "devices", "folders", "broken")
    hostile = {"rank": 0, "host": "n0", "device": "GPU X", "is_gpu": True, **dict.fromkeys(keys[:-1], value)}
    read = RankFacts.from_text(json.dumps(hostile), 0)
    assert read is not None and read.speed is None and read.clock is None and read.folders == ()
    assert [one for one in judge([read, *facts_of({})[1:]]) if one.culprits] == []


def test_facts_survive_their_text():
    for one in facts_of(denied(3)):
        assert RankFacts.from_text(one.as_text(), one.rank) == one


def test_ranks_of_several_nodes_of_one_machine_are_told_apart():
    facts = [RankFacts(rank, "here", rank % 2) for rank in range(4)]
    assert nodes_of(facts) == {0: 0, 1: 0, 2: 1, 3: 1}
    cyclic = [RankFacts(rank, f"n{rank % 2}", rank // 2) for rank in range(4)]
    assert nodes_of(cyclic) == {0: 0, 1: 1, 2: 0, 3: 1}


@pytest.mark.parametrize("nodes", [*range(1, 10), 1000])
def test_nobody_meets_twice_or_two_at_once(nodes):
    alone, *pairs = rounds(nodes)
    assert alone == [(node,) for node in range(nodes)]
    assert all(len(set(itertools.chain(*each))) == 2 * len(each) >= nodes - 1 for each in pairs)
    met = list(itertools.chain(*pairs))
    assert len(met) == len(set(met)) and len(pairs) == min(3, nodes - 1 + nodes % 2 if nodes > 1 else 0)


def trial(group, bad, links=()):
    """An all-reduce that fails if its group holds a bad node beside another, or the two ends of a bad link."""
    fails = (len(group) > 1 and bad & set(group)) or set(group) in links
    return Trial(group, {node: "no end after 3 s" if fails else "" for node in group}, group)


HOSTS = {node: (node, f"n{node}") for node in range(9)}


@pytest.mark.parametrize(("nodes", "bad"), [(nodes, bad) for nodes in range(3, 10) for bad in range(nodes)])
def test_the_bad_node_is_named_and_no_partner(nodes, bad):
    whole = trial(tuple(range(nodes)), {bad})
    trials = [trial(group, {bad}) for each in rounds(nodes) for group in each]
    (found,) = judge_trials(whole, trials, HOSTS)
    assert (found.rank, found.culprits) == (bad, (f"n{bad}",)) and found.is_fatal
    assert "with node n" in found.what and found.measured == "no end after 3 s"


def test_a_node_that_fails_alone_is_named_without_its_partners():
    alone = Trial((1,), {1: "3 of 262144 sums are wrong"}, (1,))
    trials = [trial((0,), set()), alone, trial((0, 1), {1})]
    (found,) = judge_trials(trial((0, 1), {1}), trials, HOSTS)
    assert found.culprits == ("n1",) and found.what.endswith("of the node alone")


def test_two_nodes_that_cannot_reach_each_other_are_both_told_and_none_is_blamed():
    whole = trial((0, 1), {1})
    trials = [trial(group, {1}) for each in rounds(2) for group in each]
    (found,) = judge_trials(whole, trials, HOSTS)
    assert found.culprits == () and "node n0 (rank 0): sum over ranks (all-reduce) with node n1: no end" in (
        found.sentence()
    )


def test_a_bad_link_between_sound_nodes_blames_none():
    link = ({0, 3},)
    trials = [trial(group, set(), link) for each in rounds(4) for group in each]
    (found,) = judge_trials(Trial((), {0: "late", 1: "", 2: "", 3: "late"}, (0, 1, 2, 3)), trials, HOSTS)
    assert found.culprits == () and found.what.endswith("with node n3")


def test_a_failure_of_all_alone_is_told_of_the_first_rank_without_an_answer():
    trials = [trial(group, set()) for each in rounds(4) for group in each]
    (found,) = judge_trials(Trial((), {0: "", 1: "", 3: ""}, (0, 1, 2, 3)), trials, HOSTS)
    assert (found.rank, found.host, found.measured, found.culprits) == (2, "n2", "no answer", ())


@pytest.mark.parametrize(
    ("line", "broken", "worn"),
    [
        ("0, No, No, No\n", "", ""),
        ("0, [N/A], [N/A], [N/A]", "", ""),
        ("3, No, No, No", "", "3 uncorrected ECC errors since the last reset"),
        ("0, Yes, No, No", "a row of its memory could not be remapped", ""),
        ("0, No, Yes, No", "", "memory that a reset of the GPU would replace"),
        ("[N/A], No, No, Yes", "", "memory that a reset of the GPU would replace"),
        *((text, "", "") for text in ("", "No devices were found", ",,,", "1,2,3", "x" * 10000)),
    ],
)
def test_errors_that_a_gpu_reports(line, broken, worn):
    assert read_reported(line) == (broken, worn)


def test_a_real_file_is_written_and_removed(tmp_path):
    written = write_folder("run directory", tmp_path, 0)
    assert written == FolderFacts("run directory", str(tmp_path), free=written.free) and written.free
    later = tmp_path / "later" / "checkpoints"
    assert write_folder("checkpoint folder", later, 0).problem == ""
    assert list(tmp_path.iterdir()) == []
    found = write_folder("checkpoint folder", type(tmp_path)("/proc/1"), 0)
    assert found.problem.startswith("[Errno ") and not found.is_full
    (tmp_path / "file").write_text("")
    assert write_folder("checkpoint folder", tmp_path / "file" / "deep", 0).problem == "[Errno 20] Not a directory"
