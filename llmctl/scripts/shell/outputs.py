"""Output of the few commands that follows from their arguments alone."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from fractions import Fraction

from llmctl.scripts.shell.values import Value, missing_of, text_of

_DATE_FORMAT = re.compile(r"(?:[^%]|%[YymdHMSjabBFTs%-])*")
_QUOTIENT = re.compile(r"scale\s*=\s*(\d{1,2})\s*;\s*(-?\d{0,30}\.?\d{1,30})\s*/\s*(-?\d{0,30}\.?\d{1,30})")
_NUMBERS = re.compile(r"(?:-s ?(\S+) )?(-?\d{1,9}(?: -?\d{1,9}){0,2})")
_MOST_NUMBERS = 10_000
"""Numbers that a script may count to with seq; more are left to the job."""
_PERL = re.compile(r"print\s*([\d_\s+*()-]+);?")


def output_of(words: Sequence[Value], number: Callable[[str], int | None], now: datetime) -> str | None:
    """Text that a command prints; None if that depends on anything but its arguments and the time.

    Args:
        words: the command, expanded.
        number: value of an arithmetic expression.
        now: the time that ``date`` prints.
    """
    if any(missing_of(word) is not None for word in words) or not words:
        return None
    name, *arguments = (text_of(word) for word in words)
    if name == "pwd" and not set(arguments) - {"-P", "-L"}:
        return "."
    if name == "date":
        return _date(arguments, now)
    if name in ("readlink", "realpath"):
        paths = [argument for argument in arguments if not argument.startswith("-")]
        return posixpath.normpath(paths[0]) if len(paths) == 1 and (name == "realpath" or "-f" in arguments) else None
    if name == "dirname" and len(arguments) == 1:
        return posixpath.dirname(arguments[0].rstrip("/")) or ("/" if arguments[0].startswith("/") else ".")
    if name == "basename" and 1 <= len(arguments) <= 2:
        return posixpath.basename(arguments[0].rstrip("/")).removesuffix(*(arguments[1:] or [""]))
    if name == "echo":
        return " ".join(argument for argument in arguments if argument not in ("-n", "-e"))
    if name in ("printf", "seq"):
        return _printf(arguments) if name == "printf" else _seq(arguments)
    sums = " ".join(arguments) if name == "expr" else _perl_sums(arguments) if name == "perl" else None
    if sums is not None:
        value = number(sums)
        return None if value is None else str(value)
    return None


def _perl_sums(arguments: Sequence[str]) -> str | None:
    """The sums and products of ``perl -e 'print 3_000*2'``; None for anything else that Perl may print."""
    found = _PERL.fullmatch(arguments[1].strip()) if len(arguments) == 2 and arguments[0] in ("-e", "-le") else None
    return None if found is None else found[1].replace("_", "")


def _date(arguments: Sequence[str], now: datetime) -> str | None:
    if len(arguments) != 1 or not arguments[0].startswith("+"):
        return None
    form = arguments[0][1:]
    return now.strftime(form.replace("%s", str(int(now.timestamp())))) if _DATE_FORMAT.fullmatch(form) else None


def _printf(arguments: Sequence[str]) -> str | None:
    if not arguments or len(re.findall(r"%[^%]", arguments[0])) != len(arguments) - 1:
        return None
    kinds = re.findall(r"%[-0-9]*([a-z])", arguments[0])
    try:
        values = tuple(int(text) if kind == "d" else text for kind, text in zip(kinds, arguments[1:], strict=True))
        return (arguments[0].replace("\\n", "\n") % values).rstrip("\n")
    except (ValueError, TypeError):
        return None


def _seq(arguments: Sequence[str]) -> str | None:
    """The whole numbers of seq(1), with another separator than a new line after ``-s``; None for other options."""
    text = " ".join(arguments)
    found = _NUMBERS.fullmatch(text)
    if found is None:
        return None
    bounds = [int(word) for word in found[2].split()]
    first, step, last = (bounds[0] if len(bounds) > 1 else 1), (bounds[1] if len(bounds) > 2 else 1), bounds[-1]
    if not step or (last - first) / step > _MOST_NUMBERS:
        return None
    numbers = range(first, last + (1 if step > 0 else -1), step)
    return (found[1] or "\n").join(map(str, numbers))


def quotient_of(text: str) -> str | None:
    """The output of bc(1) for ``scale=N; A/B``: N digits behind the point, further ones cut off; None otherwise."""
    found = _QUOTIENT.fullmatch(text.strip())
    if found is None or not Fraction(found[3]):
        return None
    digits = int(found[1])
    cut = int(Fraction(found[2]) / Fraction(found[3]) * 10**digits)
    if not cut:
        return "0"
    text = str(abs(cut)).rjust(digits + 1, "0")
    whole, fraction = text[: len(text) - digits].lstrip("0"), text[len(text) - digits :]
    return ("-" if cut < 0 else "") + whole + ("." + fraction if digits else "")
