"""Reading of bash commands into a syntax tree. Manual: GNU Bash, section 3.2."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.cursor import Cursor
from llmctl.scripts.shell.syntax import (
    ArithmeticCommand,
    Assignment,
    Block,
    Case,
    Chain,
    Command,
    For,
    ForArithmetic,
    Function,
    Group,
    HereDocument,
    If,
    Literal,
    Pipeline,
    Redirect,
    Simple,
    Test,
    While,
    Word,
)
from llmctl.scripts.shell.word_reader import NAME, read_index, read_quoted_text, read_word

_DEPTH = 100
_REDIRECT = re.compile(r"(?:\d*|&)(?:<<<|<<-?|<>|<&|<|>>|>\||>&|>)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]\n]*\])?(\+?)=")
_PLACE = re.compile(r"\[([^]\n]*)\]=")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([A-Za-z_][\w-]*)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w-]*)[ \t]*\([ \t]*\))\s*(?=[{(])"
)
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_WORD_ENDS = frozenset(" \t\n;&|<>()")
_IN_TEST = frozenset(" \t\n")


def read_script(text: str, first_line: int = 1, lines: Sequence[int] = ()) -> Block:
    """The commands of a script, or of a part of it; ``lines`` as in Cursor.

    Raises:
        ScriptError: with the line where the syntax is wrong.
    """
    reader = _Reader(Cursor(text, first_line, lines))
    block = reader.block(())
    if not reader.cursor.at_end:
        raise ScriptError(reader.cursor.line, f"{reader.cursor.peek()!r} closes nothing that is open")
    return block


class _Reader:
    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._documents: list[HereDocument] = []
        self._depth = 0

    def block(self, ends: tuple[str, ...], opened: int = 0, opener: str = "") -> Block:
        """Commands until one of the words ``ends``, which stays unread."""
        commands: list[Command] = []
        while True:
            self._skip_empty()
            if self.cursor.at_end:
                if ends:
                    raise ScriptError(opened, f"{opener} opens here and never ends with {ends[0]}")
                return tuple(commands)
            word = self._keyword()
            if word in ends or self.cursor.peek() == ")" or (";;" in ends and self.cursor.starts(";;")):
                return tuple(commands)
            if word in ("then", "do", "done", "fi", "esac", "else", "elif", "}"):
                raise ScriptError(self.cursor.line, f"{word} stands here without its beginning")
            commands.append(self._chain())

    def _skip_empty(self) -> None:
        cursor = self.cursor
        while True:
            cursor.skip_blanks()
            if cursor.peek() == "\n":
                cursor.take()
                self._read_documents()
            elif cursor.peek() in (";", "&") and not cursor.at_end and not cursor.starts(";;"):
                cursor.take()
            else:
                return

    def _keyword(self) -> str:
        found = re.compile(r"[a-z]+(?=[\s;&|()]|\Z)|[{}](?=[\s;&|)]|\Z)|\[\[(?=\s)|!(?=\s)").match(
            self.cursor.text, self.cursor.position
        )
        return found[0] if found else ""

    def _expect(self, word: str, opened: int, opener: str) -> None:
        self._skip_empty()
        if self._keyword() != word:
            raise ScriptError(opened, f"{opener} opens here and has no {word}")
        self.cursor.take(len(word))

    def _chain(self) -> Command:
        line = self.cursor.line
        first, rest = self._pipeline(), []
        while True:
            self.cursor.skip_blanks()
            operator = self.cursor.peek(2)
            if operator not in ("&&", "||"):
                break
            self.cursor.take(2)
            self._skip_lines()
            rest.append((operator, self._pipeline()))
        chain: Command = Chain(line, first, tuple(rest)) if rest else first
        if self.cursor.peek() == "&" and not self.cursor.at_end:  # in the background: in a shell of its own
            return Group(line, (chain,), is_subshell=True)
        return chain

    def _skip_lines(self) -> None:
        while True:
            self.cursor.skip_blanks()
            if self.cursor.peek() != "\n":
                return
            self.cursor.take()
            self._read_documents()

    def _pipeline(self) -> Command:
        line, negated = self.cursor.line, False
        self.cursor.skip_blanks()
        while self._keyword() in ("!", "time"):
            negated ^= self.cursor.take(len(self._keyword())) == "!"
            self.cursor.skip_blanks()
        commands = [self._command()]
        while True:
            self.cursor.skip_blanks()
            if self.cursor.peek() != "|" or self.cursor.starts("||"):
                break
            self.cursor.take(2 if self.cursor.starts("|&") else 1)
            self._skip_lines()
            commands.append(self._command())
        return commands[0] if len(commands) == 1 and not negated else Pipeline(line, tuple(commands), negated)

    def _command(self) -> Command:
        self._depth += 1
        if self._depth > _DEPTH:
            raise ScriptError(self.cursor.line, f"more than {_DEPTH} commands are nested here")
        try:
            return self._compound() or self._simple()
        finally:
            self._depth -= 1

    def _compound(self) -> Command | None:
        cursor, line = self.cursor, self.cursor.line
        word = self._keyword()
        command: Command
        compound: dict[str, Callable[[int], Command]] = {
            "if": self._if,
            "while": self._while,
            "until": self._while,
            "for": self._for,
            "case": self._case,
        }
        if word in compound:
            command = compound[word](line)
        elif word == "[[":
            command = self._test(line)
        elif word == "{":
            cursor.take()
            command = Group(line, self.block(("}",), line, "{"), is_subshell=False)
            cursor.take()
        elif cursor.starts("(("):
            inner = cursor.take_balanced("(", "((")
            # `((` also begins two nested subshells: ((a); b). Bash too decides by the end.
            if not inner.endswith(")"):
                return Group(line, read_script(inner, line), is_subshell=True)
            command = ArithmeticCommand(line, read_quoted_text(inner[1:-1], line))
        elif cursor.peek() == "(":
            command = Group(line, read_script(cursor.take_balanced("(", "("), line), is_subshell=True)
        elif function := _FUNCTION.match(cursor.text, cursor.position):
            cursor.take(len(function[0]))
            body = self._compound()
            assert body is not None
            return Function(line, function[1] or function[2], (body,))
        else:
            return None
        while self._redirect() is not None:
            pass
        return command

    def _if(self, line: int) -> If:
        arms: list[tuple[Block, Block]] = []
        otherwise: Block = ()
        while True:
            self.cursor.take(len(self._keyword()))
            condition = self.block(("then",), line, "if")
            self._expect("then", line, "if")
            arms.append((condition, self.block(("fi", "elif", "else"), line, "if")))
            if self._keyword() != "elif":
                break
        if self._keyword() == "else":
            self.cursor.take(4)
            otherwise = self.block(("fi",), line, "if")
        self._expect("fi", line, "if")
        return If(line, tuple(arms), otherwise)

    def _while(self, line: int) -> While:
        word = self.cursor.take(5)
        condition = self.block(("do",), line, word)
        return While(line, condition, self._body(line, word), until=word == "until")

    def _body(self, line: int, opener: str) -> Block:
        self._expect("do", line, opener)
        body = self.block(("done",), line, opener)
        self._expect("done", line, opener)
        return body

    def _for(self, line: int) -> For | ForArithmetic:
        cursor = self.cursor
        cursor.take(3)
        cursor.skip_blanks()
        if cursor.starts("(("):
            inner = cursor.take_balanced("(", "((")[1:-1]
            parts = [read_quoted_text(part, line) for part in inner.split(";")]
            if len(parts) != 3:
                raise ScriptError(line, "for (( )) needs three expressions: start; condition; step")
            return ForArithmetic(line, parts[0], parts[1], parts[2], self._body(line, "for"))
        name = NAME.match(cursor.text, cursor.position)
        if name is None:
            raise ScriptError(line, "for needs the name of a variable")
        cursor.take(len(name[0]))
        self._skip_lines()
        words: list[Word] | None = None
        if self._keyword() == "in":
            cursor.take(2)
            words = self._words_until_end()
        return For(line, name[0], None if words is None else tuple(words), self._body(line, "for"))

    def _words_until_end(self) -> list[Word]:
        words: list[Word] = []
        while True:
            self.cursor.skip_blanks()
            word = read_word(self.cursor)
            if not word:
                return words
            words.append(word)

    def _case(self, line: int) -> Case:
        cursor = self.cursor
        cursor.take(4)
        cursor.skip_blanks()
        word = read_word(cursor)
        self._expect("in", line, "case")
        arms: list[tuple[tuple[Word, ...], Block]] = []
        while True:
            self._skip_empty()
            if self._keyword() == "esac":
                cursor.take(4)
                return Case(line, word, tuple(arms))
            patterns = []
            while True:
                if cursor.at_end:
                    raise ScriptError(line, "case opens here and never ends with esac")
                cursor.skip_blanks()
                if cursor.peek() == "(":
                    cursor.take()
                    cursor.skip_blanks()
                patterns.append(read_word(cursor))
                cursor.skip_blanks()
                if cursor.take() == ")":
                    break
            arms.append((tuple(patterns), self.block((";;", "esac"), line, "case")))
            if cursor.starts(";;"):
                cursor.take(3 if cursor.starts(";;&") else 2)

    def _test(self, line: int) -> Test:
        cursor = self.cursor
        cursor.take(2)
        words: list[Word] = []
        while True:
            self._skip_lines()
            if cursor.at_end:
                raise ScriptError(line, "[[ opens here and never closes with ]]")
            if cursor.starts("]]"):
                cursor.take(2)
                return Test(line, tuple(words))
            sign = re.compile(r"&&|\|\||[()]|[<>](?=\s)").match(cursor.text, cursor.position)
            if sign is not None and not (words and _is_match(words[-1])):
                words.append((Literal(cursor.take(len(sign[0])), cursor.line),))
                continue
            is_pattern = bool(words) and _is_match(words[-1])
            word = read_word(cursor, _IN_TEST if is_pattern else _WORD_ENDS)
            if not word:
                raise ScriptError(cursor.line, f"[[ ]] has {cursor.peek()!r}, which cannot be read there")
            words.append(word)

    def _simple(self) -> Simple:
        cursor, line = self.cursor, self.cursor.line
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        documents: list[HereDocument] = []
        while True:
            cursor.skip_blanks()
            found = self._redirect()
            if found is not None:
                (documents if isinstance(found, HereDocument) else redirects).append(found)  # type: ignore[arg-type]
                continue
            declares = bool(words) and _text(words[0]) in _DECLARATIONS
            start = _ASSIGNMENT.match(cursor.text, cursor.position) if not words or declares else None
            if start is not None:
                assignments.append(self._assignment(start))
                continue
            word = read_word(cursor)
            if not word:
                break
            words.append(word)
        if not (assignments or words or redirects or documents):
            raise ScriptError(line, f"{cursor.peek(2).strip() or 'the end'} cannot be read as a command")
        return Simple(line, tuple(assignments), tuple(words), tuple(redirects), tuple(documents))

    def _assignment(self, start: re.Match[str]) -> Assignment:
        cursor, line = self.cursor, self.cursor.line
        cursor.take(len(start[0]))
        index = read_index(start[2][1:-1], line) if start[2] else None
        if cursor.peek() != "(":
            return Assignment(start[1], line, read_word(cursor), None, index, bool(start[3]))
        cursor.take()
        items: list[Word] = []
        places: list[Word | None] = []
        while True:
            self._skip_lines()
            if cursor.at_end:
                raise ScriptError(line, f"{start[1]}=( opens here and never closes")
            if cursor.peek() == ")":
                cursor.take()
                return Assignment(start[1], line, (), tuple(items), None, bool(start[3]), tuple(places))
            place = _PLACE.match(cursor.text, cursor.position)
            if place is not None:
                cursor.take(len(place[0]))
                items.append(read_word(cursor))
                places.append(read_index(place[1], line))
                continue
            word = read_word(cursor)
            if not word:
                raise ScriptError(
                    cursor.line, f"{cursor.peek()!r} cannot stand in the array {start[1]}; put it in quotes"
                )
            items.append(word)
            places.append(None)

    def _redirect(self) -> Redirect | HereDocument | None:
        cursor = self.cursor
        cursor.skip_blanks()
        found = _REDIRECT.match(cursor.text, cursor.position)
        if found is None or cursor.text[found.end() : found.end() + 1] == "(" and found[0] in "<>":
            return None
        if found[0] == "<" and (word := read_word(Cursor(cursor.text[cursor.position :].partition("\n")[0]))) and word:
            return None  # a placeholder, which is part of a word
        line = cursor.line
        operator = cursor.take(len(found[0])).lstrip("0123456789")
        cursor.skip_blanks()
        target = read_word(cursor)
        if not target:
            raise ScriptError(line, f"{operator} has no file; name a file after it")
        if operator not in ("<<", "<<-"):
            return Redirect(operator, target, line)
        literal = any(isinstance(part, Literal) and not part.is_open for part in target)
        document = HereDocument(_text(target), line, literal, operator == "<<-")
        self._documents.append(document)
        return document

    def _read_documents(self) -> None:
        """Read the contents of the here-documents that the finished line asked for."""
        cursor = self.cursor
        for document in self._documents:
            start, lines = cursor.line, []
            while True:
                if cursor.at_end:
                    raise ScriptError(document.line, f"<<{document.delimiter} never ends with {document.delimiter}")
                line = cursor.take_line()
                line = line.lstrip("\t") if document.strips_tabs else line
                if line == document.delimiter:
                    break
                lines.append(f"{line}\n")
            text = "".join(lines)
            literal = (Literal(text, start, is_open=False),)
            document.content.append(literal if document.is_literal else read_quoted_text(text, start))
        self._documents.clear()


def _text(word: Word) -> str:
    return "".join(part.text for part in word if isinstance(part, Literal))


def _is_match(word: Word) -> bool:
    return _text(word) in ("=~", "==", "=", "!=")
