"""Collections of garbage in a training loop: what is collected, and when."""

import gc
import weakref

import pytest

from trainer.planning.command_line import build_train_config, parse_command_line
from trainer.process.garbage import GarbageCollector, importing_torch


class Node:
    """Refers to itself: only a collection frees it."""

    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def automatic_collections():
    gc.enable()
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def is_collected(call):
    """True if ``call`` frees a cycle that is garbage before it."""
    there = weakref.ref(Node())
    call()
    found = there() is None
    gc.collect()
    return found


def evaluate(garbage):
    with garbage.beside_evaluation():
        pass


def test_objects_that_exist_at_the_start_are_frozen():
    first = Node()
    first_is_there = weakref.ref(first)
    with GarbageCollector(is_manual=False, interval=0, collects_at_evaluations=True):
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
        del first
        gc.collect()
        assert first_is_there() is not None
        assert is_collected(gc.collect)
    gc.collect()
    assert first_is_there() is None


def test_what_an_import_makes_is_never_visited():
    with importing_torch():
        assert not gc.isenabled()
        made = weakref.ref(Node())
    try:
        assert gc.isenabled() and gc.get_freeze_count() > 1000
        assert is_collected(gc.collect) and made() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert made() is None


def test_an_import_does_not_enable_collections_that_are_off():
    gc.disable()
    try:
        with importing_torch():
            pass
        assert not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()


def test_frozen_objects_are_freed_when_nothing_refers_to_them():
    class Plain:
        pass

    first = Plain()
    first_is_there = weakref.ref(first)
    with GarbageCollector(is_manual=False, interval=0, collects_at_evaluations=True):
        del first
        assert first_is_there() is None


def test_collections_are_at_the_interval():
    with GarbageCollector(is_manual=True, interval=3, collects_at_evaluations=True) as garbage:
        assert not gc.isenabled()
        found = [number for number in range(1, 8) if is_collected(lambda number=number: garbage.after_step(number))]
        assert found == [3, 6]
        assert is_collected(lambda: evaluate(garbage))


def test_without_an_interval_only_evaluations_collect():
    with GarbageCollector(is_manual=True, interval=0, collects_at_evaluations=False) as garbage:
        assert not any(is_collected(lambda number=number: garbage.after_step(number)) for number in range(4))
        assert not is_collected(lambda: evaluate(garbage))


def test_python_collects_unless_it_is_manual():
    with GarbageCollector(is_manual=False, interval=1, collects_at_evaluations=True) as garbage:
        gc.disable()
        try:
            assert not is_collected(lambda: garbage.after_step(1))
            assert not is_collected(lambda: evaluate(garbage))
        finally:
            gc.enable()


def test_both_sides_of_an_evaluation_collect():
    with GarbageCollector(is_manual=True, interval=0, collects_at_evaluations=True) as garbage:
        before = weakref.ref(Node())
        with garbage.beside_evaluation():
            assert before() is None
            inside = weakref.ref(Node())
            assert inside() is not None
        assert inside() is None


def test_megatron_s_flags_are_read():
    flags = ["--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "6", "--seq-length", "8"]
    flags += ["--train-iters", "1", "--lr", "1e-3", "--mock-data"]
    found = build_train_config(parse_command_line([*flags, "--manual-gc", "--manual-gc-interval", "5"])).training
    assert (found.manual_gc, found.manual_gc_interval, found.manual_gc_eval) == (True, 5, True)
    assert not build_train_config(parse_command_line([*flags, "--no-manual-gc-eval"])).training.manual_gc_eval
