"""TrainConfig: all settings of a training run as one frozen value.

Keys are Megatron-LM's flag names in snake_case, with Megatron-LM's defaults, so that published scripts work unchanged.
A field checks its own range; trainer.planning.checks checks relations between keys and to the size of the job. This
package is torch-free and imports no other package of the trainer.
"""

from os.path import normpath

from trainer.config.blends import PATH_KEYS as BLEND_KEYS
from trainer.config.blends import parse_blend
from trainer.config.paths.task_files import is_task_file
from trainer.config.sections.batch_sizes import BatchSizes, steps_of
from trainer.config.sections.checkpoint import CheckpointConfig
from trainer.config.sections.data import DataConfig
from trainer.config.sections.evaluation import EvaluationConfig
from trainer.config.sections.hooks import HooksConfig
from trainer.config.sections.job import JobConfig
from trainer.config.sections.logging import LoggingConfig
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.optimizer import OptimizerConfig
from trainer.config.sections.parallel import ParallelConfig
from trainer.config.sections.section import Section
from trainer.config.sections.training import TrainingConfig


class TrainConfig(Section):
    """The whole training config, equal after a round trip through YAML."""

    job: JobConfig = JobConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    hooks: HooksConfig = HooksConfig()

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the position embedding supports."""
        return self.model.max_position_embeddings or self.training.seq_length

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample, padding included; those of encoder and decoder together."""
        training = self.training
        return training.seq_length + (training.decoder_seq_length if self.model.is_encoder_decoder else 0)

    @property
    def continues_save(self) -> bool:
        """True if checkpoint.load and checkpoint.save name one folder, by their texts; links are not followed."""
        load, save = self.checkpoint.load, self.checkpoint.save
        return load is not None and save is not None and normpath(load) == normpath(save)

    def data_prefixes(self) -> list[tuple[str, str]]:
        """Dotted key and prefix of every dataset."""
        named = [(f"data.{key}", getattr(self.data, key)) for key in BLEND_KEYS]
        return [(key, part.prefix) for key, entries in named if entries for part in parse_blend(key, entries)]

    def read_paths(self) -> list[tuple[str, str]]:
        """Dotted key and path of all else that the run reads, and that must exist.

        ``checkpoint.load`` that is also ``checkpoint.save`` is among the written paths only.
        """
        named = [(f"data.{key}", getattr(self.data, key)) for key in ("tokenizer_model", "vocab_file", "merge_file")]
        tasks = [("evaluation.tasks", task) for task in self.evaluation.tasks if is_task_file(task)]
        load = None if self.continues_save else self.checkpoint.load
        found = (*named, ("checkpoint.load", load), *tasks)
        return [(key, path) for key, path in found if path is not None]

    def written_paths(self) -> list[tuple[str, str]]:
        """Dotted key and path of every folder that the run writes."""
        named = (
            ("checkpoint.save", self.checkpoint.save),
            ("data.data_cache_path", self.data.data_cache_path),
            ("logging.tensorboard_dir", self.logging.tensorboard_dir),
            ("logging.wandb_save_dir", self.logging.wandb_save_dir),
        )
        return [(key, path) for key, path in named if path is not None]

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas among ``world_size`` ranks."""
        parallel = self.parallel
        return world_size // (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    def global_batch_size(self, dp: int) -> int:
        """Samples per iteration, summed over all ``dp`` replicas; with a ramp or steps those of the last batches."""
        if self.training.step_batch_size_schedule is not None:
            return self._steps()[-1][1]
        return self.training.global_batch_size or self.training.micro_batch_size * dp

    def batch_sizes(self, dp: int) -> BatchSizes:
        """Sizes of all batches of the run, summed over all ``dp`` replicas."""
        steps = () if self.training.step_batch_size_schedule is None else self._steps()
        return BatchSizes(self.global_batch_size(dp), tuple(self.training.rampup_batch_size), steps)

    def _steps(self) -> tuple[tuple[int, int], ...]:
        return steps_of(self.training.step_batch_size_schedule or "", self.training.seq_length)

    @property
    def changes_batch_size(self) -> bool:
        """True with a ramp or steps, with which schedules count samples."""
        return bool(self.training.rampup_batch_size) or self.training.step_batch_size_schedule is not None

    @property
    def full_iters(self) -> float:
        """Length of the run in full batches: train_iters with a constant size, else samples / the last size."""
        if not self.changes_batch_size:
            return self.training.train_iters
        # With a ramp or steps the last size is given, so that dp does not matter.
        sizes = self.batch_sizes(1)
        return sizes.full_batches(sizes.samples_after(self.training.train_iters))

    def num_micro_batches(self, dp: int) -> int:
        """Micro-batches per replica and iteration; with a ramp or steps those of the last batches."""
        return self.global_batch_size(dp) // (self.training.micro_batch_size * dp)
