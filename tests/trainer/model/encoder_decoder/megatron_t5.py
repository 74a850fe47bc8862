"""Megatron-LM's T5 in plain torch, written from megatron/core/models/T5 and pretrain_t5.py; no code of the trainer.

Reads weights under the trainer's global names. Activations are [B, S, H].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]


class MegatronT5:
    """The model of one set of flags."""

    def __init__(
        self,
        weights: Weights,
        *,
        heads: int,
        layers: tuple[int, int],
        positions: str = "learned_absolute",
        rms_norm: bool = False,
        epsilon: float = 1e-5,
    ):
        """``layers``: of encoder and decoder."""
        self.weights, self.heads, self.layers = weights, heads, layers
        self.positions, self.rms_norm, self.epsilon = positions, rms_norm, epsilon

    def logits(self, source: torch.Tensor, source_mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[B, D, V] for encoder tokens [B, E], their mask and decoder tokens [B, D]."""
        length = target.shape[1]
        seen = source_mask[:, None, None]  # [B, 1, 1, E]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        encoded = self._stack("encoder", source, seen, None, None)
        decoded = self._stack("decoder", target, causal, encoded, seen)
        table = self.weights.get("head.weight", self.weights["embedding.word.weight"])
        return decoded @ table.T + self.weights.get("head.bias", 0.0)

    def _stack(self, stack, tokens, seen, encoded, encoded_seen):
        hidden = self.weights["embedding.word.weight"][tokens]
        if self.positions == "learned_absolute":
            hidden = hidden + self.weights["embedding.position.weight"][: tokens.shape[1]]
        bias = self._relative_bias(stack, tokens.shape[1]) if self.positions == "relative" else 0.0
        for number in range(self.layers[stack == "decoder"]):
            layer = f"{stack}.layers.{number}"
            normed = self._norm(f"{layer}.attention_norm", hidden)
            hidden = hidden + self._attention(f"{layer}.attention", normed, normed, seen, bias)
            if encoded is not None:
                normed = self._norm(f"{layer}.cross_attention_norm", hidden)
                hidden = hidden + self._attention(f"{layer}.cross_attention", normed, encoded, encoded_seen)
            inner = self._linear(f"{layer}.mlp.fc1", self._norm(f"{layer}.mlp_norm", hidden))
            hidden = hidden + self._linear(f"{layer}.mlp.fc2", F.gelu(inner))
        return self._norm(f"{stack}.final_norm", hidden)

    def _attention(self, name, hidden, source, seen, bias=None):
        query = self._heads(self._linear(f"{name}.query", hidden))
        keys, values = (self.weights[f"{name}.key_value.weight"][each] for each in (0, 1))
        of_keys, of_values = self.weights.get(f"{name}.key_value.bias", (0.0, 0.0))
        key, value = self._heads(source @ keys.T + of_keys), self._heads(source @ values.T + of_values)
        if bias is not None and self.positions == "rope":
            query, key = _rotated(query), _rotated(key)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        scores = (scores + (0.0 if bias is None else bias)).masked_fill(~seen, -torch.inf)
        return self._linear(f"{name}.projection", (scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def _heads(self, hidden):
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, A, S, D]

    def _linear(self, name, inputs):
        return inputs @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _norm(self, name, hidden):
        weight = self.weights[f"{name}.weight"]
        if self.rms_norm:
            return hidden / (hidden.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * weight
        return F.layer_norm(hidden, hidden.shape[-1:], weight, self.weights[f"{name}.bias"], self.epsilon)

    def _relative_bias(self, stack, length):
        """[A, S, S]: RelativePositionEmbedding with its 32 buckets and largest distance 128, one distance at a time."""
        table, buckets = self.weights[f"{stack}.relative_bias.weight"], torch.zeros(length, length, dtype=torch.int64)
        for query in range(length):
            for key in range(length):
                count, first, distance = 32, 0, query - key
                if stack == "encoder":
                    count, first, distance = 16, 16 * (key > query), abs(distance)
                distance, exact = max(distance, 0), count // 2
                if distance >= exact:
                    share = math.log(distance / exact) / math.log(128 / exact)
                    distance = min(exact + int(share * (count - exact)), count - 1)
                buckets[query, key] = first + distance
        return table[buckets].permute(2, 0, 1)


def _rotated(heads):
    """Rotary positions with base 10000 over all channels, channel i with i + half."""
    half = heads.shape[-1] // 2
    periods = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(heads.shape[2], dtype=torch.float64), periods)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
