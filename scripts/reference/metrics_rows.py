"""Page of the fields of metrics.jsonl."""

from scripts.reference.markdown import code, page, prose, table
from trainer.config.records.row_fields import FIELDS

_METRICS = """# Rows of metrics.jsonl

`metrics.jsonl` in the [run directory](../guide/runs-and-files.md#the-run-directory) has one JSON object per line: a row
of training for each logged iteration, and rows of an evaluation, of tasks, of a save and of a missed save. Losses and
times of a row are means since the row before, other values are those of the iteration. A number that is not finite is
null.
`llmctl schema metrics` prints the JSON schema of a row: [metrics.json](schemas/metrics.json).
[runs-and-files.md](../guide/runs-and-files.md#metrics) is about asking for more numbers, and their cost.
`python -m scripts.reference` makes this page from `trainer/config/records/row_fields.py`."""


def metrics_page() -> str:
    """The page of all fields."""
    rows = [(code(name), one.unit, one.when, prose(one.meaning)) for name, one in FIELDS.items()]
    return page(_METRICS, table(("field", "unit", "rows", "meaning"), rows))
