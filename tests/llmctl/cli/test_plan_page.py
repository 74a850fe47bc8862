"""The page of ``llmctl plan``: as wide as the terminal, its bars and colours, and numbers of this run only."""

import subprocess
import sys

import pytest
import yaml

from tests.llmctl.terminal import on_terminal, without_colours

MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000}
CONFIG = {
    "model": {**MODEL, "attention_dropout": 0.0},
    "training": {"train_iters": 100, "seq_length": 2048, "global_batch_size": 64, "bf16": True},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
    "parallel": {"pipeline_model_parallel_size": 4},
}
GPUS = ("plan", "c.yaml", "--device", "H100", "--gpus-per-node", "4")
CPU = ("plan", "c.yaml", "--device", "CPU", "--gpus-per-node", "1", "--set", "parallel.pipeline_model_parallel_size=1")
TOO_LARGE = (*GPUS, "--set", "training.micro_batch_size=4", "--set", "training.seq_length=131072")


@pytest.fixture(autouse=True)
def config(own_folders):
    """A config of four pipeline ranks as ``c.yaml`` in the working directory."""
    (own_folders / "c.yaml").write_text(yaml.safe_dump(CONFIG))


def piped(arguments, encoding="utf-8"):
    """Both streams of llmctl in one pipe."""
    # Buffered as for most users: unbuffered streams keep their order by themselves.
    command = [
        "env",
        "-u",
        "PYTHONUNBUFFERED",
        f"PYTHONIOENCODING={encoding}",
        sys.executable,
        "-m",
        "llmctl",
        *arguments,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode(encoding)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
@pytest.mark.parametrize(("arguments", "code"), [(GPUS, 0), (TOO_LARGE, 1)], ids=["fits", "too large"])
def test_no_line_is_wider_than_the_terminal(columns, variables, arguments, code):
    page = on_terminal(arguments, columns, code, **variables)
    lines = without_colours(page).splitlines()
    assert max(map(len, lines)) <= columns
    assert ("\x1b" in page) == (not variables)
    assert [line.split()[:2] for line in lines if line.startswith("  rank")] == [
        ["rank", str(rank)] for rank in range(4)
    ]
    assert any(len(line) > columns - 10 for line in lines if line.startswith("  rank"))


@pytest.mark.parametrize(("encoding", "bar", "waits"), [("utf-8", "█", "·"), ("ascii", "#", ".")])
def test_bars_are_blocks_where_the_encoding_has_them(encoding, bar, waits):
    page = piped(TOO_LARGE, encoding)
    (activations,) = (line for line in page.splitlines() if line.startswith("            activations"))
    assert activations.endswith(f"  {bar * 60}")
    assert f"{waits} waits" in page and f"rank 3    {waits}{waits}" in page


def test_numbers_are_of_this_run_and_the_trillion_only_of_gpus():
    page = piped(GPUS).splitlines()
    assert page[0] == "1 node x 4 H100: fits"
    assert page[1].startswith("  run       100 steps in ") and page[1].endswith(" node-hours")
    text = "\n".join(page)
    assert "TFLOP/s, MFU" in text and "days for a trillion tokens" in text
    assert " 0.0 " not in text and " 0 MiB" not in text and "0.00 GiB" not in text


def test_a_cpu_has_no_mfu_and_no_node_hours():
    page = piped((*CPU, "--set", "model.vocab_size=100", "--set", "training.bf16=false"))
    assert page.startswith("1 node x 1 CPU: fits\n  run       100 steps in ")
    assert not [words for words in ("MFU", "FLOP", "node-hours", "trillion", "bubble") if words in page]
    assert " 0 MiB" not in page and "logits" in page


def test_what_does_not_fit_follows_the_page_in_one_pipe():
    lines = piped(TOO_LARGE).splitlines()
    assert lines[0] == "1 node x 4 H100: does not fit"
    assert lines[-2].startswith("does not fit: pipeline rank 0 needs ")


def test_notes_below_the_plan_of_submit_are_short_and_wrapped_on_words():
    lines = on_terminal(["submit", "--dry-run"], 80).splitlines()
    (last,) = (number for number, line in enumerate(lines) if line.startswith("  defaults"))
    notes = lines[last + 1 :]
    assert notes[0] == "no ./llmctl.yaml: the bundled example gpt_small.yaml, on generated data"
    assert max(map(len, notes)) <= 80 and len(notes) <= 4
    assert any(line.endswith(" refuses") for line in notes), "a line ends with a word"
