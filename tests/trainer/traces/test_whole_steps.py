"""Whole steps on a CUDA device that is not there: waits of the host, launches of a layer, memory, order of collectives.

About 40 s of one core for all layouts, in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.trainer.traces.layouts import (
    CHUNKED_LOSS,
    LAYOUTS,
    LLAMA,
    LLAMA_8B,
    MICRO_BATCHES,
    STATES_16_BIT,
    VOCAB_SIZE,
)
from tests.waiting import HANG_S
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import GIB
from trainer.planning.estimate.memory import memory_of_ranks

EXPERTS = "trainer/model/moe/dispatch.py plan: aten._local_scalar_dense.default"
"""The sizes of the experts' rows, once a layer and micro-batch, if rows are sent to other ranks."""
MOST_LAUNCHES = 24
"""Operations of a dense layer with RMSNorm and SwiGLU, forward and backward."""
MOST_BESIDE = 4 << 20
"""Bytes; a table for 8192 positions takes 2 MiB."""
NOT_OF_TENSORS = ("runtime", "communication", "allocator")
SHARDED = ("zero2", "zero3")
"""Layouts whose weights and gradients are whole for a part of a step only."""
_16_BIT = {**LLAMA_8B["optimizer"], **STATES_16_BIT}
LLAMAS_8B = {
    "llama-8b": (LLAMA_8B, 173.0),
    "llama-8b-16-bit": ({**LLAMA_8B, "optimizer": _16_BIT}, 115.0),
    "llama-8b-chunked-loss": (
        {**LLAMA_8B, "optimizer": _16_BIT, "training": {**LLAMA_8B["training"], **CHUNKED_LOSS}},
        113.0,
    ),
}
"""Values, and the most GiB of a step: 18 or 10 bytes for each parameter, 34 GiB of activations, and 2 GiB of logits,
unless their loss is made in chunks."""
FOUR_LAYERS = {"num_layers": 4, "attention_backend": "unfused"}
SLOWER_KERNELS = {
    "unfused attention": {"model": FOUR_LAYERS},
    "kept scores": {"model": {**FOUR_LAYERS, "attention_dropout": 0.1}},
    "reference loss": {"model": FOUR_LAYERS, "training": {"kernel_backends": {"cross_entropy": "reference"}}},
}
"""Changes of a small part of LLAMA_8B, with 2048 tokens."""
SCORES = {**FOUR_LAYERS, "attention_dropout": 0.1}
REPLAYS = {
    "kept scores, selective recompute": {"model": SCORES, "training": {"recompute_granularity": "selective"}},
    "kept scores, full recompute": {
        "model": SCORES,
        "training": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict]]:
    """Layout -> rank -> record; "llama-8" has eight layers."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    folder, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("device") / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    include, lib = f"-I{folder}/include", f"{folder}/lib"
    flags = ["-std=c++20", "-shared", "-fPIC", include, f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, str(source), *flags, "-o", str(library)], check=True)
    wanted = {
        name: {"values": one.values(), "kind": one.batch, "world_size": one.world_size, "ranks": one.ranks}
        for name, one in LAYOUTS.items()
    }
    for name, (values, _) in LLAMAS_8B.items():
        wanted[name] = {"values": values, "kind": "plain", "world_size": 1, "ranks": [0]}
    for name in {**SLOWER_KERNELS, **REPLAYS}:
        wanted[name] = {"values": slower_values(name), "kind": "plain", "world_size": 1, "ranks": [0]}
    wanted["llama-8"] = {**wanted["llama"], "values": LAYOUTS["llama"].values(layers=8)}
    traced = subprocess.run(
        [sys.executable, "-m", "tests.trainer.traces.trace"],
        input=json.dumps(wanted), env={**os.environ, "LD_PRELOAD": str(library)}, text=True,
        stdout=subprocess.PIPE, timeout=10 * HANG_S, check=True,
    )  # fmt: skip
    return json.loads(traced.stdout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_waits_only_where_it_must(records: dict[str, dict[str, dict]], name: str) -> None:
    sends_rows = "expert_model_parallel_size" in LAYOUTS[name].parallel
    for record in records[name].values():
        expected: Counter[str] = Counter()
        if sends_rows:
            sizes = 2 * LAYOUTS[name].model["num_experts"]
            expected[EXPERTS] = sizes * LLAMA["num_layers"] * MICRO_BATCHES
        assert record["waits"] == expected


def test_a_layer_has_so_many_launches(records: dict[str, dict[str, dict]]) -> None:
    few, many = (Counter(records[name]["0"]["launches"]) for name in ("llama", "llama-8"))
    further = many - few
    of_layer = {name: count / (4 * MICRO_BATCHES) for name, count in further.items()}
    assert sum(of_layer.values()) <= MOST_LAUNCHES, of_layer


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.world_size > 1])
def test_ranks_enter_their_collectives_in_one_order(records: dict[str, dict[str, dict]], name: str) -> None:
    """Of a group of which both ranks are. Messages from rank to rank are not collectives."""
    seen: dict[tuple[int, ...], list[str]] = {}
    for record in records[name].values():
        for group, calls in record["collectives"]:
            own = [call for call in calls if "send" not in call and "recv" not in call]
            assert seen.setdefault(tuple(group), own) == own
    assert seen


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in SHARDED])
def test_states_take_the_memory_that_is_predicted(records: dict[str, dict[str, dict]], name: str) -> None:
    """Beside the states there are only the tokens, and tables of rotary embeddings."""
    if name in ("bert", "mtp"):
        pytest.skip("the states of further heads are not predicted to the byte")
    predicted = memory_of_ranks(build_config(LAYOUTS[name].values()), VOCAB_SIZE, LAYOUTS[name].world_size)
    ranks_of_stage = LAYOUTS[name].world_size // len(predicted)
    for rank, record in records[name].items():
        assert 0 <= record["before"] - predicted[int(rank) // ranks_of_stage].states < MOST_BESIDE, rank


@pytest.mark.parametrize("name", SHARDED)
def test_gathered_weights_last_for_a_part_of_a_step(records: dict[str, dict[str, dict]], name: str) -> None:
    """Between two steps there are shards only: as many bytes of weights and gradients as of both moments."""
    (predicted,) = memory_of_ranks(build_config(LAYOUTS[name].values()), VOCAB_SIZE, LAYOUTS[name].world_size)
    in_step = predicted.total - sum(predicted.bytes_of[item] for item in NOT_OF_TENSORS)
    for rank, record in records[name].items():
        assert 0 <= record["before"] - 2 * predicted.bytes_of["optimizer_state"] < MOST_BESIDE, rank
        assert 0.85 * in_step <= record["peak"] <= in_step, rank


def slower_values(name: str) -> dict:
    """Values of a config of SLOWER_KERNELS or REPLAYS."""
    change = {**SLOWER_KERNELS, **REPLAYS}[name]
    training = {**LLAMA_8B["training"], "seq_length": 2048, **change.get("training", {})}
    return {**LLAMA_8B, "model": {**LLAMA_8B["model"], **change["model"]}, "training": training}


def predicted_peak(values: dict) -> tuple[int, int]:
    """Predicted bytes of states and of a whole step, without what the driver and the allocator take."""
    (predicted,) = memory_of_ranks(build_config(values), values["model"]["vocab_size"], 1)
    return predicted.states, predicted.total - sum(predicted.bytes_of[item] for item in NOT_OF_TENSORS)


@pytest.mark.parametrize("name", LLAMAS_8B)
def test_the_memory_of_an_8b_model_is_predicted(records: dict[str, dict[str, dict]], name: str) -> None:
    """A step of sequence 8192 on one GPU."""
    (record,), (_, most) = records[name].values(), LLAMAS_8B[name]
    states, own = predicted_peak(LLAMAS_8B[name][0])
    assert 0 <= record["before"] - states < MOST_BESIDE
    assert record["peak"] <= most * GIB
    if name == "llama-8b-chunked-loss":
        # What the chunks save, of a step whose prediction is held to 2% itself.
        whole = "llama-8b-16-bit"
        saved = records[whole]["0"]["peak"] - record["peak"]
        assert saved == pytest.approx(predicted_peak(LLAMAS_8B[whole][0])[1] - own, rel=0.02)
    else:
        assert record["peak"] == pytest.approx(own, rel=0.02)


@pytest.mark.parametrize("name", SLOWER_KERNELS)
def test_what_slower_kernels_keep_is_predicted(records: dict[str, dict[str, dict]], name: str) -> None:
    (record,) = records[name].values()
    states, own = predicted_peak(slower_values(name))
    assert record["peak"] - states == pytest.approx(own - states, rel=0.01)


@pytest.mark.parametrize("name", REPLAYS)
def test_what_a_replay_of_scores_takes_is_predicted(records: dict[str, dict[str, dict]], name: str) -> None:
    (record,) = records[name].values()
    states, own = predicted_peak(slower_values(name))
    assert record["peak"] - states == pytest.approx(own - states, rel=0.05)
