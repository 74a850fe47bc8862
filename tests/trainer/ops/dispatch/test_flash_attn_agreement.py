"""All ranks use the same flash-attn or none, and broken packages end no rank."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from tests.trainer.model.test_attention import model
from tests.trainer.spawn import Ranks
from trainer.config.errors import ConfigError
from trainer.distributed.mesh import ParallelMesh
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ParallelAxes
from trainer.model.sharding import ParameterBuilder
from trainer.ops.attention.flash_attn import FlashAttnPackage
from trainer.ops.dispatch import flash_attn_agreement
from trainer.ops.dispatch.flash_attn_agreement import try_flash_attn, with_flash_attn
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.dispatch.selection import KernelSelection
from trainer.planning.build_config import build_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SUITS = {3: None, 2: None}
NEWEST = "attention: not flash-attn 3, which crashes"


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def settled(rank, _world_size, backend, *by_rank):
    """Result of a rank: version or reason for none, and notes; or the error.

    No package is installed. ``by_rank`` has each rank's unsuited versions, trials and versions that fail to load.
    """
    unsuited, tried, unloaded = by_rank[rank]

    def load(version):
        return unloaded.get(version) or FlashAttnPackage(version, None)

    with (
        mock.patch.object(flash_attn_agreement, "flash_problem", lambda version, *_: unsuited[version]),
        mock.patch.object(flash_attn_agreement, "load", load),
    ):
        try:
            selection = with_flash_attn(
                KernelSelection(Kernels(), {}, {}, {}), model(backend), torch.bfloat16, CPU, tried
            )
        except ConfigError as error:
            return str(error)
    found = selection.kernels.flash_attn
    return found._version if isinstance(found, FlashAttnPackage) else found, selection.lines()


def rank_of(tried, unsuited=SUITS, unloaded=()):
    return unsuited, tried, dict(unloaded)


def test_all_ranks_use_a_version_that_works_on_every_node(ranks) -> None:
    assert ranks.run(settled, "auto", rank_of({3: None}), rank_of(None)) == [(3, [])] * 2
    found = ranks.run(settled, "auto", rank_of({3: "crashes", 2: None}), rank_of(None))
    assert found == [(2, [NEWEST])] * 2


def test_a_version_that_fails_on_one_node_is_used_on_none(ranks) -> None:
    first, second = rank_of({3: None}), rank_of({3: "crashes", 2: None})
    # The first node stopped at a working version. The older version is untried there, and is not tried now.
    why = "flash-attn 3 crashes (on rank 1), and flash-attn 2 was not tried on every node"
    lines = [f"{NEWEST} (on rank 1)", "attention: not flash-attn 2, which was not tried on every node"]
    assert ranks.run(settled, "auto", first, second) == [(why, lines)] * 2
    assert (
        ranks.run(settled, "flash", first, second)
        == [f"model.attention_backend: flash cannot run here: {why}; use fused, torch's own kernel, or auto"] * 2
    )


def test_a_version_that_does_not_load_on_one_rank_is_used_on_none(ranks) -> None:
    late = rank_of(None, unloaded={3: "has lost its file"})
    (one, _), (other, lines) = ranks.run(settled, "auto", rank_of({3: None}), late)
    assert one == other == "flash-attn 3 has lost its file (on rank 1), and flash-attn 2 was not tried on every node"
    assert lines[0] == "attention: not flash-attn 3, which has lost its file (on rank 1)"


def test_a_version_unsuited_to_one_rank_is_used_on_none_without_a_line(ranks) -> None:
    other = rank_of(None, unsuited={3: "is for others", 2: "is for others"})
    assert ranks.run(settled, "auto", rank_of({3: None}), other) == [("is for others (on rank 1)", [])] * 2


def test_without_a_request_no_version_is_agreed_on(ranks) -> None:
    assert ranks.run(settled, "fused", rank_of({}), rank_of(None)) == [(None, [])] * 2


def test_layers_use_the_agreed_version() -> None:
    found = FlashAttnPackage(2, None)
    alone = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    layers = [
        SelfAttention(model("auto"), 0, ParameterBuilder(7, alone, False, torch.float32, CPU, kernels), ParallelAxes())
        for kernels in (Kernels().with_flash_attn(found), Kernels())
    ]
    assert [layer._core.backend.name for layer in layers] == ["flash", "fused"]
    assert layers[0]._core.backend.kernel is found


def configured(backend, minutes=10):
    return build_config(
        {
            "model": {
                **{"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "attention_dropout": 0.0},
                "attention_backend": backend,
            },
            "training": {"train_iters": 1, "seq_length": 8, "bf16": True},
            "optimizer": {"lr": 0.1},
            "parallel": {"distributed_timeout_minutes": minutes},
        }
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make modules of the two versions, for a GPU of a compute capability."""

    def make(capability, newest, second=None):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: capability)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "flash_attn_interface.py").write_text(newest)
        if second is not None:
            (tmp_path / "flash_attn").mkdir()
            (tmp_path / "flash_attn" / "__init__.py").touch()
            (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text(second)

    return make


def test_a_version_that_crashes_or_hangs_in_a_trial_ends_no_rank(installed) -> None:
    installed((9, 0), "import os\nos.abort()\n", "import time\ntime.sleep(600)\n")
    # The other ranks wait for 18 s, and both trials together may take 40% of this time.
    tried = try_flash_attn(configured("flash", minutes=0.3), torch.bfloat16, CUDA)
    assert tried.keys() == {3, 2}
    assert all(str(problem).startswith("does not run here: using it ") for problem in tried.values())
    assert re.search("took longer than [1-7] s", str(tried[2]))


def test_versions_that_would_not_be_used_are_not_tried(installed, tmp_path) -> None:
    note = tmp_path / "tried"
    program = f"import os\nopen({str(note)!r}, 'a').write('x')\nos.abort()\n"
    installed((9, 0), program, program)
    assert try_flash_attn(configured("fused"), torch.bfloat16, CUDA) == {}
    assert try_flash_attn(configured("auto"), torch.bfloat16, CPU) == {}
    assert not note.exists()
    # On Hopper torch's kernel is faster than version 2.
    assert try_flash_attn(configured("auto"), torch.bfloat16, CUDA).keys() == {3}
    assert note.read_text() == "x"


def test_the_first_version_that_works_ends_the_trials(installed, monkeypatch) -> None:
    installed((9, 0), "", "")
    monkeypatch.setattr(flash_attn_agreement, "try_in_process", lambda *_: None)
    assert try_flash_attn(configured("flash"), torch.bfloat16, CUDA) == {3: None}
