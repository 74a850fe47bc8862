"""Section ``hooks``: functions of the user's own that the trainer calls."""

from collections import Counter
from typing import Any

from pydantic import field_validator

from trainer.config.sections.functions import check_functions
from trainer.config.sections.section import Section


class HooksConfig(Section):
    """Functions of your own, each as ``module:function``: see docs/guide/hooks.md.

    trainer/hooks/protocols.py has the signature of each.
    """

    dataset_function: str | None = None
    """Gives the samples of a split, instead of the data that section data names."""
    loss_function: str | None = None
    """Gives the loss of every token from the logits, instead of cross entropy."""
    lr_function: str | None = None
    """Gives the learning rate of every step, instead of optimizer.lr_decay_style."""
    metrics: list[str] = []
    """Each gives one number of a row of metrics.jsonl, ``metrics/FUNCTION``: a mean over all ranks."""
    after_step: list[str] = []
    """Called on every rank after every step, in this order."""
    before_save: list[str] = []
    """Called on every rank before a checkpoint is written, in this order."""
    settings: dict[str, Any] = {}
    """Values for your functions, which read them from the config: names and values of your choice."""

    @field_validator("dataset_function", "loss_function", "lr_function", "metrics", "after_step", "before_save")
    @classmethod
    def _check_functions(cls, value: Any) -> Any:
        return check_functions(value)

    def of_results(self) -> list[tuple[str, Any, Any]]:
        """Key, value and default of all that can change the results of a run."""
        keys = ("dataset_function", "loss_function", "lr_function", "settings")
        return [(key, getattr(self, key), type(self).model_fields[key].default) for key in keys]

    @field_validator("metrics")
    @classmethod
    def _check_names(cls, value: list[str]) -> list[str]:
        counts = Counter(place.partition(":")[2] for place in value)
        name, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > 1:
            raise ValueError(f"two functions are called {name}, which is the metric's name; rename one of them")
        return value
