"""CPU time and memory of indexes, blends and random access, compared with megatron-core.

    PYTHON312=python3.12 sh benchmarks/peers/set_up.sh   # once; without megatron-core only llmctl is measured
    OMP_NUM_THREADS=1 python -m benchmarks.data_index --write

This uses 10 million documents: half an hour, 4 GB of memory, 2 GB of disk. A quick check that everything works:

    python -m benchmarks.data_index --documents 100000 --blended 100000 --runs 1

Both programs read the same files and must produce equal results. megatron-core is the released wheel with its compiled
C++ helpers. Every case runs in a separate process, llmctl and megatron-core in turn; the result is the least CPU time
of --runs rounds. The .bin of 10 million documents is a sparse file, because an index needs only lengths. Reading uses
real bytes in the page cache; llmctl reads batches, megatron-core reads sample by sample.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.data_index_cases import (
    EOD,
    LONGEST,
    SEED,
    SEQ_LENGTH,
    SHORT_SEQ_PROB,
    VOCAB_SIZE,
    Case,
    Stopwatch,
    as_json,
    digest,
    digest_of,
    document_lengths,
    documents_of_sentences,
    main,
    some_places,
)
from benchmarks.train_speed import peers_folder
from trainer.data.indexed.checksum_cache import STEP_NS, ChecksumCache
from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.writer import IndexedDatasetWriter
from trainer.data.masked.sentence_mapping import MappingRules, build_mapping
from trainer.data.samples.batches import BatchShape, Packing, TrainData
from trainer.data.samples.blend import BLOCK, BlendOrder, normalized
from trainer.data.samples.epoch_index import Epochs, samples_per_epoch
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.index_cache import EpochIndexCache
from trainer.data.samples.micro_batch import MicroBatch

ROOT = Path(__file__).parents[1]
READ_DOCUMENTS = 70_000
MICRO_BATCH, READ_AT_ONCE = 4, 32
"""Samples of a micro-batch, and of a replica's batch for one step."""
READ_IN_ALL = 640 * READ_AT_ONCE
"""Minimum number of samples that llmctl reads, in several passes: about half a second."""


def dataset(case: Case) -> GPTDataset:
    tokens = IndexedDataset(Path(case.prefix), ChecksumCache(Path(case.cache)))
    cache = EpochIndexCache(Path(case.cache))
    return GPTDataset(tokens, range(len(tokens)), SEQ_LENGTH, SEED, cache, case.samples or None)


def index(case: Case, watch: Stopwatch) -> str:
    built = dataset(case)
    # Exclude the first sample, which megatron-core does not read either.
    found = built._prepare(built._together or Epochs())
    watch.stop()
    return digest(found.documents, found.samples)


def blend(case: Case, watch: Stopwatch) -> str:
    watch.start()
    order = BlendOrder(normalized(normalized(case.weights)))
    for number in range(0, case.samples, BLOCK):
        order.place(number)
    watch.stop()
    return str([order.place(int(number)) for number in some_places(case)])


def resume(case: Case, watch: Stopwatch) -> str:
    watch.start()
    order = BlendOrder(normalized(normalized(case.weights)))
    found = order.place(case.samples - 1)
    watch.stop()
    return str(found)


def mapping(case: Case, watch: Stopwatch) -> str:
    tokens = IndexedDataset(Path(case.prefix))
    rules = MappingRules(LONGEST, SHORT_SEQ_PROB, SEED, 2)
    watch.start()
    rows = build_mapping(tokens.document_indices, tokens.sequence_lengths, rules, None)
    watch.stop()
    return digest(rows)


def read(case: Case, watch: Stopwatch) -> str:
    anew = case.positions
    rules = Packing(EOD, mask_loss=anew, separate_attention=True, restart_positions=anew) if case.documents else None
    shape = BatchShape(MICRO_BATCH, READ_AT_ONCE, SEQ_LENGTH, dp=1, dp_rank=0)
    data = TrainData({"train": dataset(case)}, VOCAB_SIZE, shape, rules)
    data.micro_batches("train", 0)
    places = range(0, case.samples, READ_AT_ONCE)
    passes = -(-READ_IN_ALL // case.samples)
    watch.start()
    for first in chain.from_iterable(repeat(places, passes)):
        for batch in data.micro_batches("train", first):
            # Convert to the tensors that a model takes.
            _ = batch.documents.bounds if batch.documents is not None else None, batch.positions
    watch.stop(passes)
    return digest_of(part for first in places for batch in data.micro_batches("train", first) for part in parts(batch))


def parts(batch: MicroBatch) -> Iterator[npt.NDArray[Any]]:
    """Yield tokens, labels, loss mask, optional positions and document starts, per sample."""
    for row in range(len(batch.tokens)):
        yield batch.tokens[row].numpy()
        yield batch.labels[row].numpy()
        if batch.loss_mask is not None and batch.positions is not None:
            yield batch.loss_mask[row].float().numpy()
            yield batch.positions[row].long().numpy()
        if batch.documents is not None:
            bounds = np.array(batch.documents.bounds[row])
            yield np.repeat(bounds[:-1], np.diff(bounds))


def write_holes(prefix: Path, lengths: npt.NDArray[np.int32], entries: npt.NDArray[np.int64]) -> int:
    """Write an indexed dataset with a sparse .bin, and return its number of tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([8]))
        file.write(np.array([len(lengths), len(entries)], "<u8").tobytes())
        for part in (
            lengths.astype("<i4"),
            (2 * (ends - lengths)).astype("<i8"),
            entries.astype("<i8"),
        ):
            part.tofile(file)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * int(ends[-1]))
    return int(ends[-1])


def write_tokens(prefix: Path) -> int:
    """Write READ_DOCUMENTS documents of random tokens with EOD; return the number of tokens."""
    lengths = document_lengths(READ_DOCUMENTS)
    random = np.random.default_rng(2)
    with IndexedDatasetWriter(prefix, dtype_code(VOCAB_SIZE)) as writer:
        for part in np.array_split(lengths, 50):
            tokens = random.integers(EOD + 1, VOCAB_SIZE - 1, int(part.sum()))
            tokens[np.cumsum(part) - 1] = EOD
            writer.append(tokens, part, np.arange(1, len(part) + 1))
        writer.finish()
    return int(lengths.sum(dtype=np.int64))


def measure(argv: Sequence[str], case: Case, folder: Path) -> dict[str, Any]:
    """Measure a case in a separate process with its own cache.

    Raises:
        RuntimeError: the process failed.
    """
    answer = folder / "answer.json"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*argv, as_json(case), str(answer)], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} exited with code {done.returncode}: {done.stderr[-800:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found | {"samples": case.samples}


def cases(folder: Path, documents: int, blended: int) -> dict[str, Case]:
    tokens = write_holes(folder / "holes", document_lengths(documents), np.arange(documents + 1))
    one = samples_per_epoch(tokens, SEQ_LENGTH)
    joined = documents // 10
    write_holes(folder / "sentences", *documents_of_sentences(joined))
    joining = Case("mapping", str(folder / "sentences"), samples=joined)
    read_samples = samples_per_epoch(write_tokens(folder / "tokens"), SEQ_LENGTH)
    holes = Case("index", str(folder / "holes"))
    reading = Case("read", str(folder / "tokens"), samples=min(READ_IN_ALL, read_samples))
    random = np.random.default_rng(3)
    found = {
        f"index of {documents:,} documents, 1 epoch, built and saved": replace(holes, samples=one),
        f"index of {documents:,} documents, 3 epochs, built and saved": replace(holes, samples=int(2.95 * one)),
        f"the same of {documents:,}, 1 epoch, opened again": replace(holes, samples=one, cache="kept"),
    }
    for count in (10, 100):
        weights = tuple((random.random(count) + 0.05).tolist())
        for kind, what in (("blend", ""), ("resume", "ready to continue from sample ")):
            case = Case(kind, samples=blended, weights=weights)
            name = f"blend of {count} datasets, {what}{blended:,}{'' if what else ' samples'}"
            found[name] = case
    found[f"BERT's samples of {joined:,} documents"] = joining
    found[f"{reading.samples:,} samples of {SEQ_LENGTH} tokens, plain"] = reading
    few = replace(reading, samples=reading.samples // 40)
    found[f"{few.samples:,} samples of {SEQ_LENGTH} tokens, plain"] = few
    few = replace(few, documents=True)
    found[f"{few.samples:,} samples of {SEQ_LENGTH} tokens, separate documents"] = few
    found["the same with positions reset and ends masked"] = replace(few, positions=True)
    return found


def compare(named: dict[str, Case], programs: dict[str, list[str]], runs: int, folder: Path) -> dict[str, Any]:
    """Measurements with the least CPU time, by case and program. Results must agree."""
    best: dict[str, dict[str, Any]] = {name: {} for name in named}
    for _ in range(runs):
        for name, case in named.items():
            for program, argv in programs.items():
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    asked = replace(case, cache=f"{folder}/{case.cache}-{program}" if case.cache else own)
                    if case.cache and not Path(asked.cache).exists():
                        measure(argv, asked, folder)
                        # llmctl trusts a file only after a second look.
                        time.sleep(2 * STEP_NS / 1e9)
                        measure(argv, asked, folder)
                    found = measure(argv, asked, folder)
                if program not in best[name] or found["cpu_s"] < best[name][program]["cpu_s"]:
                    best[name][program] = found
            results = {found["result"] for found in best[name].values()}
            if len(results) > 1:
                raise RuntimeError(f"{name}: {' and '.join(programs)} do not agree")
    return best


def table(best: dict[str, Any], programs: Sequence[str]) -> list[str]:
    lines = [
        "| case | program | CPU s | samples per CPU s | wall s | memory MB | their CPU / ours |",
        "|---|" + "---|" * 6,
    ]
    for name, found in best.items():
        for program in programs:
            one = found[program]
            rate = f"{one['samples'] / one['cpu_s']:,.0f}"
            ratio = f"{one['cpu_s'] / found['ours']['cpu_s']:.2f}" if program != "ours" else ""
            lines.append(
                f"| {name} | {program} | {one['cpu_s']:.3f} | {rate} | {one['wall_s']:.3f} | {one['memory_mb']:.0f} | "
                f"{ratio} |"
            )
    return lines


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--blended", type=int, default=10_000_000, help="samples of the blends")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    programs = {"ours": [sys.executable, "-m", "benchmarks.data_index", "--case"]}
    peer = peers_folder() / "megatron-core/bin/python"
    if peer.exists():
        programs["megatron-core"] = [str(peer), "-m", "benchmarks.peers.data_index_megatron"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        named = cases(folder, flags.documents, flags.blended)
        chosen = {name: case for name, case in named.items() if flags.only in name}
        best = compare(chosen, programs, flags.runs, folder)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        f"# Indexes, blends and random access, {today}",
        "",
        f"Least of {flags.runs} rounds; Python {platform.python_version()}, numpy {np.__version__}, "
        f"{platform.platform()}, load average {os.getloadavg()[0]:.1f}. Memory excludes the imports.",
        *(["Both programs produced the same order, places, tokens and masks."] if len(programs) > 1 else []),
        "",
        *table(best, list(programs)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if flags.write:
        (Path(__file__).with_name("results") / f"data_index-{today}.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        measures = {"index": index, "blend": blend, "resume": resume, "mapping": mapping, "read": read}
        main(measures, sys.argv[2], Path(sys.argv[3]))
    else:
        run()
