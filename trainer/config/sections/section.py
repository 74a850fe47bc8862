"""Base of the sections of TrainConfig."""

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

MAX_INT = 10**12
"""Largest integer of a key without its own limit. A larger one is a typo, and some loop would count up to it."""


def parse_number(text: str) -> Any:
    """The number or switch that ``text`` is, else the text."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


class Section(BaseModel):
    """Base of all sections: frozen; refuses unknown keys, NaN, infinity and absurdly large integers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and annotation == list[str]:
            return [value]
        if value is None and get_origin(annotation) in (list, dict):
            return {} if get_origin(annotation) is dict else []
        # True equals 1 in Python, so that pydantic would accept YAML's true as the number 1.
        if (
            isinstance(value, list)
            and annotation in (list[int], list[PositiveInt], list[NonNegativeInt])
            and any(isinstance(one, bool) for one in value)
        ):
            raise ValueError("needs whole numbers, not true or false")
        if isinstance(value, bool) and annotation is not bool and not isinstance(annotation, type(Section)):
            raise ValueError("needs a number or a name, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_magnitude(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MAX_INT:
            limits = cls.model_fields[info.field_name or ""].metadata
            if not any(getattr(limit, "le", None) for limit in limits):
                raise ValueError(f"the largest accepted value is {MAX_INT:,}")
        return value
