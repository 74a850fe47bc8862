"""``llmctl explain`` and ``llmctl examples``: every key, every flag, every example."""

from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.paths import BUNDLED
from llmctl.site.profile import ClusterProfile
from scripts.reference.megatron_flags import answer, recorded_flags
from trainer.planning.build_config import known_keys

EXAMPLES = sorted(path.stem for path in (BUNDLED / "examples").glob("*.yaml"))


def said(capsys, *words: str, code: int = 0) -> str:
    assert main(["explain", *words]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def test_every_key_of_a_config_and_a_profile_is_explained(capsys):
    keys = known_keys()
    text = said(capsys, *keys)
    for key in keys:
        assert f"{key}: " in text
    assert "any value" not in text
    profile = [f"profile.{name}" for name in ClusterProfile.model_fields if name not in ("name",)]
    for key in profile:
        assert main(["explain", key.removeprefix("profile.")]) in (0, 2)  # a part has keys of its own
        assert "Traceback" not in capsys.readouterr().err
    assert "Folder of the run directories" in said(capsys, "runs_root")
    assert said(capsys, "rendezvous.interface").startswith("profile.rendezvous.interface: text; default unset")


def test_values_defaults_and_meaning(capsys):
    assert said(capsys, "training.global_batch_size") == (
        "training.global_batch_size: integer above 0; default unset\n  flag: --global-batch-size\n"
        "  Samples per iteration. Unset: micro_batch_size x dp, which fits any number of nodes.\n"
    )
    assert said(capsys, "training.device").startswith("training.device: auto or cpu or cuda; default auto\n")
    assert said(capsys, "lr").startswith("optimizer.lr: number above 0; required\n")
    assert "without its weights" in said(capsys, "model.from")


def test_every_flag_of_megatron_lm_has_its_answer(capsys):
    flags = recorded_flags()
    texts = said(capsys, *(f"--{flag}" for flag in flags)).split("\n\n")
    words = {"meant": "sets ", "no effect": "has no effect: ", "refused": "is refused: "}
    for flag, text in zip(flags, texts, strict=True):
        kind, meaning = answer(flag)
        assert text.startswith(f"--{flag}: {words[kind]}")
        assert kind == "meant" or meaning in text
    assert said(capsys, "--use_flash_attn") == said(capsys, "--use-flash-attn")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("--sequence-paralel", "did you mean --sequence-parallel"),
        ("model.heads", "did you mean model.num_attention_heads?"),
        ("heads", "model.num_attention_heads"),
        ("qqqq", "no key is called 'qqqq'"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(capsys, word, words):
    assert words in said(capsys, word, code=2)


def test_the_examples_are_listed_and_copied(own_folders, capsys):
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == EXAMPLES
    assert all(len(line) <= 120 for line in listed)
    assert main(["examples", "llama3_8b"]) == 0
    told = "set data.data_path to your own data; llmctl plan llama3_8b.yaml --cluster NAME --nodes N needs none"
    assert capsys.readouterr().err == f"wrote llama3_8b.yaml\n{told}\n"
    assert main(["plan", "llama3_8b.yaml", "--cluster", "aws-p5", "--nodes", "2"]) == 0
    assert "8 H100: fits" in capsys.readouterr().out
    assert Path("llama3_8b.yaml").read_bytes() == (BUNDLED / "examples/llama3_8b.yaml").read_bytes()
    assert main(["examples", "llama3_8b"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["examples", "llama3_8b", "-o", "own.yaml"]) == 0
    assert Path("own.yaml").is_file() and own_folders.is_dir()
    capsys.readouterr()
    assert main(["examples", "gpt_small"]) == main(["submit", "gpt_small.yaml", "--cluster", "local", "--dry-run"]) == 0
    assert "llmctl submit gpt_small.yaml --dry-run\n" in capsys.readouterr().err
    assert main(["examples", "llama"]) == 2
    assert "no example is called 'llama'" in capsys.readouterr().err
