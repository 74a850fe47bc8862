"""TrainConfig: all settings of a training run as one frozen value.

Keys are Megatron-LM's flag names in snake_case, with Megatron-LM's defaults, so that published scripts work unchanged.
A field checks its own range; trainer.planning.checks checks relations between keys and to the size of the job. This
package is torch-free and imports no other package of the trainer.
"""

from trainer.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Section,
    TrainingConfig,
)


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

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the position embedding supports."""
        return self.model.max_position_embeddings or self.training.seq_length

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample, padding included; those of encoder and decoder together."""
        training = self.training
        return training.seq_length + (training.decoder_seq_length if self.model.is_encoder_decoder else 0)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas among ``world_size`` ranks."""
        parallel = self.parallel
        return world_size // (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    def global_batch_size(self, dp: int) -> int:
        """Samples per iteration, summed over all ``dp`` replicas."""
        return self.training.global_batch_size or self.training.micro_batch_size * dp

    def num_micro_batches(self, dp: int) -> int:
        """Micro-batches per replica and iteration."""
        return self.global_batch_size(dp) // (self.training.micro_batch_size * dp)
