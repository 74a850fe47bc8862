"""Record Megatron-LM's sample orders and masked samples, for tests/record_megatron_data.py.

Token i of a GPT corpus is i (of the second corpus of a blend 100,000 + i, and so on), so that a sample shows its
position in the corpus.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

SEED = 1234
SEQ_LENGTH = 64
SPLIT = "949,50,1"
BLEND_WEIGHTS = [0.3, 0.5, 0.2]
BLEND_SPLIT = "90,10,0"
BLEND_DOCUMENTS = (120, 200, 80)
WORDS = 200
"""Words in the vocabulary of the masked samples, besides 5 special tokens; every third continues a word."""


def lengths_of_documents(count: int, seed: int) -> np.ndarray:
    """Document lengths: mostly a few tokens, some hundreds."""
    return (np.random.RandomState(seed).lognormal(3.0, 1.0, count).astype(np.int32) + 1).astype(np.int32)


def write_pair(prefix: Path, documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for tokens, lengths in documents:
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")


def write_counting(prefix: Path, lengths: np.ndarray, first: int) -> None:
    ends = first + np.cumsum(lengths)
    write_pair(prefix, [(range(end - size, end), [size]) for size, end in zip(lengths, ends, strict=True)])


def gpt_config(work: Path, blend: Any, split: str) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    tokenizer = types.SimpleNamespace(vocab_size=1_000_000, eod=999_999, unique_identifiers={})
    return GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=blend,
        split=split,
        path_to_cache=str(work / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def build(cls: Any, sizes: Sequence[int | None], config: Any) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    return BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, config).build()


def window(sample: dict[str, Any]) -> np.ndarray:
    """The ``SEQ_LENGTH + 1`` tokens of a sample."""
    return np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1]).astype(np.int32)


def record_order(work: Path) -> Arrays:
    """GPT samples of one corpus and of a blend, and the order of datasets in blends."""
    from megatron.core.datasets import helpers

    recorded = record_gpt(work) | record_blend(work)
    random = np.random.RandomState(5)
    cases = {"two": np.array([0.999, 0.001]), "ten": random.dirichlet(np.ones(10)), "equal": np.ones(4) / 4}
    for name, weights in cases.items():
        size = 3000
        which, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(which, sample, weights.tolist(), len(weights), size, False)
        recorded |= {f"weights/{name}/weights": weights, f"weights/{name}/dataset": which}
        recorded[f"weights/{name}/sample"] = sample.astype(np.int32)
    return recorded


def record_gpt(work: Path) -> Arrays:
    """The three indexes of each split of one corpus, for runs of several lengths, and some samples."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    prefix = work / "counting"
    lengths = lengths_of_documents(600, 1)
    write_counting(prefix, lengths, 0)
    train = lengths[: round(0.949 * len(lengths))]
    epoch = (int(train.sum()) - 1) // SEQ_LENGTH
    runs = {
        "one_epoch": (epoch - 20, 9, 1),
        # The last epoch is shuffled with the others if the run needs at least 80% of it, otherwise separately.
        "three_epochs": (2 * epoch + int(0.9 * epoch), 40, 2),
        "last_apart": (2 * epoch + int(0.5 * epoch), 40, 2),
    }
    recorded: Arrays = {"gpt/lengths": lengths}
    for name, sizes in runs.items():
        recorded[f"gpt/{name}/sizes"] = np.array(sizes)
        splits = build(GPTDataset, sizes, gpt_config(work, ([str(prefix)], None), SPLIT))
        for split, dataset in zip(("train", "valid", "test"), splits, strict=True):
            place = f"gpt/{name}/{split}"
            recorded[f"{place}/range"] = np.array([dataset.indices[0], dataset.indices[-1] + 1])
            for part in ("document_index", "sample_index", "shuffle_index"):
                recorded[f"{place}/{part}"] = np.array(getattr(dataset, part))
            some = np.unique(np.linspace(0, len(dataset) - 1, 6).astype(int))
            recorded[f"{place}/some"] = some
            recorded[f"{place}/windows"] = np.stack([window(dataset[int(i)]) for i in some])
    return recorded


def record_blend(work: Path) -> Arrays:
    """Three corpora by weights, with a train split of 90%."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    recorded: Arrays = {"blend/weights": np.array(BLEND_WEIGHTS)}
    prefixes = []
    for number, documents in enumerate(BLEND_DOCUMENTS):
        lengths = lengths_of_documents(documents, 10 + number)
        prefixes.append(str(work / f"blend{number}"))
        write_counting(Path(prefixes[-1]), lengths, 100_000 * number)
        recorded[f"blend/{number}/lengths"] = lengths
    size = 300
    blend, _, _ = build(GPTDataset, (size, 30, 0), gpt_config(work, (prefixes, BLEND_WEIGHTS), BLEND_SPLIT))
    recorded["blend/size"] = np.array(size)
    recorded["blend/dataset"] = np.array(blend.dataset_index)
    recorded["blend/sample"] = np.array(blend.dataset_sample_index).astype(np.int32)
    recorded["blend/samples_built"] = np.array([len(dataset) for dataset in blend.datasets])
    recorded["blend/samples_asked"] = np.array([dataset.num_samples for dataset in blend.datasets])
    for number, dataset in enumerate(blend.datasets):
        for part in ("document_index", "sample_index", "shuffle_index"):
            recorded[f"blend/{number}/{part}"] = np.array(getattr(dataset, part))
    recorded["blend/windows"] = np.stack([window(blend[i]) for i in range(16)])
    return recorded


def masked_vocabulary() -> list[str]:
    """Vocabulary by id, like BERT's: ## marks the continuation of a word."""
    words = [f"##{number}" if number % 3 == 0 else f"word{number}" for number in range(WORDS)]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *[f"<extra_id_{number}>" for number in range(50)]]


class MaskedTokenizer:
    """Tokenizer interface of Megatron-LM's masked datasets."""

    pad, cls, sep, mask, bos, eos, eod = 0, 2, 3, 4, 2, 3, 3
    unique_identifiers = {"kind": "recorded"}

    def __init__(self) -> None:
        pieces = masked_vocabulary()
        self.vocab_size = len(pieces)
        self.inv_vocab = dict(enumerate(pieces))
        self.additional_special_tokens_ids = list(range(5 + WORDS, len(pieces)))


def sentences_of_documents() -> list[tuple[list[int], list[int]]]:
    """Documents of one to nine sentences, an empty one, and one with a too long sentence."""
    random = np.random.RandomState(77)
    documents: list[tuple[list[int], list[int]]] = []
    for number in range(60):
        lengths = random.randint(2, 40, size=random.randint(1, 10)).tolist()
        if number == 20:
            lengths = []
        if number == 30:
            lengths = [*lengths, 520]
        documents.append((random.randint(5, 5 + WORDS, size=sum(lengths)).tolist(), lengths))
    return documents


MASKING: dict[str, dict[str, Any]] = {
    "plain": {"masking_max_ngram": 1, "masking_do_full_word": False},
    "whole_words": {"masking_max_ngram": 3, "masking_do_full_word": True},
    "longer": {"masking_max_ngram": 3, "masking_do_full_word": True, "masking_use_longer_ngrams": True},
    "spans": {"masking_max_ngram": 10, "masking_do_full_word": True, "masking_use_geometric_distribution": True},
}


def record_masked(work: Path) -> Arrays:
    """build_mapping for several settings, and samples of BERT and T5; ``settings`` holds the settings as JSON."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=0, world_size=1)
    prefix = work / "sentences"
    documents = sentences_of_documents()
    write_pair(prefix, documents)
    recorded: Arrays = {
        "tokens": np.concatenate([np.array(tokens, np.int32) for tokens, _ in documents]),
        "sentences": np.concatenate([np.array(lengths, np.int32) for _, lengths in documents]),
        "sentences_per_document": np.array([len(lengths) for _, lengths in documents]),
        "vocabulary": np.array(json.dumps(masked_vocabulary())),
    }
    recorded |= record_mapping(prefix)
    for name, settings in MASKING.items():
        recorded |= record_samples(work, prefix, f"bert/{name}", settings, classification_head=True)
    recorded |= record_samples(work, prefix, "bert/one_part", MASKING["whole_words"], classification_head=False)
    for name in ("whole_words", "spans"):
        recorded |= record_samples(work, prefix, f"t5/{name}", MASKING[name], sequence_length_decoder=96)
    torch.distributed.destroy_process_group()
    return recorded


def record_mapping(prefix: Path) -> Arrays:
    """Rows (first sentence, end, target length), for epochs, sample limits, short sequences and least sentences."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens = IndexedDataset(str(prefix))
    recorded: Arrays = {}
    cases = {
        # epochs, most samples, longest sequence, share of short ones, seed, least sentences
        "bert": (1, 2**40, 125, 0.1, 1234, 2),
        "t5": (1, 2**40, 126, 0.1, 1234, 1),
        "none_short": (1, 2**40, 61, 0.0, 7, 2),
        "all_short": (1, 2**40, 61, 1.0, 7, 2),
        "limited": (2**31 - 2, 500, 61, 0.3, 3, 2),
    }
    for name, (epochs, most, longest, short, seed, least) in cases.items():
        rows = helpers.build_mapping(
            tokens.document_indices, tokens.sequence_lengths, epochs, most, longest, short, seed, False, least
        )
        recorded[f"mapping/{name}/rows"] = rows.astype(np.int32)
        settings = dict(zip(("epochs", "most", "longest", "short", "seed", "least"), cases[name], strict=True))
        recorded[f"mapping/{name}/settings"] = np.array(json.dumps(settings))
    return recorded


def record_samples(work: Path, prefix: Path, name: str, settings: dict[str, Any], **more: Any) -> Arrays:
    """The first samples of a dataset, by the names that Megatron-LM gives to their parts."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    is_bert = name.startswith("bert")
    asked = {
        "random_seed": SEED,
        "sequence_length": 128,
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": False,
        **settings,
        **more,
    }
    config = (BERTMaskedWordPieceDatasetConfig if is_bert else T5MaskedWordPieceDatasetConfig)(
        blend=([str(prefix)], None),
        split="80,20,0",
        path_to_cache=str(work / "cache"),
        tokenizer=MaskedTokenizer(),
        **asked,
    )
    cls = BERTMaskedWordPieceDataset if is_bert else T5MaskedWordPieceDataset
    dataset = build(cls, (100, 10, 0), config)[0]
    samples = [dataset[i] for i in range(8)]
    recorded = {
        f"{name}/{part}": np.array([sample[part] for sample in samples]).astype(np.int32) for part in samples[0]
    }
    recorded[f"{name}/rows"] = np.array(dataset.sample_index).astype(np.int32)
    recorded[f"{name}/settings"] = np.array(json.dumps({**asked, "samples": 100, "split": "80,20,0"}))
    return recorded
