"""The two packages called apex, told apart by stand-ins that have the folders of the real ones."""

import subprocess
import sys

import pytest

from trainer.optional_packages import unrelated_apex

# Folders of apex 0.9.10dev as the index has it, and of NVIDIA's apex as its repository has it.
WEB_TOOLKIT = ("ext", "lib", "locale", "models", "templates", "views")
NVIDIA = ("contrib", "multi_tensor_apply", "normalization", "optimizers", "transformer")


@pytest.fixture
def install(tmp_path):
    def make(folders):
        for folder in folders:
            (tmp_path / "apex" / folder).mkdir(parents=True)
        # Whoever executes it, fails.
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
