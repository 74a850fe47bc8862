"""Integer arithmetic of bash. Manual: GNU Bash, section 6.5."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmctl.scripts.errors import ScriptError

_TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?|[A-Za-z_]\w*(?:\[[^]]*\])?"
    r"|\*\*|<<|>>|[<>=!]=|&&|\|\||\+\+|--|[-+*/%]=|[-+*/%<>=!~&^|?:(),])"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    *(("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-")),
    ("*", "/", "%"),
)
_BITS = 64


class ArithmeticReader:
    """One expression."""

    def __init__(
        self, text: str, line: int, value_of: Callable[[str], int], assign: Callable[[str, int], None]
    ) -> None:
        """Prepare an expression.

        Args:
            text: of the expression, variables with a dollar already replaced.
            line: for messages.
            value_of: value of a variable by name.
            assign: sets a variable.
        """
        self._text, self._line, self._value_of, self._assign = text, line, value_of, assign
        self._tokens = self._divide(text)
        self._at = 0

    def value(self) -> int:
        """The value; an empty expression is 0.

        Raises:
            ScriptError: the expression cannot be computed.
        """
        if not self._tokens:
            return 0
        result = self._comma()
        if self._at < len(self._tokens):
            raise self._problem()
        return result

    def _divide(self, text: str) -> list[str]:
        tokens, position = [], 0
        while position < len(text.rstrip()):
            found = _TOKEN.match(text, position)
            if found is None or "." in found[1]:
                raise self._problem()
            tokens.append(found[1])
            position = found.end()
        return tokens

    def _problem(self) -> ScriptError:
        return ScriptError(
            self._line, f"(({self._text.strip()})) cannot be computed; bash's arithmetic has whole numbers"
        )

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""

    def _comma(self) -> int:
        result = self._choice()
        while self._peek() == ",":
            self._take()
            result = self._choice()
        return result

    def _choice(self) -> int:
        after = self._tokens[self._at + 1 : self._at + 2]
        if after and after[0] in ("=", "+=", "-=", "*=", "/=", "%=") and self._peek()[:1].isidentifier():
            name, operator = self._take(), self._take()
            value = self._choice()
            if operator != "=":
                value = self._compute(operator[0], self._value_of(name), value)
            self._assign(name, value)
            return value
        condition = self._binary(0)
        if self._peek() != "?":
            return condition
        self._take()
        chosen = self._choice()
        if self._take() != ":":
            raise self._problem()
        other = self._choice()
        return chosen if condition else other

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            operator = self._take()
            left = self._compute(operator, left, self._binary(level + 1))
        return left

    def _power(self) -> int:
        base = self._unary()
        if self._peek() != "**":
            return base
        self._take()
        return self._compute("**", base, self._power())

    def _unary(self) -> int:
        token = self._take()
        if token in ("-", "+", "!", "~"):
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self._take()
            value = self._value_of(name) + (1 if token == "++" else -1)
            self._assign(name, value)
            return value
        if token == "(":
            value = self._comma()
            if self._take() != ")":
                raise self._problem()
            return value
        if token[:1].isdigit():
            return self._number(token)
        if not token[:1].isidentifier():
            raise self._problem()
        value = self._value_of(token)
        if self._peek() in ("++", "--"):
            self._assign(token, value + (1 if self._take() == "++" else -1))
        return value

    def _number(self, token: str) -> int:
        base, sign, digits = token.partition("#")
        try:
            if sign:
                return int(digits, int(base))
            return int(token, 16 if token[:2] in ("0x", "0X") else 8 if token.startswith("0") else 10)
        except ValueError:
            raise self._problem() from None

    def _compute(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%"):
            if not right:
                raise ScriptError(self._line, f"(({self._text.strip()})) divides by 0")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if operator == "/" else left - quotient * right
        if operator in ("**", "<<", ">>") and not 0 <= right < _BITS:
            raise self._problem()
        results: dict[str, Callable[[], int]] = {
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "**": lambda: int(left**right),
            "<<": lambda: left << right % _BITS,
            ">>": lambda: left >> right % _BITS,
            "&": lambda: left & right,
            "|": lambda: left | right,
            "^": lambda: left ^ right,
            "&&": lambda: int(bool(left and right)),
            "||": lambda: int(bool(left or right)),
            "==": lambda: int(left == right),
            "!=": lambda: int(left != right),
            "<": lambda: int(left < right),
            "<=": lambda: int(left <= right),
            ">": lambda: int(left > right),
            ">=": lambda: int(left >= right),
        }
        value = results[operator]()
        half = 1 << (_BITS - 1)
        return (value + half) % (2 * half) - half
