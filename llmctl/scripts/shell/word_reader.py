"""Reading of bash words: quotes, variables, substitutions. Manual: GNU Bash, sections 3.1.2 and 3.5."""

from __future__ import annotations

import re

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.cursor import Cursor
from llmctl.scripts.shell.syntax import Arithmetic, Literal, Parameter, Part, Placeholder, Substitution, Word, joined

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = frozenset("0123456789@*#?$!-")
_ENDS = frozenset(" \t\n;&|<>()")
_OPERATORS = (
    *(
        ":-",
        ":=",
        ":+",
        ":?",
        "##",
        "%%",
        "//",
        "/#",
        "/%",
        "^^",
        ",,",
        "-",
        "=",
        "+",
        "?",
        "#",
        "%",
        "/",
        "^",
        ",",
        ":",
    ),
    "@",
)
# As in `DATA_PATH=<Specify path and prefix>_text`; a file name between two redirections ends before a space.
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n]*[^\s<>]>")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ANSI_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ANSI_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|.)", re.DOTALL)


def read_word(cursor: Cursor, ends: frozenset[str] = _ENDS) -> Word:
    """The word at the cursor; empty if another token stands there."""
    parts: list[Part] = []
    while not cursor.at_end:
        letter = cursor.peek()
        placeholder = _PLACEHOLDER.match(cursor.text, cursor.position) if letter == "<" else None
        if placeholder is not None:
            parts.append(Placeholder(placeholder[0], cursor.line))
            cursor.take(len(placeholder[0]))
        elif letter in ends and not (letter in "<>" and cursor.peek(2)[1:] == "("):
            break
        elif letter == "\\":
            parts += _escape(cursor)
        elif letter == "'":
            line = cursor.line
            parts.append(Literal(cursor.take_single_quoted(), line, is_open=False))
        elif letter == '"':
            parts += _double_quoted(cursor)
        elif letter == "`":
            line = cursor.line
            parts.append(Substitution(cursor.take_backquoted(), line, quoted=False))
        elif letter == "$":
            parts += _dollar(cursor, quoted=False)
        elif letter in "<>":
            line = cursor.line
            cursor.take()
            parts.append(Substitution(cursor.take_balanced("(", "<("), line, quoted=False))
        else:
            parts.append(Literal(cursor.take(), cursor.line))
    return joined(parts)


def read_quoted_text(text: str, line: int) -> Word:
    """Text as between double quotes: of a here-document or an arithmetic expression."""
    return joined(_quoted_parts(Cursor(text, line), end=""))


def read_index(text: str, line: int) -> Word:
    """The text between the brackets of an array's item, without its quotes."""
    return read_word(Cursor(text, line), frozenset())


def _escape(cursor: Cursor) -> list[Part]:
    line = cursor.line
    if cursor.starts("\\\n"):
        cursor.take(2)
        return []
    if re.compile(r"\\[ \t]+(?:\n|\Z)").match(cursor.text, cursor.position):
        raise ScriptError(
            line, "a space follows the backslash at the end of the line, which ends the command; remove it"
        )
    cursor.take()
    return [Literal(cursor.take(), line, is_open=False)]


def _double_quoted(cursor: Cursor) -> list[Part]:
    line = cursor.line
    cursor.take()
    parts = _quoted_parts(cursor, end='"')
    if not cursor.take():
        raise ScriptError(line, 'a double quote (") opens here and never closes')
    return parts or [Literal("", line, is_open=False)]


def _quoted_parts(cursor: Cursor, end: str) -> list[Part]:
    parts: list[Part] = []
    while not cursor.at_end and not (end and cursor.peek() == end):
        letter, line = cursor.peek(), cursor.line
        if letter == "\\":
            cursor.take()
            after = cursor.take()
            if after != "\n":
                parts.append(Literal(after if after in '$`"\\' else f"\\{after}", line, is_open=False))
        elif letter == "`":
            parts.append(Substitution(cursor.take_backquoted(), line, quoted=True))
        elif letter == "$":
            parts += _dollar(cursor, quoted=True)
        else:
            parts.append(Literal(cursor.take(), line, is_open=False))
    return parts


def _dollar(cursor: Cursor, *, quoted: bool) -> list[Part]:
    line = cursor.line
    cursor.take()
    if cursor.starts("(("):
        inner = cursor.take_balanced("(", "$((")
        if inner.endswith(")"):
            return [Arithmetic(read_quoted_text(inner[1:-1], line), line, quoted)]
        return [Substitution(inner, line, quoted)]
    if cursor.starts("("):
        return [Substitution(cursor.take_balanced("(", "$("), line, quoted)]
    if cursor.starts("["):  # the old form of $(( ))
        end = cursor.text.find("]", cursor.position)
        inner = cursor.take(max(end - cursor.position, 1) + 1)[1:-1]
        return [Arithmetic(read_quoted_text(inner, line), line, quoted)]
    if cursor.starts("{"):
        inner = cursor.take_balanced("{", "${")
        return [_braced(inner, line, quoted)]
    name = NAME.match(cursor.text, cursor.position)
    if name is not None:
        return [Parameter(cursor.take(len(name[0])), line, quoted)]
    if cursor.peek() in _SPECIAL and not cursor.at_end:
        return [Parameter(cursor.take(), line, quoted)]
    if cursor.peek() == "'" and not quoted:
        return [Literal(_ansi_quoted(cursor), line, is_open=False)]
    if cursor.peek() == '"' and not quoted:
        return _double_quoted(cursor)
    return [Literal("$", line, is_open=not quoted)]


def _ansi_quoted(cursor: Cursor) -> str:
    """The text of ``$'...'``; the cursor stands on the quote."""
    found = _ANSI_QUOTED.match(cursor.text, cursor.position)
    if found is None:
        raise ScriptError(cursor.line, "a single quote (') opens here and never closes")
    cursor.take(len(found[0]))
    return _ANSI_ESCAPE.sub(_ansi_letter, found[1])


def _ansi_letter(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8) % 256)
    return _ESCAPES.get(code, code if code in "\\'\"?" else f"\\{code}")


def _braced(inner: str, line: int, quoted: bool) -> Parameter:
    """The parameter of ``${inner}``."""
    cursor = Cursor(inner, line)
    prefix = (
        cursor.take() if cursor.peek() in ("#", "!") and len(inner) > 1 and inner[1:2] not in ("}", ":", "-") else ""
    )
    name = NAME.match(inner, cursor.position)
    found = cursor.take(len(name[0])) if name is not None else re.match(r"\d+|[@*#?$!-]|", inner[cursor.position :])
    text = found if isinstance(found, str) else cursor.take(len(found[0]) if found else 0)
    index: Word | None = None
    if cursor.peek() == "[":
        cursor.take()
        index = read_word(cursor, frozenset("]"))
        cursor.take()
    operator = next((one for one in _OPERATORS if cursor.starts(one)), "")
    cursor.take(len(operator))
    if not text or (not operator and not cursor.at_end):
        raise ScriptError(line, f"${{{inner}}} is a form of variable that cannot be read; write its value instead")
    argument = joined(_quoted_parts(cursor, end="")) if quoted else read_word(cursor, frozenset())
    operator = {"#": "length", "!": "indirect"}.get(prefix, operator)
    return Parameter(text, line, quoted, index, operator, argument)
