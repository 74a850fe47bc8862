"""Checks of a training config against the job that it is to run in, and the paths that it names."""

from collections.abc import Iterator

from llmctl.submit.origins import Problem
from llmctl.submit.path_checks import PathCheck, present, writable
from llmctl.submit.request import AskedJob
from trainer.config import ConfigError, TrainConfig

_DATA_KEYS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_PAIR = "name the prefix of a .bin/.idx pair, which `python -m trainer preprocess` makes from text"
_READ = "name one that is there, or leave it out"


def config_problems(job: AskedJob, config: TrainConfig, *, is_sized: bool) -> Iterator[Problem]:
    """Problems of a layout, batch size, place of checkpoints or data that do not fit the job. Pure.

    Args:
        job: with every question answered.
        config: of its training run.
        is_sized: True if the number of ranks is known to be right.
    """
    if is_sized:
        yield from _layout_problems(config, job.spec.nodes, job.request.ranks_per_node)
    if not (job.profile.shared or job.spec.nodes == 1 or config.checkpoint.save is not None):
        yield Problem(
            "checkpoint.save",
            f"is unset: the hosts of {job.profile.name} share no runs_root (shared: false), and the parts of a "
            "checkpoint belong together; name a folder that all of them see, or train on one node",
            also=("checkpoint.save", "job.nodes"),
        )
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        yield Problem(
            "data.data_path",
            "is unset: give the prefix of a .bin/.idx pair, which `python -m trainer preprocess` makes from text, "
            "or set data.mock_data=true",
            also=("data.mock_data",),
        )
    for key, path in (*_data_prefixes(config), *_read_paths(config), *_written_paths(config)):
        if not path.startswith("/"):
            text = "and the job runs on other machines; give a path there, beginning with / or ~/"
            yield Problem(key, f"{path} is relative, {text}")


def config_paths(job: AskedJob, config: TrainConfig) -> Iterator[PathCheck]:
    """Paths of data, tokenizer and checkpoint, which have to be there, and of folders that are written."""
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    for key, prefix in _data_prefixes(config):
        if not config.data.streaming:
            yield present(key, (f"{prefix}.bin", f"{prefix}.idx"), _PAIR, mounts, kinds=("file",))
        # The matches of a pattern are not looked for there.
        elif not set("*?[") & set(prefix):
            yield present(key, (prefix,), "name a file or folder of text", mounts, kinds=("file", "folder"))
    for key, path in _read_paths(config):
        yield present(key, (path,), _READ, mounts, kinds=("file", "folder"))
    for key, path in _written_paths(config):
        yield writable(key, path, mounts)


def _data_prefixes(config: TrainConfig) -> list[tuple[str, str]]:
    """Key of the config and path, for everything of the data."""
    return [(f"data.{key}", part.prefix) for key in _DATA_KEYS for part in config.data.blend(key)]


def _read_paths(config: TrainConfig) -> list[tuple[str, str]]:
    named = [(f"data.{key}", getattr(config.data, key)) for key in ("tokenizer_model", "vocab_file", "merge_file")]
    return [(key, path) for key, path in (*named, ("checkpoint.load", config.checkpoint.load)) if path is not None]


def _written_paths(config: TrainConfig) -> list[tuple[str, str]]:
    named = (("checkpoint.save", config.checkpoint.save), ("data.data_cache_path", config.data.data_cache_path))
    return [(key, path) for key, path in named if path is not None]


def _layout_problems(config: TrainConfig, nodes: int, ranks_per_node: int) -> Iterator[Problem]:
    try:
        config.check_world_size(nodes * ranks_per_node)
    except ConfigError as error:
        size = f" (world size = {_count(nodes, 'node')} x {_count(ranks_per_node, 'rank')}; --nodes changes it)"
        also = (error.key, "job.nodes", "job.gpus_per_node")
        yield Problem(error.key, error.problem + size, also=also, between_keys=True)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
