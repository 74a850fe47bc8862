"""``llmctl plan``: JSON, the suggested change, the search, and the check that submit makes."""

import json

import pytest
import yaml

from llmctl.cli.main import main
from trainer.families.llama import LLAMA

CONFIG = {
    "model": {
        "num_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "attention_dropout": 0.0,
    },
    "training": {"train_iters": 100, "seq_length": 2048, "global_batch_size": 64, "bf16": True},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
KEYS = [
    *("fits", "why_not", "memory_bytes", "peak_memory_bytes", "iteration_time_s", "tokens_per_s_per_device"),
    *("tflops_per_device", "bubble_fraction", "node_hours", "cost"),
]


@pytest.fixture
def place(own_folders):
    """A working directory with ``c.yaml`` and a cluster ``bed`` of two V100 per node."""
    path = own_folders / "config/llmctl/clusters/bed.yaml"
    path.parent.mkdir(parents=True)
    kind = {"gpus": 2, "gpu": "V100", "gpu_memory_gib": 16, "points_per_hour": 2.0}
    profile = {"scheduler": "slurm", "resource_types": {"v": kind}, "defaults": {"resource_type": "v"}}
    path.write_text(yaml.safe_dump({**profile, "runs_root": f"{own_folders}/runs"}))
    (own_folders / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return own_folders


@pytest.mark.usefixtures("place")
def test_json_has_the_documented_keys_and_the_cost(capsys):
    assert main(["plan", "c.yaml", "--cluster", "bed", "--nodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert found["fits"] and found["why_not"] is None
    assert found["peak_memory_bytes"] == sum(found["memory_bytes"].values())
    assert found["cost"]["points"] == pytest.approx(2 * found["node_hours"])


@pytest.mark.usefixtures("place")
def test_a_run_that_does_not_fit_names_rank_item_and_change(capsys):
    large = ["--set", "training.micro_batch_size=16", "--set", "model.num_layers=16"]
    assert main(["plan", "c.yaml", "--device", "V100-16GB", "--gpus-per-node", "2", "--nodes", "2", *large]) == 1
    text = capsys.readouterr()
    words = text.out + text.err
    assert "pipeline rank 0 needs" in words and "its largest item is activations" in words
    assert "fits with" in words


@pytest.mark.usefixtures("place")
def test_best_layout_of_a_search_is_a_valid_config(capsys):
    search = ["--device", "H100", "--nodes", "2", "--gpus-per-node", "4", "--search", "--output", "best.yaml"]
    assert main(["plan", "c.yaml", *search]) == 0
    first = capsys.readouterr().out.splitlines()[1].split()[0]
    assert main(["plan", "best.yaml", "--device", "H100", "--nodes", "2", "--gpus-per-node", "4"]) == 0
    assert f"{first} tokens/s" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_unknown_device_is_refused_with_the_known_ones(capsys):
    assert main(["plan", "c.yaml", "--device", "H1000"]) == 2
    assert "the devices are V100-16GB" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_submit_refuses_only_states_above_the_device(capsys):
    submit = ["submit", "c.yaml", "--cluster", "bed", "--show-script", "--nodes", "1", "--time", "1:00:00"]
    assert main([*submit, "--set", "training.micro_batch_size=16", "--set", "model.num_layers=16"]) == 0
    assert "may not fit: pipeline rank 0 needs" in capsys.readouterr().err
    assert main([*submit, "--set", "model.num_layers=200"]) != 0
    assert "cannot fit: weights, gradients and optimizer state take" in capsys.readouterr().err


def test_the_model_of_a_folder_is_planned(place, capsys):
    (place / "hf").mkdir()
    keys = {**LLAMA.tiny, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (place / "hf/config.json").write_text(json.dumps(keys))
    sections = {key: CONFIG[key] for key in ("training", "optimizer", "data")}
    (place / "start.yaml").write_text(yaml.safe_dump({**sections, "checkpoint": {"load": "hf"}}))
    short = ["--set", "training.seq_length=64", "--device", "H100"]
    assert main(["plan", "start.yaml", *short]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["plan", "start.yaml", *short, "--set", "model.num_layers=3"]) == 3
    assert f"model.num_layers: is 3, but {place}/hf/config.json has 4" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_the_vocabulary_is_that_of_the_data_and_the_device_this_machine(place, capsys):
    config = {**CONFIG, "model": {key: value for key, value in CONFIG["model"].items() if key != "vocab_size"}}
    (place / "c.yaml").write_text(yaml.safe_dump({**config, "data": {"data_path": ["corpus"]}}))
    assert main(["plan", "c.yaml", "--json"]) == 2
    assert "no data or tokenizer of the config that can be read here says it" in capsys.readouterr().err
    (place / "corpus.json").write_text('{"tokens": 1000, "vocab_size": 1000}')
    assert main(["plan", "c.yaml", "--set", "training.device=cpu", "--json"]) == 0
    small = json.loads(capsys.readouterr().out)["peak_memory_bytes"]
    (place / "corpus.json").write_text('{"tokens": 1000, "vocab_size": 100000}')
    assert main(["plan", "c.yaml", "--set", "training.device=cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_memory_bytes"] > small
