"""Tokens per second of each layout as bars, with a mark at what was predicted. Pure."""

from collections.abc import Iterator, Sequence
from html import escape

from llmctl.operate.tuning.results import TuneRow
from llmctl.runs.number_text import rate_text

_WIDTH, _ROW, _TOP, _BOTTOM, _RIGHT = 860, 26, 64, 24, 90
_LEFT = 380
_CHARACTER = 6.4
# Colours that people with a colour vision deficiency tell apart (Okabe and Ito, 2008).
_BAR, _BEST, _MARK, _TEXT, _DIM = "#56b4e9", "#0072b2", "#d55e00", "#222222", "#666666"


def svg_of(title: str, rows: Sequence[TuneRow]) -> str:
    """The picture; the same rows give the same text."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    rates = [rate for row in rows for rate in (row["tokens_per_s"], _predicted(row)) if rate is not None]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(rates, default=1.0)
    body = "\n".join(part for number, row in enumerate(rows) for part in _row(row, number, scale))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="24" font-size="14" fill="{_TEXT}">{escape(title)}</text>\n'
        f'<text x="{_LEFT}" y="48" fill="{_DIM}">tokens/s, measured</text>\n'
        f'<rect x="{_LEFT + 130}" y="38" width="3" height="12" fill="{_MARK}"/>\n'
        f'<text x="{_LEFT + 140}" y="48" fill="{_DIM}">predicted</text>\n{body}\n</svg>\n'
    )


def _row(row: TuneRow, number: int, scale: float) -> Iterator[str]:
    y = _TOP + _ROW * number
    most = int((_LEFT - 32) / _CHARACTER)
    name = row["layout"] if len(row["layout"]) <= most else row["layout"][: most - 1] + "…"
    yield f'<text x="{_LEFT - 12}" y="{y + 15}" text-anchor="end" fill="{_TEXT}">{escape(name)}</text>'
    rate = row["tokens_per_s"]
    if rate is None:
        words = "not tried" if row["outcome"] is None else row["outcome"].replace("_", " ")
        yield f'<text x="{_LEFT + 4}" y="{y + 15}" fill="{_DIM}">{words}</text>'
    else:
        colour = _BEST if number == 0 else _BAR
        yield f'<rect x="{_LEFT}" y="{y + 3}" width="{rate * scale:.1f}" height="{_ROW - 9}" fill="{colour}"/>'
        yield f'<text x="{_WIDTH - 12}" y="{y + 15}" text-anchor="end" fill="{_TEXT}">{rate_text(rate)}</text>'
    predicted = _predicted(row)
    if predicted is not None:
        yield f'<rect x="{_LEFT + predicted * scale - 1.5:.1f}" y="{y}" width="3" height="{_ROW - 3}" fill="{_MARK}"/>'


def _predicted(row: TuneRow) -> float | None:
    """Predicted tokens per second; None before the layout has measured ones, which tell the tokens of a step."""
    if row["tokens_per_s"] is None or row["iteration_time_s"] is None:
        return None
    return row["tokens_per_s"] * row["iteration_time_s"] / row["predicted_iteration_time_s"]
