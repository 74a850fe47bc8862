"""``python -m trainer preprocess``: text files or JSON lines to a Megatron-LM .bin/.idx pair and its manifest."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from trainer.data.corpus import batches_by_size, read_documents
from trainer.data.errors import DataError
from trainer.data.indexed_dataset import IndexedDatasetWriter
from trainer.data.manifest import Manifest, manifest_path
from trainer.data.tokenizer import HuggingFaceTokenizer, NullTokenizer, Tokenizer

PROGRESS_SECONDS = 2.0


class CorpusWriter:
    """Tokenizes texts into ``<prefix>.bin``, ``.idx`` and ``.json``; leaves nothing behind unless finished."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, append_eod: bool) -> None:
        """Start writing beside ``prefix``.

        Raises:
            DataError: an end-of-document token is wanted and the tokenizer has none.
        """
        if append_eod and tokenizer.eod is None:
            raise DataError("--append-eod: the tokenizer has no end-of-document token; name one with --eod-token")
        self._tokenizer = tokenizer
        self._eod = [tokenizer.eod] if append_eod and tokenizer.eod is not None else []
        self._writer = IndexedDatasetWriter(prefix, tokenizer.vocab_size)
        self.text_bytes = 0

    def add(self, texts: Sequence[str]) -> None:
        """Tokenize and append one document per text; an empty one gets no end-of-document token, as in Megatron-LM."""
        for text, tokens in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            self._writer.add_document(tokens + self._eod if tokens else [])
            self.text_bytes += len(text.encode("utf-8", "surrogatepass"))

    def finish(self) -> Manifest:
        """Put the files in place, the manifest last."""
        writer = self._writer
        manifest = Manifest(
            tokenizer_sha256=self._tokenizer.sha256,
            vocab_size=self._tokenizer.vocab_size,
            eod=self._eod[0] if self._eod else None,
            documents=writer.documents,
            sequences=writer.sequences,
            tokens=writer.tokens,
            largest_token=writer.largest_token,
            text_bytes=self.text_bytes,
        )
        # Never an old manifest beside new tokens.
        manifest_path(writer.prefix).unlink(missing_ok=True)
        writer.finish()
        manifest.write(writer.prefix)
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.discard()


def tokenize_documents(texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, append_eod: bool = True) -> Manifest:
    """Tokenize ``texts``, one document each, into the pair of ``prefix``. Memory: about a megabyte of text.

    Raises:
        DataError: see CorpusWriter.
    """
    with CorpusWriter(prefix, tokenizer, append_eod) as writer:
        for batch in batches_by_size((text,) for text in texts):
            writer.add([text for (text,) in batch])
        return writer.finish()


def main(arguments: Sequence[str]) -> int:
    """Run the command; 3 if an input, the tokenizer or the output cannot be used, with one line that says which."""
    options = _parser().parse_args(arguments)
    try:
        _preprocess(options)
    except DataError as error:
        print(f"trainer preprocess: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"trainer preprocess: {options.output_prefix}: cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    return 0


def _preprocess(options: argparse.Namespace) -> None:
    tokenizer = _tokenizer(options)
    prefixes = [Path(f"{options.output_prefix}_{key}_document") for key in options.json_keys]
    total = sum(path.stat().st_size for path in options.input if path.is_file())
    progress = Progress(total)
    with ExitStack() as stack:
        writers = [stack.enter_context(CorpusWriter(prefix, tokenizer, options.append_eod)) for prefix in prefixes]
        for batch in batches_by_size(read_documents(options.input, options.json_keys)):
            for position, writer in enumerate(writers):
                writer.add([texts[position] for texts in batch])
            progress.report(len(batch), sum(writer.text_bytes for writer in writers))
        progress.end()
        for prefix, writer in zip(prefixes, writers, strict=True):
            manifest = writer.finish()
            print(
                f"{prefix}.bin, .idx and .json: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
                f"{manifest.text_bytes / max(1, manifest.tokens):.2f} bytes per token"
            )


class Progress:
    """One line on standard error that says how far it is: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, input_bytes: int) -> None:
        self._input_bytes = input_bytes
        self._documents = 0
        self._started = self._said = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def report(self, documents: int, text_bytes: int) -> None:
        """Count ``documents`` more, ``text_bytes`` of text in all."""
        self._documents += documents
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS:
            return
        self._said = now
        rate = text_bytes / (now - self._started) / 1e6
        line = (
            f"{self._documents:,} documents, {text_bytes / 1e6:.1f} MB of text ({self._input_bytes / 1e6:.1f} MB of "
            f"input), {rate:.1f} MB/s"
        )
        print(line, end="\r" if self._terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._said != self._started:
            print(file=sys.stderr)


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    if options.tokenizer_type == "NullTokenizer":
        if options.vocab_size is None:
            raise DataError("--vocab-size: NullTokenizer needs it")
        return NullTokenizer(options.vocab_size)
    if options.tokenizer_model is None:
        raise DataError("--tokenizer-model: is missing; name a tokenizer.json or the folder that holds it")
    return HuggingFaceTokenizer(options.tokenizer_model, options.eod_token)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer preprocess",
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, in Megatron-LM's format. "
        "Files named .jsonl, .json or .ndjson hold one document per line, all others are one document each.",
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument(
        "--tokenizer-type", choices=["HuggingFaceTokenizer", "NullTokenizer"], default="HuggingFaceTokenizer"
    )
    parser.add_argument("--tokenizer-model", type=Path, metavar="FILE", help="tokenizer.json, or the folder with it")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="how many numbers a NullTokenizer takes")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--eod-token", metavar="NAME", help="name of that token where it cannot be told")
    return parser
