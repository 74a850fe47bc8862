"""Data of a run from the user's function ``hooks.dataset_function``."""

from __future__ import annotations

from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.samples.batches import BatchShape, Split, TrainData
from trainer.data.samples.sources import document_rules, vocabulary
from trainer.data.samples.user_dataset import UserOrder, UserSamples
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import settings_of
from trainer.hooks.user_function import load_function

_SPLITS: tuple[Split, ...] = ("train", "valid")


def build_user_data(config: TrainConfig, place: str, shape: BatchShape) -> TrainData:
    """Call the function ``place`` for each split, and look at the first items.

    Raises:
        DataError: there is nothing to train on, or the size of the vocabulary is unknown.
        HookError: the function fails, or what it returns has another form.
    """
    settings, training = settings_of(config.data, config.model.vocab_size), config.training
    tokenizer = open_tokenizer(settings) if settings.is_set else None
    vocab_size = vocabulary(config, (), tokenizer)
    hook = load_function("hooks.dataset_function", place)
    samples: dict[Split, UserSamples] = {}
    for split in _SPLITS:
        dataset = hook(split, config)
        if dataset is not None:
            samples[split] = UserSamples(hook, split, dataset, training.seq_length, vocab_size, training.seed)
    if "train" not in samples:
        raise DataError(f"hooks.dataset_function: {place} returned None for split train; return a dataset")
    if len({one.has_masks for one in samples.values()}) > 1:
        raise DataError(
            f"hooks.dataset_function: {place} returns the labels that count for one of train and valid only; return "
            "them for both, or for none"
        )
    lacks_valid = training.eval_iters and "valid" not in samples
    return TrainData(
        samples,
        vocab_size,
        shape,
        document_rules(config, (), tokenizer),
        ("no evaluation during training: there is no valid split",) if lacks_valid else (),
        order=UserOrder(place, samples["train"], training.seed),
        has_masks=samples["train"].has_masks,
    )
