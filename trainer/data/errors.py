"""The one error that files of tokens and tokenizers are refused with."""


class DataError(ValueError):
    """A file of the data side that cannot be used: one sentence that names the file, what is wrong and what to do."""
