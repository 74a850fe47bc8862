"""Broken packages: detection of the unrelated apex by its files, and failing programs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.ops.build.packages import unrelated_apex, use_problem

# Folders of apex 0.9.10dev on the index, and of NVIDIA's apex in its repository.
WEB_TOOLKIT = ("ext", "lib", "locale", "models", "templates", "views")
NVIDIA = ("contrib", "multi_tensor_apply", "normalization", "optimizers", "transformer")


@pytest.fixture
def install(tmp_path):
    def make(folders):
        for folder in folders:
            (tmp_path / "apex" / folder).mkdir(parents=True)
        # An import fails.
        (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('apex was imported')\n")
        return [str(tmp_path)]

    return make


def test_the_web_toolkit_is_recognised_with_its_cure(install):
    sentence = unrelated_apex(install(WEB_TOOLKIT))
    assert sentence is not None and "\n" not in sentence
    assert "pip uninstall apex" in sentence and "source" in sentence


def test_nvidias_apex_and_none_at_all_are_left_alone(install, tmp_path):
    assert unrelated_apex([str(tmp_path / "nothing")]) is None
    assert unrelated_apex(install(NVIDIA)) is None


def test_a_run_says_it_once_and_trains_all_the_same(install, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\n"
        "training: {train_iters: 1, seq_length: 8, eval_iters: 0, device: cpu}\n"
        "optimizer: {lr: 0.001}\n"
        "data: {mock_data: true}\n"
    )
    packages = install(WEB_TOOLKIT)[0]
    code = f"import sys; sys.path.append({packages!r}); from trainer.__main__ import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "pretrain", "--config", str(tmp_path / "config.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("pip uninstall apex") == 1
    assert "completed at iteration 1" in ended.stdout


def test_a_path_with_ends_of_lines_gives_one_line(tmp_path):
    folder = tmp_path / "site\n\x1b[31mof somebody" / "apex"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    assert (unrelated_apex([str(folder.parent)]) or "\n").isprintable()


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


def test_what_ends_well_is_no_problem():
    assert use_problem("import json", 60) is None


def test_a_long_last_word_gives_one_short_line():
    failed = use_problem("raise ValueError('no ' * 1_000_000 + '\\x1b[31m')", 60) or ""
    assert failed.isprintable() and 0 < len(failed) < 2000


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    note = tmp_path / "child"
    program = (
        f"import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({str(note)!r}, 'w').write(str(child.pid))"
        "\nchild.wait()\n"
    )
    began = time.monotonic()
    assert "using it took longer than 5 s" in (use_problem(program, 5) or "")
    assert time.monotonic() - began < 60
    child = int(note.read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
