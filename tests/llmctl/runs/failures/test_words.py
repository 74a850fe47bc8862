"""The cause of a failed command in its output. Reports as torchrun of torch 2.13 prints them."""

import pytest

from llmctl.runs.failures.words import TRACEBACK_LINES, failure_words

TORCHRUNS_OWN = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
x.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11390)  (SIGTERM)
------------------------------------------------------------
"""
ROOT_CAUSE = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_23:56:04
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 11389)
  error_file: /tmp/torchelastic_gdi4bmkp/none_wke2dxt8/attempt_0/0/error.json
  traceback : Traceback (most recent call last):
    File "/w/r.py", line 4, in f
      raise ValueError("the optimizer is odd")
  ValueError: the optimizer is odd
"""
REPORT = f"{TORCHRUNS_OWN}{ROOT_CAUSE}============================================================\n"


def trace(error, prefix=""):
    lines = ["Traceback (most recent call last):", '  File "x.py", line 6, in <module>', "    f()", error]
    return [prefix + line for line in lines]


def test_the_last_traceback_of_one_program():
    lines = ["step 1", *trace("OSError: retried"), "step 2", *trace("ValueError: odd"), "leaving"]
    assert failure_words(lines) == trace("ValueError: odd")
    assert failure_words(["step 1", "Killed"]) == []


@pytest.mark.parametrize("prefixes", [("[rank0]: ", "[rank1]: "), ("[default0]:", "[default1]:"), ("", "")])
def test_the_traceback_of_torchruns_root_cause_and_its_report(prefixes):
    late, first = trace("RuntimeError: Connection closed by peer", prefixes[0]), trace("ValueError: odd", prefixes[1])
    # The lines of ranks mix.
    pairs = [line for pair in zip(first, late, strict=True) for line in pair] if prefixes[0] else [*first, *late]
    words = failure_words([*pairs, *REPORT.splitlines()])
    assert words == [*first, *ROOT_CAUSE.splitlines()]


def test_a_long_traceback_keeps_its_beginning_and_its_end():
    calls = [f'  File "x.py", line {number}, in f' for number in range(900)]
    words = failure_words(["Traceback (most recent call last):", *calls, "RecursionError: too deep"])
    assert len(words) == TRACEBACK_LINES
    assert words[0].startswith("Traceback") and words[-1] == "RecursionError: too deep"
    assert words[-2] == calls[-1]


def test_a_traceback_cut_by_a_kill_is_left_out():
    assert failure_words(trace("ValueError: odd")[:-1]) == []
