"""Functions of the user's own that a config names: their form, keys and parameters."""

import re

PARAMETERS = {
    "data.tokenizer_function": "",
    "logging.trackers": "",
    "hooks.dataset_function": "split, config",
    "hooks.loss_function": "logits, labels, config",
    "hooks.lr_function": "step, config",
    "hooks.metrics": "facts",
    "hooks.after_step": "facts",
    "hooks.before_save": "facts",
}
"""Key -> words for the positional parameters of the call."""
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_functions(value: str | list[str] | None) -> str | list[str] | None:
    """A field's value, if each of its texts is ``module:function``. The function itself is found in the job.

    Raises:
        ValueError: a text has another form; all such texts are named.
    """
    places = [value] if isinstance(value, str) else value or []
    wrong = [repr(place) for place in places if not _FORM.fullmatch(place)]
    if wrong:
        verb = "are" if wrong[1:] else "is"
        raise ValueError(f"{', '.join(wrong)} {verb} not MODULE:FUNCTION, such as my_package.my_module:my_function")
    return value
