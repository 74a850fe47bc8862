"""Training from raw text: every document once per epoch, in the same samples everywhere."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.trainer.data.training_data import by_number, config, same
from trainer.config.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.loading.build import build_data
from trainer.data.prepare.chunks import TextDocument
from trainer.data.prepare.compression import open_bytes
from trainer.data.prepare.inputs import find_inputs
from trainer.data.samples.batches import TrainData
from trainer.data.streaming.samples import StreamedSamples
from trainer.data.streaming.text_pieces import Cursor, Piece, Pieces
from trainer.data.streaming.work import Encoded, Reading, Share, SkippedDocument, documents_of, shares_of
from trainer.data.streaming.workers import Encoder, EncoderPool, InlineEncoder
from trainer.data.tokenizers.settings import TokenizerSettings

T = TypeVar("T")
NUMBERS = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
EOD = 1000
DOCUMENTS = [f"{number} " * (1 + number * 7 % 23) + str(number) for number in range(200)]
SEQ_LENGTH = 8
ALL = Share()
PLAIN = Reading()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred documents in files of several kinds."""
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
    (folder / "a.jsonl").write_text("".join(lines[:90]))
    # The last line has no line end, and one line is empty.
    (folder / "b.jsonl").write_text("\n" + "".join(lines[90:120]).rstrip("\n"))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[120:195]).encode()))
    for number in range(195, 200):
        (folder / f"d{number}.txt").write_text(DOCUMENTS[number])
    (folder / "e.jsonl").write_text("")
    return folder


def pieces_of(folder: Path, size: int = 300, text_document: TextDocument = "file", seed: int = 1) -> Pieces:
    return Pieces(find_inputs([str(folder)]), text_document, seed, size)


def read(pieces: Pieces, cursor: Cursor, reading: Reading = PLAIN, share: Share = ALL) -> list[str]:
    bad: list[SkippedDocument] = []
    found = [text for piece, _ in pieces.rest_of_epoch(cursor) for text in documents_of(piece, reading, share, bad)]
    assert not bad
    return [text for text in found if isinstance(text, str)]


@pytest.mark.parametrize("size", [1, 37, 300, 1 << 20])
def test_an_epoch_reads_every_document_once_however_files_are_cut(folder: Path, size: int) -> None:
    pieces = pieces_of(folder, size)
    orders = [read(pieces, Cursor(epoch)) for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [sorted(DOCUMENTS)] * 2
    assert size > 300 or orders[0] != orders[1]  # the largest size has only two pieces


@pytest.mark.parametrize("text_document", ["paragraph", "line"])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_plain_text_is_cut_between_its_documents(tmp_path: Path, text_document: TextDocument, packing: str) -> None:
    paragraphs = [f"{number}\n" * (number % 4 + 1) for number in range(60)]
    text = "\n".join(paragraphs).replace("7\n\n8", "7\n\n\n \n8").encode()
    (tmp_path / f"t.txt{packing}").write_bytes(gzip.compress(text) if packing else text)
    expected = paragraphs if text_document == "paragraph" else "".join(paragraphs).splitlines()
    for size in (1, 10, 53):
        pieces = pieces_of(tmp_path, size, text_document)
        found = read(pieces, Cursor(), Reading(text_document=text_document))
        assert sorted(found) == sorted(text.rstrip("\n") for text in expected)


def test_reading_resumes_from_every_place(folder: Path) -> None:
    pieces = pieces_of(folder, 100)
    whole = list(pieces.rest_of_epoch(Cursor(3)))
    assert any(cursor.offset for _, cursor in whole)  # within the compressed file too
    for number, (_, cursor) in enumerate(whole[:-1], 1):
        assert next(iter(pieces_of(folder, 100).rest_of_epoch(cursor)))[0] == whole[number][0]
    assert whole[-1][1].epoch == 4 or not list(pieces.rest_of_epoch(whole[-1][1]))


def test_splits_divide_the_documents_by_their_text(folder: Path) -> None:
    shares = shares_of((0.7, 0.2, 0.1))
    parts = [sorted(read(pieces_of(folder), Cursor(), share=share)) for share in shares]
    assert sorted(itertools.chain(*parts)) == sorted(DOCUMENTS)
    assert 110 < len(parts[0]) < 170 and 20 < len(parts[1]) < 65 and parts[2]
    # Independent of the cuts and the order.
    assert sorted(read(pieces_of(folder, 7, seed=2), Cursor(), share=shares[1])) == parts[1]
    assert shares_of((1.0, 0.0, 0.0))[0] == Share()
    assert shares_of((0.9, 0.1, 0.0))[1].stop == 1 << 64


def samples_of(folder: Path, encoder: Encoder, share: Share = ALL, kept: int = 50) -> StreamedSamples:
    return StreamedSamples(
        pieces_of(folder), share, encoder, seq_length=SEQ_LENGTH, seed=5, buffer_bytes=2000, kept=kept
    )


@pytest.fixture
def inline() -> Encoder:
    return InlineEncoder(NUMBERS, Reading())


def tokens_of(samples: StreamedSamples, count: int) -> list[int]:
    """Return the concatenated tokens of the first ``count`` samples."""
    found = [samples.sample(number) for number in range(count)]
    assert all(len(sample) == SEQ_LENGTH + 1 and sample.dtype == np.int64 for sample in found)
    assert all(one[-1] == other[0] for one, other in itertools.pairwise(found))
    return [int(token) for sample in found for token in sample[:-1]]


def test_samples_hold_every_token_of_every_epoch(folder: Path, inline: Encoder) -> None:
    expected = Counter(tuple(map(int, text.split())) for text in DOCUMENTS)
    an_epoch = sum(len(document) + 1 for document in expected.elements())
    tokens = tokens_of(samples_of(folder, inline), 2 * an_epoch // SEQ_LENGTH)
    text = " ".join(map(str, tokens[:an_epoch]))
    found = Counter(tuple(map(int, part.split())) for part in text.split(f" {EOD}") if part)
    assert found == expected
    assert tokens[:an_epoch] != tokens[an_epoch : 2 * an_epoch]
    first = [int(part.split()[0]) for part in text.split(f" {EOD}") if part]
    # Neighbours in a file are rarely neighbours in the stream.
    assert sum(abs(one - other) == 1 for one, other in itertools.pairwise(first)) < 20


def test_resuming_from_any_sample_gives_the_same_samples(folder: Path, inline: Encoder) -> None:
    samples = samples_of(folder, inline)
    whole = []
    states = []
    for number in range(700):
        whole.append(samples.sample(number).tolist())
        states.append(json.dumps(samples.state(max(0, number - 20))))
    assert len(set(states)) > 10
    for number in (0, 1, 137, 400, 555, 679):
        other = samples_of(folder, inline)
        other.restore(json.loads(states[number + 20 if number else 0]))
        assert [other.sample(place).tolist() for place in range(number, number + 20)] == whole[number : number + 20]
    # Without a state, too, and in any direction.
    other = samples_of(folder, inline)
    assert [other.sample(place).tolist() for place in (600, 3, 350)] == [whole[place] for place in (600, 3, 350)]


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    pool = EncoderPool(2, NUMBERS, Reading())
    yield pool
    pool.close()


def test_any_number_of_processes_gives_the_same_samples(folder: Path, pool: EncoderPool, inline: Encoder) -> None:
    parts = shares_of((0.8, 0.2, 0.0))[:2]
    one, two = ([samples_of(folder, encoder, share) for share in parts] for encoder in (inline, pool))
    for number in (*range(100), 7, *range(300, 320)):
        for ours, theirs in zip(one, two, strict=True):
            assert np.array_equal(ours.sample(number), theirs.sample(number))
        if number == 50:
            # A scheduler's warning signal reaches the workers, too, and must not end them.
            for worker in pool._all:
                assert worker._process.pid is not None
                os.kill(worker._process.pid, signal.SIGTERM)


class OneThread(InlineEncoder):
    """Works ahead in a thread, and records the threads that encode."""

    def __init__(self) -> None:
        super().__init__(NUMBERS, Reading())
        self.threads: set[str] = set()
        self.pool = ThreadPoolExecutor(1, "encoder")

    def ahead(self, work: Callable[[], T]) -> Future[T]:
        return self.pool.submit(work)

    def encode(self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = str) -> Iterator[Encoded]:
        self.threads.add(threading.current_thread().name)
        return super().encode(pieces, share, reads)


def test_splits_take_turns_and_a_compressed_file_is_read_once_per_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent splits would compete for the processes and the cached order of an epoch."""
    opened = Mock(wraps=open_bytes)
    monkeypatch.setattr("trainer.data.streaming.text_pieces.open_bytes", opened)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    encoder = OneThread()
    train, valid = (samples_of(tmp_path, encoder, share) for share in shares_of((0.8, 0.2, 0.0))[:2])
    for number in range(0, 300, 20):
        train.sample(number)
        valid.sample(number // 20)
    encoder.pool.shutdown()
    assert encoder.threads == {"encoder_0"}
    # Each split may have opened the next epoch ahead.
    assert 2 <= opened.call_count <= train.state(300)["epoch"] + 1 + 1 + 2


def test_close_stops_a_search_in_a_compressed_file(folder: Path, inline: Encoder) -> None:
    samples = samples_of(folder, inline)
    place = next(one for _, one in pieces_of(folder).rest_of_epoch(Cursor()) if one.offset)
    samples.restore({"epoch": 0, "place": place.place, "offset": place.offset, "first": 0, "carry": []})
    samples.close()
    with pytest.raises(DataError, match="was closed"):
        samples.sample(0)


def test_a_process_that_dies_is_named_and_none_is_left(folder: Path) -> None:
    pool = EncoderPool(1, NUMBERS, Reading())
    try:
        samples = samples_of(folder, pool)
        samples.sample(0)
        (worker,) = pool._all
        assert worker._process.pid is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"num_workers was ended by signal 9 \(SIGKILL\) while it encoded .*text"):
            for number in range(10_000):
                samples.sample(number)
    finally:
        pool.close()
    assert worker._process.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError):
        pool.ahead(lambda: None)


def test_errors_of_a_process_are_raised_here(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "1 2"}\n' * 3 + "{broken\n")
    pool = EncoderPool(1, NUMBERS, Reading())
    try:
        with pytest.raises(DataError, match=r"bad\.jsonl:4: is not a line of JSON.*streaming_on_error: skip"):
            samples_of(tmp_path, pool).sample(0)
    finally:
        pool.close()
    said: list[str] = []
    skipping = InlineEncoder(NUMBERS, Reading(skip_bad=True))
    samples = StreamedSamples(
        pieces_of(tmp_path), Share(), skipping, seq_length=4, seed=5, buffer_bytes=1, kept=0, say=said.append
    )
    assert {tuple(samples.sample(number)) for number in range(9)} <= {
        (1, 2, EOD, 1, 2),
        (2, EOD, 1, 2, EOD),
        (EOD, 1, 2, EOD, 1),
    }
    assert len(said) == 1 and "bad.jsonl:4" in said[0]
    # Readable documents that the tokenizer cannot encode.
    (tmp_path / "bad.jsonl").write_text('{"text": "1 2"}\n{"text": "1 b"}\n' * 2)
    says = r"bad\.jsonl:2: NullTokenizer reads .* not 'b'; to skip such documents set data.streaming_on_error: skip"
    with pytest.raises(DataError, match=says):
        samples_of(tmp_path, InlineEncoder(NUMBERS, Reading())).sample(0)
    assert set(samples_of(tmp_path, skipping).sample(0).tolist()) == {1, 2, EOD}


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    small, large = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, lines in ((small, 3), (large, 60)):
        file.write_text('{"text": "1 2"}\n' * lines)
    pieces = pieces_of(tmp_path)
    whole = len(read(pieces, Cursor()))
    with large.open("a") as added:
        added.write('{"text": "3"}\n')
    assert len(read(pieces, Cursor())) == whole == 63  # appended lines belong to no piece
    with small.open("a") as added:
        added.write('{"text": "3"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl has another size than when the run began; restore it"):
        read(pieces, Cursor())
    os.truncate(small, 48)
    os.truncate(large, 500)
    with pytest.raises(DataError, match=r"b\.jsonl has another size"):
        read(pieces, Cursor())
    large.unlink()
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read: No such file"):
        read(pieces, Cursor())


def test_the_search_for_documents_of_a_split_ends(folder: Path, inline: Encoder) -> None:
    with pytest.raises(DataError, match="no document of the text belongs to this split"):
        samples_of(folder, inline, Share(0, 1)).sample(0)


def asked(folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "streaming": True,
        "data_path": f"{folder}/*.jsonl*",
        "tokenizer_type": "NullTokenizer",
        "num_workers": 0,
        "split": "80,20",
        "streaming_buffer_mib": 1,
        **data,
    }


def built(folder: Path, dp_rank: int = 0, dp: int = 1, training: Any = None, **data: Any) -> TrainData:
    return build_data(config(asked(folder, **data), model={"vocab_size": 1000}, **(training or {})), dp_rank, dp)


def test_a_run_gets_the_same_global_batch_on_every_dp(folder: Path) -> None:
    serial = by_number([built(folder)], consumed=72)
    assert sorted(serial) == [0, 1, 2, 3]
    for dp in (2, 4):
        split = by_number([built(folder, rank, dp) for rank in range(dp)], consumed=72)
        assert all(same(split[index], serial[index]) for index in serial)


def test_a_run_resumes_from_its_checkpoint_on_another_dp(folder: Path) -> None:
    before = built(folder)
    assert before.stream is not None
    before.micro_batches("train", 64)
    state = json.loads(json.dumps(before.stream.state(72)))
    expected = by_number([before], consumed=72)
    replicas = [built(folder, rank, 2) for rank in range(2)]
    for replica in replicas:
        assert replica.stream is not None
        replica.stream.restore(state)
    found = by_number(replicas, consumed=72)
    assert all(same(found[index], expected[index]) for index in expected)
    changes: list[tuple[str, Any]] = [
        ("training.seed", {"training": {"seed": 2}}),
        ("training.seq_length", {"training": {"seq_length": 4}}),
        ("data.split", {"split": "70,30"}),
        ("data.streaming_buffer_mib", {"streaming_buffer_mib": 2}),
        ("files or their sizes", {"data_path": f"{folder}/*.jsonl"}),
    ]
    for name, change in changes:
        other = built(folder, **change).stream
        assert other is not None
        with pytest.raises(DataError, match=rf"another stream: {name} changed; resume .* another run with its weights"):
            other.restore(state)
    for none, says in (
        ({"first": 0, "datasets": []}, "was on prepared files"),
        ({"stream": "1"}, "of another version"),
    ):
        with pytest.raises(DataError, match=says):
            before.stream.restore(none)


def test_documents_and_splits_of_a_run(folder: Path) -> None:
    data = built(folder, eod_mask_loss=True, reset_attention_mask=True)
    assert data.masks_loss and data.has_documents and data.has("valid") and data.vocab_size == 1001
    (batch, *_) = data.micro_batches("train", 0)
    assert batch.loss_mask is not None and batch.documents is not None
    assert torch.equal(batch.loss_mask == 0, batch.tokens == EOD)
    of_split = {
        split: {int(t) for b in (0, 8, 16) for batch in data.micro_batches(split, b) for t in batch.tokens.reshape(-1)}
        for split in ("train", "valid")
    }
    assert of_split["train"] & of_split["valid"] == {EOD}
    own = built(folder, data_path=[], train_data_path=f"{folder}/a.jsonl", valid_data_path=[f"{folder}/b.jsonl"])
    tokens = torch.cat([batch.tokens.reshape(-1) for batch in own.micro_batches("valid", 0)])
    assert set(tokens.tolist()) <= {*range(90, 120), EOD}
    assert own.notes[-1] == "text is encoded while the model trains, in the training process"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"mock_data": True, "data_path": []}, "data.streaming: cannot be combined with data.mock_data"),
        ({"sample_packing": True}, "data.sample_packing: needs prepared data"),
        ({"sample_order": "megatron"}, "data.sample_order: megatron needs prepared data"),
        ({"tokenizer_type": None}, "data.tokenizer_model: is unset, but data.streaming needs it"),
        ({"data_path": "0.3 a 0.7 b"}, "data.data_path: cannot have weights"),
        ({"streaming": False, "streaming_key": "body"}, "data.streaming_key: needs data.streaming"),
        ({"data_path": "{f}/none*.jsonl"}, "data.data_path: .*none.* matches no file"),
        ({"data_path": "{f}/e.jsonl"}, "data.data_path: .*e.jsonl: is empty"),
        ({"data_path": "{f}/t.parquet"}, "no column 'text', only body; name the text columns with data.streaming_key"),
        ({"streaming_key": "body"}, "no text under the key 'body' of data.streaming_key"),
        ({"split": "1,0,0", "data_path": "{f}/blank.jsonl"}, "no document of the text is in the training split"),
    ],
)
def test_unusable_streams_are_refused(folder: Path, tmp_path: Path, data: dict[str, Any], says: str) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    (tmp_path / "e.jsonl").write_text("")
    parquet.write_table(pyarrow.table({"body": ["1"]}), tmp_path / "t.parquet")
    filled: dict[str, Any] = {
        key: value.format(f=tmp_path) if isinstance(value, str) else value for key, value in data.items()
    }
    with pytest.raises((DataError, ConfigError), match=says) as caught:
        built(folder, **filled).micro_batches("train", 0)
    assert "\n" not in str(caught.value)
