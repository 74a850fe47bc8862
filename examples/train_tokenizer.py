"""A byte-level BPE vocabulary from text, with the tokenizers library: the recipe of docs/guide/tokenizers.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, path: Path, special_tokens: Sequence[str] = (END_OF_DOCUMENT,)
) -> None:
    """Write a tokenizer.json of ``vocab_size`` tokens, or fewer if the texts are too small; decoding restores texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[*special_tokens],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
