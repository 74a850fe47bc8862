"""Section ``data``: training data, tokenizer and data loading."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from trainer.config.blends import DEFAULT_SPLIT, PATH_KEYS, path_entries
from trainer.config.sections.section import Section
from trainer.config.tokenizer_keys import TokenizerKeys


class DataConfig(TokenizerKeys, Section):
    """Training data, tokenizer and data loading."""

    data_path: list[str] = []
    """Prefixes of indexed datasets (.bin/.idx), divided into train, valid and test by ``split``. Several datasets are
    blended: with weights, ``0.3 A 0.7 B``, in these proportions; without, ``A B``, in proportion to their sizes."""
    train_data_path: list[str] = []
    """Datasets for training only, not divided by ``split``. Replaces data_path."""
    valid_data_path: list[str] = []
    """Datasets for validation only, not divided by ``split``."""
    test_data_path: list[str] = []
    """Used only by ``python -m trainer evaluate``."""
    split: str = DEFAULT_SPLIT
    """One to three shares, for train, valid and test."""
    sample_order: Literal["stable", "megatron"] = "stable"
    """stable: shuffle each epoch separately, so that the order does not depend on train_iters; the first epoch has the
    order of a one-epoch run of Megatron-LM. megatron: shuffle all epochs of the run together, which gives exactly
    Megatron-LM's order for the same seed, lengths, iterations and batch size, and another order for another
    train_iters."""
    sample_packing: bool = False
    """For fine-tuning: pack whole documents into each sequence, with separate attention and positions per document.
    The rest of a sequence is padding, which does not count in the loss. Documents of more than seq_length + 1 tokens
    are skipped. (Megatron-LM's --sft packs the conversations of one line in this way.)"""
    answer_only_loss: bool = False
    """With sample_packing: the sequences of a document alternate between prompt and answer, ending with an answer, and
    only the tokens of answers count in the loss."""
    mask_prob: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """With model.architecture bert or t5: share of the tokens that are masked, in spans of whole words: up to three for
    bert, up to ten for t5."""
    short_seq_prob: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """With model.architecture bert or t5: share of the samples that are shorter than seq_length."""
    mock_data: bool = False
    """Train on a generated, learnable token stream, to test a cluster without data."""
    eod_mask_loss: bool = False
    """Leave the end of a document out of the loss."""
    reset_attention_mask: bool = False
    """Stop attention at document boundaries: a token never attends to another document in the same sample."""
    reset_position_ids: bool = False
    """Restart position ids at each document."""
    num_workers: NonNegativeInt = 2
    """0: read each batch on demand. Otherwise: prefetch batches in the background; with ``streaming`` this is the
    number of encoding processes per replica. The batches do not depend on this number."""
    streaming: bool = False
    """Train directly from text: the data paths name files, patterns or folders of .jsonl, .parquet or plain text,
    compressed or not, which is tokenized during training. ``split`` divides documents by a hash of their text."""
    streaming_key: str = "text"
    """JSON key or table column that holds the text."""
    streaming_text_document: Literal["file", "paragraph", "line"] = "file"
    """Unit of plain text that is one document."""
    streaming_on_error: Literal["stop", "skip"] = "stop"
    """Action at an invalid document."""
    streaming_buffer_mib: PositiveInt = 16
    """Size of the shuffle buffer in MiB of text; its memory can be ten times as large."""
    data_cache_path: str | None = None
    """Folder for index caches. Unset: ``cache`` beside the data, or in the run directory if the former is read-only."""

    @field_validator(*PATH_KEYS, mode="before")
    @classmethod
    def _split_into_entries(cls, value: Any) -> Any:
        return path_entries(value)
