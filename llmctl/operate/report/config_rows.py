"""The config of a run with origins, and the differences between runs. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmctl.operate.report.gather import ReportedRun
from llmctl.operate.report.secret_words import HIDDEN

_LONGEST = 2000
"""Characters shown of one value, such as a long list of datasets."""
ABSENT = ""


def config_of(run: ReportedRun) -> dict[str, Any] | None:
    """Keys with values and origins: those that somebody set, and those that are as by default. None for a COMMAND."""
    if run.record.config is None:
        return None
    values, origins = flat_values(run), run.record.origins
    rows = [{"key": key, "value": value, "origin": origins.get(key, "")} for key, value in values.items()]
    return {"set": [row for row in rows if row["origin"]], "default": [row for row in rows if not row["origin"]]}


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Keys whose values are not alike in all runs, with a value for each run."""
    found = [flat_values(run) for run in runs]
    keys = sorted({key for values in found for key in values})
    rows = [(key, [values.get(key, ABSENT) for values in found]) for key in keys]
    return [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1]


def flat_values(run: ReportedRun) -> dict[str, str]:
    """Dotted key -> value as text. Of the job's variables only the names: their values may be secret."""
    sections: dict[str, Any] = dict(run.record.config or {})
    sections["job"] = {**sections.get("job", {}), **run.record.job}
    found = {}
    for section, values in sections.items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            shown = dict.fromkeys(value, HIDDEN) if (section, key) == ("job", "env") and value else value
            found[f"{section}.{key}"] = value_text(shown)
    found["cluster"] = run.record.cluster
    return found


def value_text(value: Any) -> str:
    """A value as in YAML, on one line."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"
