"""Broken packages: programs that fail, crash or hang."""

from pathlib import Path

import pytest

from tests.waiting import wait_for
from trainer.ops.build.packages import use_problem


@pytest.mark.parametrize(
    ("program", "meaning"),
    [
        ("raise ImportError('a.so: undefined symbol: _ZN3c105ErrorC2Ev')", "for another torch than"),
        ("raise OSError('libcudart.so.12: cannot open shared object file: No such file')", "libcudart.so.12 is not"),
        ("raise RuntimeError('no kernel image is available')", "not compiled for the GPUs here"),
        ('raise OSError("/lib/libc.so.6: version `GLIBC_2.99\' not found")', "built on a newer Linux"),
        ("raise OSError('cudnn.h: No such file or directory')", "cuDNN is not found"),
        ("raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')", "one process in at a time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "using it ended in SIGSEGV"),
        ("import os; os._exit(0)", "using it ended with exit code 0"),
        ("raise ValueError('strange')", "using it fails: ValueError: strange"),
    ],
)
def test_failures_are_explained(program, meaning):
    assert meaning in (use_problem(program, 60) or "")


def test_a_successful_program_is_no_problem():
    assert use_problem("import json", 60) is None


def test_a_long_error_gives_one_short_line():
    failed = use_problem("raise ValueError('no ' * 1_000_000 + '\\x1b[31m')", 60) or ""
    assert failed.isprintable() and 0 < len(failed) < 2000


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    note = tmp_path / "child"
    program = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '6000'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\nchild.wait()\n"
    )
    limit_s = 2
    # On a busy machine the time may be over before the program begins.
    while not note.exists() or not note.read_text():
        limit_s *= 2
        assert f"using it took longer than {limit_s} s" in (use_problem(program, limit_s) or "")
    child = int(note.read_text())
    wait_for(lambda: not is_running(child), "the end of the program's child")


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
