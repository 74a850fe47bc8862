"""``llmctl generate``: here, or as a job; runs in the place of checkpoints. 10 s on one core."""

import json
import shutil
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.llmctl.cli.test_checkpoint import add_run
from tests.llmctl.login_node import started_with

HOOKS = Path(__file__).resolve().parents[3] / "examples/hooks"
PROMPT = ["--prompt", "a b", "--temperature", "0"]


def test_a_job_of_one_node_generates_with_the_folder_of_the_run(login_node, capsys, monkeypatch):
    run_dir = add_run(login_node, "mine")
    command = ["generate", "mine", *PROMPT, "--stop", "mine", "--tensor-parallel", "2", "--cluster", "lab"]
    assert main([*command, "--show-script"]) == 0
    script = capsys.readouterr().out
    words = f"{run_dir} --prompt 'a b' --temperature 0 --stop mine --tensor-parallel 2"
    assert 'exec "$0" "$LLMCTL_RUN_DIR/code/trainer" generate "$@"' in script and words in script
    # The input is checked before the queue.
    monkeypatch.setenv("STATUS", "3")
    assert main(command) == 3
    expected = ["--check", str(run_dir), *PROMPT, "--stop", "mine", "--tensor-parallel", "2"]
    assert started_with(login_node) == ["trainer", "generate", *expected]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nobody", *PROMPT], 5, "llmctl: no run is called 'nobody'"),
        (["./x", "--prompt", "a", "--temperature", "-1"], 2, "'-1' is not a number of 0 or more"),
        (["./x", "--prompt", "a", "--stop", ""], 2, "argument --stop: is empty"),
        (["./x", "--prompt", "a", "--top-p", "1.5"], 2, "'1.5' is not above 0 and at most 1"),
        (["./x"], 2, "give --prompt TEXT or --prompt-file FILE"),
        (PROMPT, 2, "give the model: RUN, CKPT or HF_DIR"),
    ],
)
def test_wrong_words_are_one_sentence_and_start_nothing(login_node, capsys, words, code, says):
    add_run(login_node, "mine")
    assert main(["generate", *words, "--cluster", "lab"]) == code
    message = capsys.readouterr().err
    assert says in message and message.startswith("llmctl")
    assert not started_with(login_node)


def test_the_local_cluster_generates_here(home, capfd):
    (home / "mamba").mkdir()
    (home / "mamba/config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert main(["generate", "./mamba", *PROMPT]) == 3
    message = capfd.readouterr().err
    assert message.startswith("llmctl generate: mamba") and "'mamba'" in message
    assert message.count("\n") == 1


def test_a_tokenizer_of_a_run_is_found_in_the_code_of_the_run(home, capfd):
    for name in ("hooks.yaml", "my_hooks.py"):
        shutil.copy(HOOKS / name, home / name)
    own = ["data.tokenizer_function=my_hooks:Letters", "training.train_iters=1", "training.device=cpu"]
    words = [word for value in own for word in ("--set", value)]
    assert main(["submit", "hooks.yaml", "--cluster", "local", "--run-id", "mine", "--follow", *words]) == 0
    (home / "my_hooks.py").unlink()
    capfd.readouterr()
    assert main(["generate", "mine", "--prompt", "A b", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["prompt"] == "A b"
