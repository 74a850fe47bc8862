"""Errors of data files, tokenizers and the processes that read them."""


class DataError(ValueError):
    """A data file that cannot be used.

    The message is one sentence with the file, the problem and the remedy.
    """


class LostWorkerError(DataError):
    """A worker process has died or hangs.

    The config is not wrong: the same run may succeed.
    """
