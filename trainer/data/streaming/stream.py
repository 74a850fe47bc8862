"""Text streams of a run, by split, from its config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.config.blends import parse_blend, parse_split
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.prepare.inputs import find_inputs
from trainer.data.samples.batches import Split
from trainer.data.samples.sources import SPLITS
from trainer.data.streaming.samples import StreamedSamples
from trainer.data.streaming.text_pieces import Cursor, Pieces
from trainer.data.streaming.work import Reading, Share, SkippedDocument, documents_of, shares_of
from trainer.data.streaming.workers import Encoder, EncoderPool, InlineEncoder
from trainer.data.tokenizers.factory import load_tokenizer
from trainer.data.tokenizers.settings import settings_of
from trainer.data.tokenizers.tokenizer import Tokenizer

_LARGEST_DOCUMENT = 256 << 20
"""A larger plain file is probably not meant to be one document, which must fit in memory."""

_PART_OF_TIMEOUT = 0.9
"""Share of parallel.distributed_timeout_minutes after which a silent process is given up. Its rank must fail before
the ranks that wait for it time out, so that its log names the cause."""


class TextStream:
    """Text streams of all splits. Starts no process before the first sample is requested."""

    def __init__(
        self,
        samples: Mapping[Split, StreamedSamples],
        encoder: Encoder,
        origin: Mapping[str, Any],
        pieces: Pieces,
        say: Callable[[str], None],
    ) -> None:
        """Wrap ``samples``.

        Args:
            samples: samples by split.
            encoder: encoder of all splits; closed by ``close``.
            origin: settings that determine the training samples, by name, as plain values.
            pieces: pieces of the training text.
            say: called with a line about text that was modified since a checkpoint.
        """
        self.samples = dict(samples)
        self._encoder = encoder
        self._origin = dict(origin)
        self._pieces = pieces
        self._say = say

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """Return plain values for a checkpoint, from which training resumes at this sample."""
        return {
            "stream": self._origin,
            "times": self._pieces.times,
            **self.samples["train"].state(consumed_samples),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Resume from a checkpoint's state.

        None encodes all earlier text again, to the same samples.

        Raises:
            DataError: the state is of another stream, for example of files with other sizes.
        """
        if state is None:
            return
        before = state.get("stream")
        if before != self._origin:
            if "datasets" in state:
                problem = "the run was on prepared files, so its checkpoint holds no place in text"
            elif not isinstance(before, Mapping):
                problem = "the checkpoint's place in the text is of another version, which does not name its settings"
            else:
                changed = [name for name, value in self._origin.items() if before.get(name) != value]
                problem = f"the checkpoint's place in the text is of another stream: {', '.join(changed)} changed"
            raise DataError(
                f"data.streaming: {problem}; resume with the original settings, or begin another run with its weights "
                "by checkpoint.load and checkpoint.finetune"
            )
        if state.get("times", self._pieces.times) != self._pieces.times:
            newest = max(self._pieces.files, key=lambda file: file.mtime_ns)
            self._say(
                f"files of the text, the newest of which is {newest.path}, were written or copied since the "
                "checkpoint; their sizes are the same, and the samples too unless the text has changed"
            )
        self.samples["train"].restore(state)

    def close(self) -> None:
        """End the processes."""
        for samples in self.samples.values():
            samples.close()
        self._encoder.close()


def open_stream(
    config: TrainConfig, kept: int, say: Callable[[str], None]
) -> tuple[TextStream, Tokenizer, tuple[str, ...]]:
    """Open the streams of ``config.data``; return them, their tokenizer, and notes for the user.

    Args:
        config: the run's config, with data.streaming.
        kept: number of samples that may be read ahead of training.
        say: called with a line about the first skipped document, and about text that was modified.

    Raises:
        DataError: files or tokenizer cannot be used, or no document belongs to the training split.
    """
    data, training = config.data, config.training
    tokenizer = load_tokenizer(data, config.model.vocab_size)
    if tokenizer.eod is None:
        raise DataError("data.eod_token: the tokenizer declares no token that ends a document; set its name")
    reading = Reading(data.streaming_key, data.streaming_text_document, data.streaming_on_error == "skip")
    settings = settings_of(data, config.model.vocab_size)
    if settings.has_files:
        settings = replace(settings, engine=tokenizer.engine)
    patience_s = _PART_OF_TIMEOUT * 60 * config.parallel.distributed_timeout_minutes
    encoder: Encoder = InlineEncoder(settings, reading)
    if data.num_workers:
        encoder = EncoderPool(data.num_workers, settings, reading, patience_s=patience_s, say=_warn)
    samples: dict[Split, StreamedSamples] = {}
    notes: list[str] = list(tokenizer.notes)
    parts = _parts(config, reading)
    for split, pieces, share in parts:
        if split != "train" and (not training.eval_iters or split == "test"):
            continue
        bad: list[SkippedDocument] = []
        if not _has_document(pieces, reading, share, bad):
            if split == "train":
                also = f"; the first skipped document is {bad[0].describe()}" if bad else ""
                raise DataError(f"data.streaming: no document of the text is in the training split; add text{also}")
            notes.append(f"no evaluation on {split}: no document of the text belongs to this split")
            continue
        samples[split] = StreamedSamples(
            pieces,
            share,
            encoder,
            seq_length=training.seq_length,
            seed=training.seed,
            buffer_bytes=data.streaming_buffer_mib << 20,
            kept=kept,
            say=say,
        )
    processes = f"{data.num_workers} process{'es' if data.num_workers > 1 else ''}"
    where = f"in {processes} of each replica" if data.num_workers else "in the training process"
    engine = f" by {tokenizer.engine}" if settings.has_files else ""
    notes.append(f"text is encoded{engine} while the model trains, {where}")
    # The first part is the training split: trainer.planning.data_checks rejects a config without one.
    origin = {"the tokenizer": [tokenizer.sha256, tokenizer.eod], **_origin(config, *parts[0][1:])}
    return TextStream(samples, encoder, origin, parts[0][1], say), tokenizer, tuple(notes)


def _warn(line: str) -> None:
    # On standard error: each rank has its own processes, and its own log.
    print(f"trainer: data.streaming: {line}", file=sys.stderr, flush=True)


def _origin(config: TrainConfig, pieces: Pieces, share: Share) -> dict[str, Any]:
    """Return the settings, besides the tokenizer, that determine the training samples, by key."""
    data, training = config.data, config.training
    return {
        "training.seq_length": training.seq_length,
        "training.seed": training.seed,
        "data.streaming_buffer_mib": data.streaming_buffer_mib,
        "data.streaming_key": data.streaming_key,
        "data.streaming_text_document": data.streaming_text_document,
        "files or their sizes": pieces.fingerprint,
        # As text: some JSON readers do not support 64-bit integers.
        "data.split": f"{share.start}-{share.stop}",
    }


def _parts(config: TrainConfig, reading: Reading) -> list[tuple[Split, Pieces, Share]]:
    data, seed = config.data, config.training.seed
    if data.train_data_path:
        return [
            (split, _open(f"data.{split}_data_path", getattr(data, f"{split}_data_path"), reading, seed), Share())
            for split in SPLITS
            if getattr(data, f"{split}_data_path")
        ]
    if not data.data_path:
        raise DataError("data.data_path: is unset; name the text files to stream")
    pieces = _open("data.data_path", data.data_path, reading, seed)
    return [
        (split, pieces, share)
        for split, share in zip(SPLITS, shares_of(parse_split(data.split)), strict=True)
        if share.start < share.stop
    ]


def _open(key: str, entries: Sequence[str], reading: Reading, seed: int) -> Pieces:
    try:
        files = find_inputs([part.prefix for part in parse_blend(key, entries)])
        large = [file for file in files if file.kind == "text" and file.size > _LARGEST_DOCUMENT]
        if large and reading.text_document == "file":
            raise DataError(
                f"{large[0].path}: is plain text of {large[0].size / 1e6:,.0f} MB, and would be one document; choose "
                "the unit of a document with data.streaming_text_document: line or paragraph"
            )
        return Pieces(files, reading.text_document, seed)
    except DataError as error:
        raise DataError(f"{key}: {str(error).removeprefix('--input: ')}") from None


def _has_document(pieces: Pieces, reading: Reading, share: Share, bad: list[SkippedDocument]) -> bool:
    """True if any document belongs to the split.

    Reads up to the first such document, or all text.
    """
    return any(text for piece, _ in pieces.rest_of_epoch(Cursor()) for text in documents_of(piece, reading, share, bad))
