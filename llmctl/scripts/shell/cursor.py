"""A place in the text of a script."""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.scripts.errors import ScriptError

_CLOSING = {"(": ")", "{": "}"}


class Cursor:
    """Text with a position and the line of that position."""

    def __init__(self, text: str, first_line: int = 1, lines: Sequence[int] = ()) -> None:
        """Start at the beginning.

        Args:
            text: of the script, or a part of it.
            first_line: line of the beginning.
            lines: line of every character, for text that was put together from several places.
        """
        self.text = text
        self.position = 0
        self._line, self._lines = first_line, lines

    @property
    def line(self) -> int:
        """Line of the position."""
        return self._lines[min(self.position, len(self._lines) - 1)] if self._lines else self._line

    @property
    def at_end(self) -> bool:
        """True if nothing is left."""
        return self.position >= len(self.text)

    def peek(self, length: int = 1) -> str:
        """The next characters, fewer at the end."""
        return self.text[self.position : self.position + length]

    def take(self, length: int = 1) -> str:
        """The next characters, which are consumed."""
        taken = self.peek(length)
        self.position += len(taken)
        self._line += taken.count("\n")
        return taken

    def starts(self, text: str) -> bool:
        """True if ``text`` comes next."""
        return self.text.startswith(text, self.position)

    def skip_blanks(self) -> None:
        """Skip spaces, tabs, continued lines and comments, but not the end of a line."""
        while True:
            if self.peek() in (" ", "\t") and not self.at_end:
                self.take()
            elif self.starts("\\\n"):
                self.take(2)
            elif self.peek() == "#":
                while not self.at_end and self.peek() != "\n":
                    self.take()
            else:
                return

    def take_line(self) -> str:
        """The rest of the line without its end, which is consumed too."""
        end = self.text.find("\n", self.position)
        taken = self.take((end if end >= 0 else len(self.text)) - self.position)
        self.take()
        return taken

    def take_single_quoted(self) -> str:
        """The text in single quotes; the cursor stands on the opening quote."""
        line = self.line
        self.take()
        end = self.text.find("'", self.position)
        if end < 0:
            raise ScriptError(line, "a single quote (') opens here and never closes")
        text = self.take(end - self.position)
        self.take()
        return text

    def take_balanced(self, opening: str, what: str) -> str:
        """The text between a bracket and its partner; the cursor stands on the opening bracket."""
        line, start = self.line, self.position + 1
        closing, depth = _CLOSING[opening], 0
        while not self.at_end:
            letter = self.peek()
            if letter == "\\":
                self.take(2)
            elif letter == "'":
                self.take_single_quoted()
            elif letter == '"':
                self._skip_double_quoted()
            elif letter == "#" and self.text[self.position - 1] in " \t\n" and opening == "(":
                self.skip_blanks()
            else:
                self.take()
                depth += (letter == opening) - (letter == closing)
                if not depth:
                    return self.text[start : self.position - 1]
        raise ScriptError(line, f"{what} opens here and never closes")

    def take_backquoted(self) -> str:
        """The command in backquotes; the cursor stands on the opening quote."""
        line = self.line
        self.take()
        found: list[str] = []
        while not self.at_end:
            letter = self.take()
            if letter == "`":
                return "".join(found)
            found.append(self.take() if letter == "\\" and self.peek() in ("`", "\\", "$") else letter)
        raise ScriptError(line, "a backquote (`) opens here and never closes")

    def _skip_double_quoted(self) -> None:
        line = self.line
        self.take()
        while not self.at_end:
            letter = self.peek()
            if letter == "\\":
                self.take(2)
            elif self.starts("$("):
                self.take()
                self.take_balanced("(", "$(")
            elif self.starts("${"):
                self.take()
                self.take_balanced("{", "${")
            else:
                self.take()
                if letter == '"':
                    return
        raise ScriptError(line, 'a double quote (") opens here and never closes')
