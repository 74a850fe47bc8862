"""Types of the documents that the trainer's own commands print with ``--json``.

llmctl cannot import what builds them; the tests of those commands compare the documents with these types.
"""

from typing import Any, Literal

from typing_extensions import TypedDict


class LengthRange(TypedDict):
    """Documents of a range of lengths.

    Attributes:
        shortest: tokens of the shortest document of the range.
        longest: tokens of the longest one that the range may have.
        documents: number of documents.
        tokens: number of their tokens.
    """

    shortest: int
    longest: int
    documents: int
    tokens: int


class Lengths(TypedDict):
    """Lengths of the documents that are not empty, in tokens.

    Attributes:
        shortest: of all documents.
        longest: of all documents.
        mean: of all documents.
        percentiles: percent of the documents -> length that they do not exceed.
        ranges: histogram by powers of two.
    """

    shortest: int
    longest: int
    mean: float
    percentiles: dict[str, int]
    ranges: list[LengthRange]


class Sample(TypedDict):
    """The beginning of a document.

    Attributes:
        document: its number, from 0.
        tokens: number of tokens of the whole document.
        ids: its first token ids.
        text: these as text; null without a tokenizer.
    """

    document: int
    tokens: int
    ids: list[int]
    text: str | None


class Contents(TypedDict):
    """Findings of a reading of all tokens.

    Attributes:
        smallest_token: smallest token id; -1 without tokens.
        largest_token: largest token id; -1 without tokens.
        ends: occurrences of the token that ends a document; null if the manifest names none.
        bin_sha256: SHA-256 of the .bin, in hexadecimal.
        idx_sha256: SHA-256 of the .idx, in hexadecimal.
        compared: true if the manifest had checksums to compare.
    """

    smallest_token: int
    largest_token: int
    ends: int | None
    bin_sha256: str
    idx_sha256: str
    compared: bool


class Manifest(TypedDict):
    """The manifest that was written with the data.

    Attributes:
        tokenizer_sha256: fingerprint of the tokenizer, in hexadecimal.
        vocab_size: number of its token ids.
        eod: id of the token that ends each document; null if none was appended.
        documents: number of documents.
        sequences: number of sequences.
        tokens: number of tokens.
        largest_token: largest token id; -1 without tokens.
        text_bytes: UTF-8 bytes of the tokenized text.
        bin_sha256: SHA-256 of the .bin, in hexadecimal; null in manifests of schema 1.
        idx_sha256: SHA-256 of the .idx, in hexadecimal; null in manifests of schema 1.
        schema: version of the manifest's form.
    """

    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    documents: int
    sequences: int
    tokens: int
    largest_token: int
    text_bytes: int
    bin_sha256: str | None
    idx_sha256: str | None
    schema: int


class DatasetPair(TypedDict):
    """One pair of a .bin and an .idx. A pair that cannot be opened has its problems alone, and zeros.

    Attributes:
        prefix: path without .bin or .idx.
        problems: one sentence each; empty if all is well.
        dtype: type of the stored token ids.
        documents: number of documents.
        empty_documents: number of documents without tokens.
        sequences: number of sequences.
        tokens: number of tokens.
        bin_bytes: size of the .bin.
        idx_bytes: size of the .idx.
        lengths: null without documents that have tokens.
        manifest: null without one.
        samples: some documents, spread evenly.
        contents: null without --verify.
    """

    prefix: str
    problems: list[str]
    dtype: str | None
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    lengths: Lengths | None
    manifest: Manifest | None
    samples: list[Sample]
    contents: Contents | None


class DatasetDocument(TypedDict):
    """Document of ``llmctl data inspect``.

    Attributes:
        pairs: one for each prefix.
    """

    pairs: list[DatasetPair]


class ModelDocument(TypedDict):
    """Document of ``llmctl checkpoint show``. Null or empty: not known, or not there.

    Attributes:
        path: the folder or file.
        format: kind of the folder or file.
        problem: why the weights cannot be loaded.
        family: name and model_type; or the nearest family and the keys in which the model differs.
        parameters: numbers of parameters: total, active per token, and of each part.
        weights: bytes of the tensors, files and their bytes, and number of tensors of each dtype.
        training: iteration, tokens, layout and optimizer of a checkpoint of this trainer.
        tokenizer: its kind, number of tokens and end of a document, or a problem.
        model: keys of the section model that differ from their defaults.
        config_json: content of a config.json that describes no model known here.
        notes: sentences on what of the files is not read.
        tensors: name, dtype and shape of each.
    """

    path: str
    format: str
    problem: str | None
    family: dict[str, Any] | None
    parameters: dict[str, Any] | None
    weights: dict[str, Any] | None
    training: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    model: dict[str, Any] | None
    config_json: dict[str, Any] | None
    notes: list[str]
    tensors: list[dict[str, Any]]


class ContinuationDocument(TypedDict):
    """One line of ``llmctl generate --json``, which prints one document for each prompt.

    Attributes:
        prompt: the prompt as it was given.
        text: the continuation.
        ending: stop: a stop token or text; length: --max-tokens; positions: the model has no more.
        tokens: number of generated tokens.
    """

    prompt: str
    text: str
    ending: Literal["stop", "length", "positions"]
    tokens: int


class TextEvaluationDocument(TypedDict):
    """Document of ``llmctl evaluate`` for a text.

    Attributes:
        checkpoint: folder of the model.
        iteration: of the checkpoint; null for a model of another program.
        tokens: number of predicted tokens.
        loss: mean loss in nats per token; null if it is not finite.
        perplexity: exponential of the loss; null if it is not finite.
        bits_per_byte: loss per UTF-8 byte of the text; null without a tokenizer, and if it is not finite.
    """

    checkpoint: str
    iteration: int | None
    tokens: int
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None


class TaskEvaluationDocument(TypedDict):
    """Document of ``llmctl evaluate --tasks``.

    Attributes:
        checkpoint: folder of the model.
        iteration: of the checkpoint; null for a model of another program.
        tasks: task -> metric -> its value; null if it is not finite.
    """

    checkpoint: str
    iteration: int | None
    tasks: dict[str, dict[str, float | None]]


class KernelPart(TypedDict):
    """A prerequisite of the kernels, such as a compiler.

    Attributes:
        name: of the prerequisite.
        found: true if it was found.
        detail: version and location, or the problem and its remedy.
    """

    name: str
    found: bool
    detail: str


class KernelRow(TypedDict):
    """Backend of one operation on one device in one dtype.

    Attributes:
        device: type of the device.
        dtype: of the activations.
        operation: name of the operation.
        backend: the choice of auto.
        reason: reasons against the backends before it; empty if it is the first.
    """

    device: str
    dtype: str
    operation: str
    backend: str
    reason: str


class KernelsDocument(TypedDict):
    """Document of ``llmctl env kernels doctor``.

    Attributes:
        python: path of the Python of jobs.
        torch: version of torch.
        machine: kind of the processor.
        parts: the prerequisites.
        operations: the backend of each operation.
    """

    python: str
    torch: str
    machine: str
    parts: list[KernelPart]
    operations: list[KernelRow]
