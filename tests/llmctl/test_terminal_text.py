"""Removal of escape sequences."""

import pytest

from llmctl.terminal_text import printable


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2J\x1b[3J\x1b[1;1Hb", "ab"),
        ("a\x1b[?1049h\x1b[>4;2m\x1b[!pb", "ab"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]2;title\x1b\\b", "ab"),
        ("a\x1b]52;c;cm0gLXJm\x07b", "ab"),
        ("\x1b]8;;http://elsewhere\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1bP$qm\x1b\\b", "ab"),
        ("a\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\b", "ab"),
        ("a\x9b2J\x9d52;c;cm0=\x9cb\x90$qm\x9cc", "abc"),
        ("a\x9d0;title\x07b", "ab"),
        ("a\x1b(0\x1b7\x1b8\x1bc\x1b=\x1b%Gb", "ab"),
        ("a\x1b]0;no end", "a0;no end"),
        ("a\x1b]0;cut\nnext line", "a0;cut\nnext line"),
        ("a\x1b\x1b[2Jb", "a\ufffdb"),
        ("a\x1b[\x1b[2Jb", "ab"),
        ("end\x1b", "end\ufffd"),
        ("bell\x07 back\x08 return\r next\x85 del\x7f", "bell\ufffd back\ufffd return\ufffd next\ufffd del\ufffd"),
        ("lines\r\nstay\n\ttabs", "lines\nstay\n\ttabs"),
        ("日本語 é ﬁ", "日本語 é ﬁ"),
    ],
)
def test_sequences_are_removed_and_other_controls_are_replaced(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


def test_what_remains_never_begins_a_sequence() -> None:
    pieces = ("\x1b", "[", "]", "P", "\x9b", "\x9d", "\x9c", "\x07", "\\", "2", "J", "\n")
    for first in pieces:
        for second in pieces:
            for third in pieces:
                for fourth in pieces:
                    left = printable(first + second + third + fourth)
                    assert not set(left) & {"\x1b", "\x07", *map(chr, range(0x7F, 0xA0))}
