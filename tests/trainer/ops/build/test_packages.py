"""Broken packages: detection of the unrelated apex by its files, and failing programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_S, wait_for
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


def test_the_web_toolkit_is_recognised_with_a_remedy(install):
    sentence = unrelated_apex(install(WEB_TOOLKIT))
    assert sentence is not None and "\n" not in sentence
    assert "pip uninstall apex" in sentence and "source" in sentence


def test_nvidias_apex_and_a_missing_apex_cause_no_warning(install, tmp_path):
    assert unrelated_apex([str(tmp_path / "nothing")]) is None
    assert unrelated_apex(install(NVIDIA)) is None


def test_a_run_warns_once_and_trains(install, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\n"
        "training: {train_iters: 1, seq_length: 8, eval_iters: 0, device: cpu}\n"
        "optimizer: {lr: 0.001}\n"
        "data: {mock_data: true}\n"
    )
    packages = install(WEB_TOOLKIT)[0]
    code = f"import sys; sys.path.append({packages!r}); from trainer.__main__ import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "pretrain", "--config", str(tmp_path / "config.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
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
