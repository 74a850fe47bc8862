"""Hooks of the runs under test: a steady pace, a slow end, and the faults that rank 1 makes by itself.

The runs find this file by ``job.code``. ``FAULT`` names the fault; it happens once, in the first attempt.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

FAULT_AT = 25
"""Trained steps before the fault."""
HOLD_FROM, HOLD_S = 40, 6.0
"""Trained steps after which the first attempt trains slowly, and seconds of a step, until a fault from outside is over.
Ranks that stood still would look as if they hung."""
PACE_S = 0.04
SLOW_S = 0.5
ALLOCATED = 2**29
"""Bytes; more than a control group of ``acts.limit_memory`` gets."""

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_RUN = Path(os.environ.get("LLMCTL_RUN_DIR", "."))
_IS_FIRST = os.environ.get("LLMCTL_ATTEMPT") == "1"
_FAULT = os.environ.get("FAULT", "")
if _FAULT != "crash-loop" and not _IS_FIRST:
    _FAULT = ""
if _FAULT == "config-error" and "RANK" in os.environ:
    (_RUN / "injected").touch()
    raise RuntimeError("the fault of the test")
_at = [0, 0]
"""Completed iterations, and losses that were computed since."""


def rate(step, config):
    """Constant learning rate, at a steady pace."""
    time.sleep(PACE_S)
    if _is_culprit() and step == FAULT_AT and _FAULT in _ACTS:
        (_RUN / "injected").touch()
        _ACTS[_FAULT]()
    if _is_culprit() and _FAULT == "slow" and step >= FAULT_AT:
        (_RUN / "injected").touch()
        time.sleep(SLOW_S)
    end = time.monotonic() + HOLD_S
    while _IS_FIRST and step >= HOLD_FROM and "HELD" in os.environ and not (_RUN / "go").exists():
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    if _is_culprit() and (_RUN / "allocate").exists():
        bytearray(ALLOCATED).replace(b"\0", b"\1")
    return config.optimizer.lr


def loss(logits, labels, config):  # noqa: ARG001
    """Cross entropy of each token; not finite where the fault is one of numbers."""
    found = cross_entropy(logits.float(), labels, reduction="none")
    at, before = _at
    _at[1] += 1
    if not _is_culprit() or at < FAULT_AT:
        return found
    is_bad = {
        "nan": at == FAULT_AT,
        "nan-once": at == FAULT_AT and before == 0,
        "nan-forever": True,
    }.get(_FAULT, False)
    if is_bad:
        (_RUN / "injected").touch()
        found = found * float("nan")
    return found * 1000.0 if _FAULT in ("spike", "roll-back") and at == FAULT_AT else found


def after(facts):
    """Count the iterations, and flip a bit of a weight after that of the fault."""
    _at[:] = [facts.iteration, 0]
    if _is_culprit() and _FAULT == "wrong-bit" and facts.iteration == FAULT_AT:
        (_RUN / "injected").touch()
        weight = facts.parameters[sorted(facts.parameters)[0]].detach()
        weight.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def _is_culprit():
    return next((os.environ[name] for name in _RANK if name in os.environ), "") == "1"


def _fail():
    raise RuntimeError("the fault of the test")


def _jump():
    true_time = time.time
    time.time = lambda: true_time() + 3600


def _allocate():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    bytearray(2**40)


_ACTS = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "error": _fail,
    "crash-loop": _fail,
    "clock": _jump,
    "memory": _allocate,
    "exit": lambda: os._exit(7),
}
