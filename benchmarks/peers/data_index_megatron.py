"""Measure one case of benchmarks.data_index with megatron-core, with a JSON file as the result."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset  # noqa: F401  what it loads is part of the peer
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, normalize

from benchmarks.data_index_cases import (
    EOD,
    LONGEST,
    SEED,
    SEQ_LENGTH,
    SHORT_SEQ_PROB,
    VOCAB_SIZE,
    Case,
    Stopwatch,
    digest,
    digest_of,
    main,
    some_places,
)

TOKENIZER = SimpleNamespace(
    eod=EOD, vocab_size=VOCAB_SIZE, pad=VOCAB_SIZE - 1, unique_identifiers={}, special_tokens_dict={}
)


def dataset(case: Case) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=([case.prefix], None),
        split="1,0,0",
        path_to_cache=case.cache,
        tokenizer=TOKENIZER,
        reset_position_ids=case.positions,
        reset_attention_mask=case.documents,
        eod_mask_loss=case.positions,
        create_attention_mask=case.documents,
    )
    low = IndexedDataset(case.prefix)
    indices = np.arange(len(low.sequence_lengths), dtype=np.int32)
    return GPTDataset(low, case.prefix, indices, case.samples or None, Split.train, config)


def index(case: Case, watch: Stopwatch) -> str:
    built = dataset(case)
    watch.stop()
    return digest(built.document_index, built.shuffle_index)


def places(case: Case, watch: Stopwatch) -> tuple[np.ndarray, np.ndarray]:
    weights = normalize(normalize(case.weights))
    datasets, samples = np.zeros(case.samples, np.int16), np.zeros(case.samples, np.int64)
    helpers.build_blending_indices(datasets, samples, weights, len(weights), case.samples, False)
    watch.stop()
    return datasets, samples


def blend(case: Case, watch: Stopwatch) -> str:
    datasets, samples = places(case, watch)
    return str([(int(datasets[place]), int(samples[place])) for place in some_places(case)])


def resume(case: Case, watch: Stopwatch) -> str:
    datasets, samples = places(case, watch)
    return str((int(datasets[-1]), int(samples[-1])))


def mapping(case: Case, watch: Stopwatch) -> str:
    low = IndexedDataset(case.prefix)
    watch.start()
    rows = helpers.build_mapping(
        low.document_indices, low.sequence_lengths, 1, 2**40, LONGEST, SHORT_SEQ_PROB, SEED, False, 2
    )
    watch.stop()
    return digest(rows)


def read(case: Case, watch: Stopwatch) -> str:
    data = dataset(case)
    data[0]
    watch.start()
    for number in range(case.samples):
        data[number]
    watch.stop()
    return digest_of(part for number in range(case.samples) for part in parts(data[number], case))


def parts(sample: dict[str, torch.Tensor], case: Case) -> Iterator[np.ndarray]:
    """Yield tokens, labels, loss mask, optional positions, and each token's document start."""
    yield sample["tokens"].numpy()
    yield sample["labels"].numpy()
    if case.positions:
        yield sample["loss_mask"].numpy()
        yield sample["position_ids"].numpy()
    if case.documents:
        # The mask is True for hidden positions.
        yield np.argmin(sample["attention_mask"].numpy()[0], axis=1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    measures = {"index": index, "blend": blend, "resume": resume, "mapping": mapping, "read": read}
    main(measures, sys.argv[1], Path(sys.argv[2]))
