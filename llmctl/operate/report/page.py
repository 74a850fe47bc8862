"""The page of runs: one HTML file that needs nothing else, and asks for nothing. Reads the bundled templates only."""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmctl import __version__
from llmctl.operate.comparison.planned import Planned
from llmctl.operate.report.charts import chart_data, charts_of
from llmctl.operate.report.config_rows import config_of, differences
from llmctl.operate.report.gather import ReportedRun
from llmctl.operate.report.secret_words import without_secrets
from llmctl.operate.report.tables import (
    attempts_of,
    clock_text,
    head_of,
    logs_of,
    memory_of,
    plan_rows,
    tiles_of,
    time_of,
)
from llmctl.operate.report.timeline_rows import timeline_of
from llmctl.paths import BUNDLED
from llmctl.runs.series.curves import MOST_POINTS

FOLDER = BUNDLED / "templates/report"
MARK = b'<meta name="generator" content="llmctl report">'
"""In the first bytes of each page: only such a file is replaced by a newer page."""


def page_of(runs: Sequence[ReportedRun]) -> str:
    """The page of one or several runs.

    Raises:
        ConfigFileError: a bundled file is missing.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    script = _bundled("vendor/uPlot.iife.min.js") + "\n" + _bundled("page.js")
    style = _bundled("vendor/uPlot.min.css") + "\n" + _bundled("page.css")
    charts = charts_of(runs)
    values = _without_secrets(
        {
            "runs": [_run_values(run, is_alone=len(runs) == 1) for run in runs],
            "charts": charts,
            "tiles": list(dict.fromkeys(name for run in runs for name, _ in tiles_of(run))),
            "differences": differences(runs) if len(runs) > 1 else [],
            "logs": logs_of(runs),
        },
        {value: name for run in runs for value, name in run.secrets.items()},
    )
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        **values,
        policy=_policy(script, style),
        mark=Markup(MARK.decode()),
        script=Markup(script),
        style=Markup(style),
        data=Markup(json_for_script(chart_data(runs, charts))),
        points=MOST_POINTS,
        has_envelope=any(curve.has_envelope for run in runs for curve in run.curves.train.of.values()),
        version=__version__,
        made=clock_text(time.time()),
    )


def _run_values(run: ReportedRun, *, is_alone: bool) -> dict[str, Any]:
    return {
        **head_of(run),
        "attempts": attempts_of(run),
        "time": time_of(run),
        "plan": plan_rows(run),
        "memory": memory_of(run),
        "timeline": timeline_of(run.planned) if isinstance(run.planned, Planned) else None,
        "config": config_of(run) if is_alone else None,
    }


def json_for_script(values: Any) -> str:
    """JSON that stands in a script element: nothing in it ends the element, or begins a comment."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _policy(script: str, style: str) -> str:
    """The content security policy: our script and our style, by their hashes, and nothing else from anywhere."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _bundled(name: str) -> str:
    # A carriage return would become a newline in the browser, and the hash would not be that of the file.
    return (FOLDER / name).read_text(encoding="utf-8").replace("\r", "")


def _without_secrets(values: Any, secrets: Mapping[str, str]) -> Any:
    """The values with every text freed of secrets: a message of an error may quote one."""
    if not secrets:
        return values
    if isinstance(values, str):
        return without_secrets(values, secrets)
    if isinstance(values, Mapping):
        return {key: _without_secrets(value, secrets) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_without_secrets(value, secrets) for value in values]
    return values
