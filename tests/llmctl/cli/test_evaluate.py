"""``llmctl evaluate``: as a job, with a run in the place of checkpoints. 5 s on one core."""

import pytest

from llmctl.cli.main import main
from tests.llmctl.cli.test_checkpoint import add_run
from tests.llmctl.login_node import started_with


def test_a_job_of_one_node_evaluates_the_folder_of_the_run(login_node, capsys, monkeypatch):
    run_dir = add_run(login_node, "mine")
    flags = ["--tasks", "/data/a.yaml,arc_easy", "--limit", "8", "--pipeline-parallel", "2"]
    command = ["evaluate", "mine", *flags, "--cluster", "lab"]
    assert main([*command, "--show-script"]) == 0
    script = capsys.readouterr().out
    assert (
        'exec "$0" "$LLMCTL_RUN_DIR/code/trainer" evaluate "$@"' in script and f"{run_dir} {' '.join(flags)}" in script
    )
    # The input is checked before the queue.
    monkeypatch.setenv("STATUS", "3")
    assert main(command) == 3
    assert started_with(login_node) == ["trainer", "evaluate", "--check", str(run_dir), *flags]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nobody"], 5, "llmctl: no run is called 'nobody'"),
        (["mine", "--limit", "3"], 2, "--limit counts items of tasks; give --tasks"),
        (["mine", "--tasks", "a", "--limit", "0"], 2, "'0' is not a whole number of 1 or more"),
        ([], 2, "give the model: RUN, CKPT or HF_DIR\nsee llmctl evaluate --help\n"),
    ],
)
def test_wrong_words_are_one_sentence_and_start_nothing(login_node, capsys, words, code, says):
    add_run(login_node, "mine")
    assert main(["evaluate", *words, "--cluster", "lab"]) == code
    message = capsys.readouterr().err
    assert says in message and message.startswith("llmctl")
    assert not started_with(login_node)
