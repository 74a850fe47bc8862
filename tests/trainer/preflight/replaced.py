"""Measurements of the preflight that tell of a fault, by the name of the fault."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event

from trainer.preflight.facts import FolderFacts

_DAY_S = 86400.0


def slow(tools):
    return replace(tools, speed=lambda device, is_again: tools.speed(device, is_again) / 10)


def slow_at_first(tools):
    return replace(tools, speed=lambda device, is_again: tools.speed(device, is_again) / (1 if is_again else 10))


def fewer_devices(tools):
    return replace(tools, devices=lambda _, ranks_here: ranks_here - 1)


def broken_device(tools):
    return replace(tools, reported=lambda _: ("a row of its memory could not be remapped", ""))


def _folders(problem, *, is_full):
    return lambda folders, _: tuple(FolderFacts(name, str(path), problem, is_full) for name, path in folders)


def unwritable(tools):
    return replace(tools, write=_folders("[Errno 13] Permission denied", is_full=False))


def full_disk(tools):
    return replace(tools, write=_folders("[Errno 28] No space left on device", is_full=True))


def failing(tools):
    def speed(*_):
        raise OSError("the device is gone")

    return replace(tools, speed=speed)


def hanging(tools):
    """As with a file system that does not answer; the process stays."""
    return replace(tools, kind=lambda _: str(Event().wait()))


def wrong_sums(tools):
    """This rank adds something else, also alone."""
    return replace(tools, reduce=lambda *arguments: tools.reduce(*arguments) or "7 of 262144 sums are wrong")


def no_partner(tools):
    """This rank does not come to a sum with others, which wait for it."""

    def reduce(store, ranks, rank, device, seconds):
        return tools.reduce(store, ranks, rank, device, seconds) if len(ranks) == 1 else "connection refused"

    return replace(tools, reduce=reduce)


def old_clock(tools):
    return replace(tools, clock=lambda: time.time() - _DAY_S)


def little_memory(tools):
    return replace(tools, host_memory=lambda: 2.0**20)
