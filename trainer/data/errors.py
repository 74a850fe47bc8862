"""What files of tokens and tokenizers are refused with, and what else reading them may fail of."""


class DataError(ValueError):
    """A file of the data side that cannot be used: one sentence that names the file, what is wrong and what to do."""


class LostWorkerError(DataError):
    """A process that reads has died or hangs, which is no mistake of the config: the same run may well go on."""
