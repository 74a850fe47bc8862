"""Tiny models of transformers for each family, with random weights, and the same as models of this trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.hub_weights import read_hub_weights
from trainer.config.sections.model import ModelConfig
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.families.format.family import Family
from trainer.hub.folder import HubFolder
from trainer.hub.layouts import to_theirs
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward, forward_logits
from trainer.planning.build_config import build_config

LENGTH = 24
# Large enough that every part shows in the logits.
STD = 0.3
# T5's is a factor of values that depend on the shape, so that 0.3 is small: the norms are 0.3 too.
_STD_KEYS = {"opt": "init_std", "t5": "initializer_factor", "mt5": "initializer_factor"}


def config_of(family: Family, **changes: Any) -> Any:
    """The configuration object of transformers for the family's tiny model."""
    from transformers import AutoConfig

    keys = {**copy.deepcopy(dict(family.tiny)), **changes}
    keys[_STD_KEYS.get(family.model_type, "initializer_range")] = STD
    for key in (
        *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "dropout_rate"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "residual_dropout", "embedding_dropout"),
    ):
        if key in AutoConfig.for_model(family.model_type).to_dict():
            keys[key] = 0.0
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys.setdefault(token, 1)
    return AutoConfig.for_model(family.model_type, **keys)


def published(family: Family, **changes: Any) -> Any:
    """The family's tiny model of transformers with random weights, float32."""
    import transformers

    config = config_of(family, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, family.auto_class).from_config(config, dtype=torch.float32).eval()
    if family.model_type == "mt5" or family.model_type == "t5" and not config.scale_decoder_outputs:
        _untie(model)
    with torch.no_grad():
        for parameter in model.parameters():
            # Moves biases from 0 and norms from 1.
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _untie(model: Any) -> None:
    """Give a T5 v1.1 its own output table, which transformers 5 gives it only from a file."""
    own = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * STD)
    model.all_tied_weights_keys.pop("lm_head.weight")
    model.lm_head.weight = own


def built(folder: HubFolder) -> ParallelModel:
    """The folder's model on this process, without dropout."""
    model = folder.model.model_copy(update={"moe_aux_loss_coeff": 0.0})
    config = build_config(
        {
            "model": model.model_dump(),
            "training": {"train_iters": 1, "seq_length": LENGTH},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    found = build_model(config, folder.vocab_size, mesh, ProcessGroups(), torch.device("cpu"))
    read_hub_weights(folder, found)
    found.gradients.weights_changed()
    found.gradients.wait_for_weights()
    return found


@dataclass(frozen=True)
class Text:
    """Random tokens [B, S] and the labels of each; and tokens [B, E] for an encoder, with padding."""

    tokens: Tensor
    labels: Tensor
    encoder_tokens: Tensor
    encoder_mask: Tensor

    @classmethod
    def random(cls, vocab_size: int) -> Text:
        """Two samples without the token of padding, whose row of the table transformers does not train."""
        generator = torch.Generator().manual_seed(3)
        both = torch.randint(2, vocab_size, (2, LENGTH + 1), generator=generator)
        source = torch.randint(2, vocab_size, (2, LENGTH + 6), generator=generator)
        mask = torch.arange(LENGTH + 6) < torch.tensor([[LENGTH + 6], [LENGTH - 5]])
        return cls(both[:, :-1].contiguous(), both[:, 1:].contiguous(), source, mask)

    def micro_batch(self, model: ModelConfig) -> MicroBatch:
        """The text as input of ``model``."""
        if not model.is_encoder_decoder:
            return MicroBatch(self.tokens, self.labels)
        return MicroBatch(self.tokens, self.labels, encoder_tokens=self.encoder_tokens, encoder_mask=self.encoder_mask)


def logits(model: ParallelModel, folder: HubFolder, text: Text) -> Tensor:
    """Logits [B, S, V] of our model."""
    has_encoder = folder.model.is_encoder_decoder
    found = forward_logits(model, text.tokens, *((text.encoder_tokens, text.encoder_mask) if has_encoder else ()))
    assert found is not None
    return found


def published_logits(model: Any, text: Text) -> Tensor:
    """The same by transformers."""
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": text.encoder_tokens, "attention_mask": text.encoder_mask}
        return model(**inputs, decoder_input_ids=text.tokens).logits
    return model(text.tokens).logits


def loss_and_gradients(model: ParallelModel, folder: HubFolder, text: Text) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per token, and gradients under the names of Hugging Face."""
    losses, gradients = losses_and_gradients(model, folder, text.micro_batch(folder.model))
    return losses[0], gradients


def losses_and_gradients(
    model: ParallelModel, folder: HubFolder, batch: MicroBatch
) -> tuple[list[float], dict[str, Tensor]]:
    """Mean of each term of the loss, and gradients of their sum under the names of Hugging Face."""
    counts = list(batch.loss_counts.values())
    losses = forward_backward(
        model,
        [batch],
        valid_tokens=counts if len(counts) > 1 else counts[0],
        loss_scale=1.0,
        randomness=StepRandomness(0, 0),
    )
    shards = {shard.name: shard for shard in model.gradients.parameter_shards}
    found: dict[str, Tensor] = {}
    for name, rule in folder.weights.items():
        if name not in shards:
            continue
        layout = model.layouts[name]
        whole = shards[name].gradient.view(layout.global_shape)[: layout.valid_rows]
        found |= dict(zip(rule.theirs, to_theirs(rule.form, whole), strict=True))
    return (losses.view(-1) / torch.tensor(counts)).tolist(), found


def published_loss_and_gradients(model: Any, text: Text) -> tuple[float, dict[str, Tensor]]:
    """The same by transformers; tensors of all experts in one parameter are taken apart as in its files."""
    found = published_logits(model, text)
    loss = torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), text.labels.flatten())
    loss.backward()
    return float(loss.detach()), dict(_named_gradients(model))


def _named_gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def save(model: Any, path: Path, gradients: Mapping[str, Tensor] | None = None) -> Path:
    """Save a model of transformers, or its gradients in the place of its weights."""
    if gradients is not None:
        model = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(gradients[name])
    model.save_pretrained(path)
    return path
