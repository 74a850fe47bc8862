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
    *("tflops_per_device", "bubble_fraction", "node_hours", "cost", "limits", "remarks", "tight"),
    *("calibrated_by", "measured"),
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
    assert main(["plan", "best.yaml", "--device", "H100"]) == 0
    text = capsys.readouterr().out
    assert f"{first} tokens/s" in text and "2 nodes x 4 H100" in text


@pytest.mark.usefixtures("place")
def test_layouts_of_a_search_as_json_have_cost_and_settings(capsys):
    assert main(["plan", "c.yaml", "--cluster", "bed", "--nodes", "2", "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["layouts", "nearest", "compared"] and found["nearest"] is None
    speeds = [row["tokens_per_s_per_device"] for row in found["layouts"]]
    assert speeds == sorted(speeds, reverse=True) and found["compared"] > len(speeds)
    best = found["layouts"][0]
    assert best["cost"]["points"] == pytest.approx(2 * best["node_hours"])
    settings = [part for key, value in best["settings"].items() for part in ("--set", f"{key}={json.dumps(value)}")]
    assert main(["plan", "c.yaml", "--cluster", "bed", "--nodes", "2", "--json", *settings]) == 0
    assert json.loads(capsys.readouterr().out)["iteration_time_s"] == pytest.approx(best["iteration_time_s"])


@pytest.mark.usefixtures("place")
def test_a_search_marks_layouts_with_little_room(capsys):
    search = ["plan", "c.yaml", "--device", "V100-16GB", "--gpus-per-node", "2", "--nodes", "1", "--search", *HALF]
    assert main([*search, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    marks = [row["peak_memory_bytes"] * 1.25 > 15.7 * 2**30 for row in rows]
    assert [row["tight"] for row in rows] == marks and set(marks) == {True, False}
    assert main(search) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if line[28:].strip() and line[:10].strip()]
    assert [line.endswith(", tight") for line in lines] == marks


@pytest.mark.usefixtures("place")
def test_a_search_without_a_layout_says_why(capsys):
    search = ["plan", "c.yaml", "--device", "V100-16GB", "--gpus-per-node", "1", "--nodes", "1", "--search"]
    assert main([*search, "--set", "model.num_layers=200"]) == 1
    text = capsys.readouterr()
    assert text.out == ""
    assert "no layout fits on 1 x 1 V100-16GB: tp 1 pp 1 dp 1, mbs 1, recompute all" in text.err
    assert main([*search, "--svg", "x.svg"]) == 2
    assert "--svg: draws one layout" in capsys.readouterr().err


HALF, WHOLE = ["--set", "training.bf16=false", "--set", "training.fp16=true"], ["--set", "training.bf16=false"]


def planned(capsys, *arguments):
    """The prediction, as JSON."""
    assert main(["plan", "c.yaml", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("place")
def test_a_precision_that_the_device_lacks_is_slow_and_said(capsys):
    v100, h100 = ("--device", "V100-32GB", "--nodes", "2"), ("--device", "H100", "--nodes", "2")
    bf16, fp16, single = (planned(capsys, *v100, *settings) for settings in ([], HALF, WHOLE))
    assert bf16["iteration_time_s"] > 3 * fp16["iteration_time_s"] and fp16["remarks"] == []
    assert bf16["remarks"] == [
        "V100-32GB has no bf16: products run in float32 at 15.7 instead of 125 TFLOP/s; use training.fp16 instead of "
        "training.bf16"
    ]
    assert single["remarks"] == [
        "products run in float32 at 15.7 TFLOP/s; with training.fp16 V100-32GB reaches up to 125"
    ]
    fast, slow = planned(capsys, *h100), planned(capsys, *h100, *WHOLE)
    assert slow["iteration_time_s"] > 4 * fast["iteration_time_s"] and fast["remarks"] == []
    assert slow["remarks"] == ["products run in float32 at 66.9 TFLOP/s; with training.bf16 H100 reaches up to 989.4"]


@pytest.mark.usefixtures("place")
def test_messages_that_leave_the_node_are_said_by_plan_and_submit(capsys):
    across = ["--cluster", "bed", "--nodes", "2", *HALF, "--set", "parallel.tensor_model_parallel_size=4"]
    said = (
        "tensor parallelism 4 leaves a node of 2 devices, and waits for the slower links between nodes in every layer"
    )
    assert main(["plan", "c.yaml", *across]) == 0
    text = capsys.readouterr()
    shares = next(line for line in text.out.splitlines() if line.startswith("  limits"))
    assert said in text.err and shares.startswith("  limits    of the step: messages ")
    assert main(["submit", "c.yaml", *across, "--show-script", "--time", "1:00:00"]) == 0
    assert said in capsys.readouterr().err
    within = planned(capsys, "--cluster", "bed", "--nodes", "2", *HALF)
    assert within["remarks"] == [] and within["limits"]["messages"] == 0 < within["limits"]["optimizer"]


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


def test_the_place_of_a_model_may_have_a_variable_that_is_set(place, capsys, monkeypatch):
    (place / "hf").mkdir()
    keys = {**LLAMA.tiny, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (place / "hf/config.json").write_text(json.dumps(keys))
    sections = {key: CONFIG[key] for key in ("training", "optimizer", "data")}
    data = {**CONFIG["data"], "tokenizer_model": "$UNSET_ONE/t"}
    values = {**sections, "data": data, "checkpoint": {"load": "${MODELS}/hf", "save": "$UNSET_ONE/ck"}}
    (place / "start.yaml").write_text(yaml.safe_dump(values))
    short = ["plan", "start.yaml", "--set", "training.seq_length=64", "--device", "H100"]
    assert main(short) == 3
    assert "checkpoint.load: $MODELS is not set on this machine" in capsys.readouterr().err
    monkeypatch.setenv("MODELS", str(place))
    assert main(short) == 0


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
