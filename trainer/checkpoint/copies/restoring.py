"""The state of all ranks from their copies: each rank reads its own, or gets it from a rank that holds a copy."""

from __future__ import annotations

import json
from functools import partial
from operator import ne
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer.checkpoint.checksums import checksums_of
from trainer.checkpoint.copies.choice import Choice, Found, choose
from trainer.checkpoint.copies.folder import CopyName
from trainer.checkpoint.copies.messages import gather_texts, receive_into, send
from trainer.checkpoint.copies.state import put_back, stage_state
from trainer.checkpoint.copies.state_copies import CPU, StateCopies
from trainer.checkpoint.saving.host_copy import copied_bytes
from trainer.distributed.collectives import first_text

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress


class Limits(NamedTuple):
    """Copies that may be used: newer than ``iteration``, and made by the attempt ``attempt`` or a later one."""

    iteration: int
    attempt: int


def restore_from_copies(
    copies: StateCopies,
    limits: Limits,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    progress: TrainingProgress,
) -> tuple[Choice | None, list[str]]:
    """Put back the newest sound state; and sentences on copies that are damaged or missing. Collective: all ranks.

    Args:
        copies: of the rank.
        limits: the same on all ranks.
        model: receives the state.
        optimizer: receives the state.
        progress: receives that of the run.
    """
    told: list[str] = []
    staged = stage_state(model, optimizer, progress)
    size = copied_bytes(staged)
    copies.memory.reserve(size)
    while True:
        headers = _usable(copies, limits)
        choice, reason = choose(*_gather(copies, headers))
        if choice is None:
            return None, [*told, reason] if reason else told
        header, problems = _fetch(copies, choice, headers, copies.memory.content(size))
        told += problems
        if not problems:
            break
    values = json.loads(first_text(json.dumps(header) if staged.mesh.rank == 0 else "", CPU, copies.group))
    put_back(staged, copies.memory.places(staged), model, optimizer, values)
    progress.load(values["progress"])
    return choice, told


def _usable(copies: StateCopies, limits: Limits) -> dict[CopyName, dict[str, Any]]:
    """Headers of the copies in this rank's folder that may be used."""
    found = copies.folder.headers() if copies.folder is not None else {}
    return {
        name: header
        for name, header in found.items()
        if (header["run"], header["submission"]) == (copies.run, copies.submission)
        and name.iteration > limits.iteration
        and header["attempt"] >= limits.attempt
    }


def _gather(copies: StateCopies, headers: dict[CopyName, dict[str, Any]]) -> tuple[list[list[Found]], list[str]]:
    """Of each rank, the copies that it finds, and its digest."""
    own = [
        Found(name.rank, name.iteration, each["attempt"], each["digest"], name.holder) for name, each in headers.items()
    ]
    answers = [json.loads(text) for text in gather_texts(json.dumps([own, copies.digest]), copies.group)]
    return [[Found(*each) for each in found] for found, _ in answers], [mark for _, mark in answers]


def _fetch(
    copies: StateCopies, choice: Choice, headers: dict[CopyName, dict[str, Any]], target: Tensor
) -> tuple[dict[str, Any], list[str]]:
    """Bring this rank's state to ``target``; its header, and a sentence on each damaged copy, which is deleted.

    All ranks go through the list in its order, so that none waits for one that waits for it.
    """
    rank = torch.distributed.get_rank()
    header: dict[str, Any] = {}
    problem = ""
    for owner, (reader, found) in enumerate(choice.sources):
        name = CopyName(found.rank, found.iteration, found.holder)
        if rank == reader:
            known, lack = headers[name], ""
            place = target if owner == rank else torch.empty(known["size"], dtype=torch.uint8)
            lack = _read(copies, name, place)
            if owner != rank:
                _send(copies, owner, {**known, "lack": lack}, place)
        elif rank == owner:
            known = _receive(copies, reader, target)
            lack = known.pop("lack")
        if rank == owner:
            header = known
            problem = lack or _damage(known, target)
    answers = gather_texts(problem, copies.group)
    sentences = []
    for owner, (reader, found) in enumerate(choice.sources):
        if answers[owner]:
            name = CopyName(found.rank, found.iteration, found.holder)
            sentences.append(f"the copy {name} in {copies.parent}, read by rank {reader}, {answers[owner]}")
            if rank == reader and copies.folder is not None:
                copies.folder.remove(partial(ne, name))
    # Nobody may look again before the damaged ones are gone.
    gather_texts("", copies.group)
    return header, sentences


def _read(copies: StateCopies, name: CopyName, target: Tensor) -> str:
    assert copies.folder is not None
    try:
        copies.folder.read_into(name, target.numpy().data)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ""


def _damage(header: dict[str, Any], data: Tensor) -> str:
    if header["size"] != data.numel():
        return f"has {header['size']:,} bytes instead of {data.numel():,}"
    return "" if checksums_of(data.numpy().data) == header["checksums"] else "has altered bytes"


def _send(copies: StateCopies, owner: int, header: dict[str, Any], data: Tensor) -> None:
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    send(torch.tensor([text.numel()]).view(torch.uint8), owner, copies.group)
    send(text, owner, copies.group)
    send(data, owner, copies.group)


def _receive(copies: StateCopies, reader: int, target: Tensor) -> dict[str, Any]:
    length = torch.empty(8, dtype=torch.uint8)
    receive_into(length, reader, copies.group)
    text = torch.empty(int(length.view(torch.int64)), dtype=torch.uint8)
    receive_into(text, reader, copies.group)
    header: dict[str, Any] = json.loads(text.numpy().tobytes())
    # A size that differs cannot come with an equal digest.
    receive_into(target, reader, copies.group)
    return header
