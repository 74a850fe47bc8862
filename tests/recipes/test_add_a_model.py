"""docs/dev/add-a-model.md, part 1, followed for Arcee: Llama with a squared ReLU and no gates."""

import re

import pytest

from tests.recipes.copied_tree import GATES, PROOF_S, ROOT, CopiedTree, narrowed

FAMILY = '''"""Arcee (AFM): Llama with a squared ReLU in place of the gates. Torch-free.

Names: transformers models/arcee/modeling_arcee.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, TINY, attention, ends, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", "relu2")
    hub.only("attention_bias", False)
    hub.only("mlp_bias", False)
    return {**read_shape(hub), **read_rope(hub), "swiglu": False, "squared_relu": True}


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from norms(layer)
        yield from attention(model, layer)
        ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        yield weight(f"{ours}.fc1.weight", f"{theirs}.up_proj.weight")
        yield weight(f"{ours}.fc2.weight", f"{theirs}.down_proj.weight")


ARCEE = Family(
    name="Arcee",
    model_type="arcee",
    architecture="ArceeForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny=TINY,
    absent={
        **ABSENT,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
'''


@pytest.fixture
def with_family(tree: CopiedTree) -> CopiedTree:
    """The copy after all steps of part 1."""
    tree.write("trainer/families/dense/arcee.py", FAMILY)
    catalogue = "trainer/families/catalogue.py"
    tree.add_after(
        catalogue,
        "from trainer.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2",
        "from trainer.families.dense.arcee import ARCEE",
    )
    tree.add_after(catalogue, "    LLAMA,", "    ARCEE,")
    page = "docs/guide/models.md"
    llama = next(line for line in tree.text(page).splitlines() if line.startswith("| Llama |"))
    tree.add_after(page, llama, "| Arcee | no | no | no | no | no |")
    return tree


def command_of_the_page() -> str:
    """The command of part 1, for Arcee."""
    text = (ROOT / "docs/dev/add-a-model.md").read_text(encoding="utf-8")
    part = text.partition("\n## 1.")[2].partition("\n## 2.")[0]
    [command] = re.findall(r"^    (.* -m pytest .*) -k NAME$", part, re.MULTILINE)
    return command


def test_a_family_is_that_of_transformers(with_family: CopiedTree) -> None:
    with_family.check_format()
    # Layouts over several ranks are left to the proof.
    with_family.run(narrowed(command_of_the_page(), "(Arcee and not serial) or page"))


@pytest.mark.proof
@pytest.mark.timeout(PROOF_S)
def test_a_family_passes_its_tests_in_every_layout_and_the_gates(with_family: CopiedTree) -> None:
    with_family.run(narrowed(f"{command_of_the_page()} --proofs", "Arcee"), limit_s=PROOF_S)
    with_family.prove(f"{GATES} tests/trainer/families tests/trainer/hub tests/trainer/generation/test_greedy_text.py")
