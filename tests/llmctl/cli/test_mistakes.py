"""Mistakes of a first hour, each answered with what is wrong, where, and what to do.

Mistakes that need a broken machine (an unknown host key, a full disk) are tested beside the code that finds them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.cli.main import main

CONFIG = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, max_position_embeddings: 64, vocab_size: 256}
training: {train_iters: 4, micro_batch_size: 1, global_batch_size: 1, seq_length: 64}
optimizer: {lr: 1e-3}
data: {mock_data: true}
"""
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
TP = "--set parallel.tensor_model_parallel_size"

CLUSTERS = [
    ("submit ok.yaml --cluster abc13", 2, ["no cluster is called 'abc13'; did you mean abci3?"]),
    ("submit ok.yaml --cluster abci3", 3, ["abci3 needs a group", "--group G", "clusters setup abci3"]),
    ("submit ok.yaml --cluster abci3 --nodes 1000 --group G", 2, ["1000 nodes are above 128, the limit of"]),
    ("submit ok.yaml --cluster abci3 --time 999h --group G", 2, ["999:00:00 is above 168:00:00"]),
    ("submit ok.yaml --cluster abci3 --resource-type h200 --group G", 2, ["there are rt_HF, rt_HG, rt_HC"]),
    ("submit --cluster abci3 --group G", 2, ["--example"]),
    ("submit ok.yaml --time 90", 2, ["'90' has no unit", "90m, 5h"]),
    ("submit ok.yaml --cluster slurm-pyxis --container 'bad image'", 2, ["a file begins with / or ."]),
    (
        "submit ok.yaml --cluster slurm-pyxis --container /a.sqsh --mount nocolon",
        2,
        ["--mount: 'nocolon'", "absolute path"],
    ),
    ("submit ok.yaml --container a.sif", 2, ["--container: 'a.sif' is not supported on local"]),
    ("submit ok.yaml --after x", 2, ["local, which has no waiting jobs"]),
    ("submit ok.yaml --nodes 0", 2, ["--nodes: 0 is not valid", "greater than 0"]),
    ("submit ok.yaml --nodes abc", 2, ["--nodes", "valid integer"]),
    ("submit ok.yaml --nodes 64", 2, ["--nodes: ", "use 64"]),
    ("submit ok.yaml --gpus 2", 2, ["--gpus: give --nodes N, and --gpus-per-node G"]),
    ("clusters new lab", 2, ["--scheduler: is unset: the schedulers are slurm, sge, pbs"]),
    ("clusters new 'a b' --scheduler local", 2, ["letters, digits"]),
    ("nodes --cluster pbs", 2, ["no cluster is called 'pbs'", "llmctl clusters list"]),
]
CONFIGS = [
    ("submit missing.yaml", 2, ["there is no file missing.yaml", "bundled example"]),
    ("submit folder", 2, ["folder is a folder; name a config in it"]),
    ("submit hf", 2, ["hf is a Hugging Face model", "submit --hf hf --data TEXT", "init --from hf"]),
    ("submit hf/config.json", 2, ["hf/config.json is a Hugging Face model", "submit --hf hf --data TEXT"]),
    ("submit ok.yaml ok.yaml", 2, ["one word too many", "CONFIG"]),
    ("submit t.py", 2, ["--torchrun -- t.py"]),
    ("submit open.yaml", 3, ["open.yaml: is not valid YAML: line 2, column 4: ", "which begins in line 1"]),
    ("submit tab.yaml", 3, ["tab.yaml: is not valid YAML: line 2, column 1: ", "not tabs"]),
    ("submit twice.yaml", 3, ["twice.yaml: is not valid YAML: line 1, column 8: key 'num_layers' occurs twice"]),
    ("submit empty.yaml", 3, ["empty.yaml: is empty"]),
    ("submit list.yaml", 3, ["list.yaml: is a list, not a mapping"]),
    ("submit ok.yaml --set num_layers=4", 2, ["unknown key; did you mean model.num_layers?"]),
    ("submit ok.yaml --set optimiser.lr=4", 2, ["unknown key; did you mean optimizer"]),
    ("submit ok.yaml --set optimizer.learning_rate=4", 2, ["did you mean optimizer.lr?"]),
    ("submit ok.yaml --set parallel.tp=2", 2, ["did you mean parallel.tensor_model_parallel_size?"]),
    ("submit ok.yaml --set model.num_layers", 2, ["give key=value"]),
    ("submit ok.yaml --set model.num_layers=four", 2, ["--set model.num_layers: 'four' is not valid", "integer"]),
    (
        "submit ok.yaml --set data.data_path=/nowhere/corpus",
        2,
        ["data.mock_data: cannot be combined with data.data_path"],
    ),
    ("submit nodata.yaml", 3, ["data.data_path: is unset", "llmctl data prepare"]),
    ("submit nodata.yaml --set data.data_path=/nowhere/corpus", 2, ["there is no /nowhere/corpus.bin", "data prepare"]),
    (f"submit ok.yaml {TP}=3 --nodes 3", 2, ["3 does not divide model.num_attention_heads 4; use one of 1, 2, 4"]),
    (f"submit ok.yaml {TP}=2", 2, ["does not divide the world size 1; nearest layouts that fit: TP 1 x PP 1 x DP 1"]),
    ("submit ok.yaml --set model.num_attention_heads=7", 2, ["7 does not divide hidden_size 64; use one of"]),
    ("submit ok.yaml --set checkpoint.load=nothere", 2, ["--set checkpoint.load: there is no", "nothere"]),
    ("submit ok.yaml --set checkpoint.load=hf", 3, ["model.hidden_size: is 64, but", "model.vocab_size: is 256, but"]),
    ("submit ok.yaml --set checkpoint.load=megatron", 2, ["format torch, which", "llmctl checkpoint import"]),
    ("submit ok.yaml --name 'a b'", 2, ["--name: 'a b' is not valid: up to 64 letters"]),
    ("submit ok.yaml --name a/b", 2, ["--name: 'a/b' is not valid: up to 64 letters"]),
    ("submit ok.yaml --env FOO", 2, ["give NAME=VALUE, or --secret NAME"]),
    ("submit ok.yaml --secret NOT_SET_HERE", 2, ["is not set in your environment; export the variable first"]),
    ("submit --", 2, ["no COMMAND follows"]),
]
WORDS = [
    *(
        (f"{word} x", 2, [f"no command is called '{word}'; llmctl submit"])
        for word in ("run", "launch", "start", "train")
    ),
    *((f"{word} x", 2, [f"no command is called '{word}'; llmctl cancel"]) for word in ("stop", "kill")),
    ("ls", 2, ["llmctl list"]),
    ("statsu", 2, ["did you mean status?"]),
    ("init", 2, ["--from"]),
    ("explain learning_rate", 2, ["did you mean optimizer.lr?"]),
    ("explain --no-such-flag", 2, ["--no-such-flag"]),
    ("examples llama", 2, ["no example is called 'llama'; there are", "llama3_8b"]),
    ("data prepare missing.txt --output c", 3, ["missing.txt: cannot be read: No such file"]),
    (
        "data prepare Org/some-data --output c",
        3,
        ["data set of the hub", "hf download --repo-type dataset Org/some-data"],
    ),
    ("data prepare text.txt --output c", 3, ["tokenizer_model: is unset; name a tokenizer.json"]),
    ("data prepare text.txt", 2, ["--output"]),
    ("checkpoint show nothere", 5, ["no run is called 'nothere'"]),
    ("status nothere", 5, ["no run is called 'nothere'"]),
]


@pytest.fixture
def folder(home: Path) -> Path:
    """A working directory with the files that the mistakes name."""
    (home / "ok.yaml").write_text(CONFIG)
    (home / "nodata.yaml").write_text(CONFIG.replace("data: {mock_data: true}\n", ""))
    (home / "open.yaml").write_text("model: {num_layers: 2\n  x: [\n")
    (home / "tab.yaml").write_text("model:\n\tnum_layers: 2\n")
    (home / "twice.yaml").write_text("model: {num_layers: 2, num_layers: 3}\n")
    (home / "empty.yaml").write_text("")
    (home / "list.yaml").write_text("- a\n- b\n")
    (home / "t.py").write_text("print(1)\n")
    (home / "text.txt").write_text("some words\n")
    (home / "folder").mkdir()
    (home / "hf").mkdir()
    (home / "hf/config.json").write_text(json.dumps(LLAMA))
    ranks = home / "megatron/iter_0000010/mp_rank_00"
    ranks.mkdir(parents=True)
    (home / "megatron/latest_checkpointed_iteration.txt").write_text("10")
    (ranks / "model_optim_rng.pt").write_bytes(b"x")
    return home


@pytest.mark.parametrize(("words", "code", "says"), [*CLUSTERS, *CONFIGS, *WORDS], ids=lambda value: str(value)[:60])
def test_a_mistake_is_answered(folder, capfd, words: str, code: int, says: list[str]) -> None:
    assert main(shlex.split(words)) == code
    message = capfd.readouterr().err
    assert [part for part in says if part not in message] == [], message
    assert list(faults(message)) == []
    assert not list(folder.glob("runs/[!.]*"))


def faults(message: str) -> Iterator[str]:
    """Everything that a message must not be, whatever it says."""
    lines = message.strip().splitlines()
    if not lines or not lines[0].startswith("llmctl"):
        yield "does not say who speaks"
    if len(lines) > 4:
        yield f"{len(lines)} lines"
    if found := re.search(r"Traceback|\w+Error\b|<unicode|pydantic|<class|\.\.\.$|internal", message, re.MULTILINE):
        yield f"has {found[0]!r}"
    if len(set(lines)) < len(lines):
        yield "says a line twice"


def test_mistakes_about_runs_are_answered(folder, capfd) -> None:
    for command in ("true", "true", "false"):
        main(["submit", "--name", f"a-{command}", "--follow", "--", command])
    capfd.readouterr()
    failed = next(path.name for path in (folder / "runs").glob("a-false*"))
    for words, code, says in (
        ("status a-", 5, ["is the beginning of several runs", failed]),
        ("logs b", 5, ["no run is called 'b'; the newest are", failed]),
        ("logs a-true --attempt 9", 5, ["there is no attempt 9; there are attempts 1"]),
        ("logs a-true --rank 9", 2, ["not divided by ranks"]),
        ("cancel a-true b", 5, ["no run is called 'b'"]),
        (f"generate {failed} --prompt x", None, [failed]),
    ):
        found = main(shlex.split(words))
        message = capfd.readouterr().err
        assert code is None or found == code, message
        assert [part for part in says if part not in message] == [], message
        assert list(faults(message)) == []
    assert main(["cancel", "a-false"]) == main(["cancel", "a-false"]) == 0
    assert set(capfd.readouterr().out.splitlines()) == {
        f"{failed} had already ended: failed; llmctl status {failed} tells why"
    }
