"""Sentence splitting by rules, without a model.

The rules cover Latin and similar scripts, Japanese, Chinese, Korean and others.
"""

from __future__ import annotations

import re

_CLOSING = "\"'”’»›)\\]}）］｝」』】〉》〕"
_STOPS = ".!?…։؟۔।॥።"
_END = re.compile(
    # Full stops without a following space (CJK), then closing quotation marks or brackets.
    rf"(?P<full>(?:[。！？｡]|．(?![0-9０-９]))+[{_CLOSING}]*)"
    # Stops that also occur within words and numbers: only before white space. Danda, Arabic, Ethiopic, Armenian too.
    # Never from the middle of a row of stops: otherwise a leader of a million dots would be tried from each dot.
    rf"|(?<![{_STOPS}])(?P<stop>[{_STOPS}]+[{_CLOSING}]*)(?=\s)"
    # A blank line ends a sentence, as after a heading.
    r"|(?=\n[^\S\n]*\n)"
)
_SPACE = re.compile(r"\s*")
_WORD_BEFORE = re.compile(r"[^\s(\[{\"'“‘«]*$")
_WORD_AFTER = re.compile(r"[^\W\d_]+")
_LONGEST_ABBREVIATION = 24


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEFORE_MORE = _words(
    "mr mrs ms dr drs prof messrs mme mmes mlle st mt rev hon gen brig col sgt capt lt maj cmdr gov sen sens rep reps "
    "pres atty supt e.g i.e cf viz vs v fig figs eq eqs eqn sec ch vol vols z.b d.h"
)
"""Abbreviations after which a sentence continues."""
_BEFORE_NUMBERS = _words(
    "no nos p pp op chap ref art nr jan feb mar apr jun jul aug sep sept oct nov dec approx ca est"
)
"""Abbreviations before a number; otherwise ordinary words."""
_BEFORE_NAMES = _words("u.s u.k u.n a.m p.m inc ltd co sr ph.d m.d b.a m.a dept univ al ed eds")
"""Abbreviations after which a sentence continues, unless the next word is in _BEGINNINGS."""
_BEGINNINGS = _words(
    "a after all an and as at but by for from he her his how however i if in it its many most no on one our she since "
    "so some such that the their then there these they this those to we what when where while who with you"
)


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of ``text``, none empty.

    Args:
        text: of any language.
        keep_newlines: keep the white space after each sentence, so that the joined sentences are the text again;
            otherwise the white space is dropped.
    """
    sentences = []
    start = 0
    for match in _END.finditer(text):
        end = match.end()
        if end <= start:
            continue
        after = _space_end(text, end)
        if match["stop"] and not _is_end(text, start, match.start(), match["stop"], after):
            continue
        sentences.append(text[start : after if keep_newlines else end])
        start = after
    sentences.append(text[start:])
    if keep_newlines:
        return _with_leading_space(sentences)
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def _space_end(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _is_end(text: str, start: int, dot: int, stop: str, after: int) -> bool:
    """True if the stop at ``dot`` ends the sentence from ``start``.

    ``after`` is the end of the white space.
    """
    if after == len(text):
        return True
    if "\n\n" in text[dot:after]:
        return True
    following = text[after]
    if following.islower():
        return False
    if not stop.startswith(".") or stop.startswith(".."):
        return True
    found = _WORD_BEFORE.search(text[max(start, dot - _LONGEST_ABBREVIATION) : dot])
    word = found[0] if found else ""
    if len(word) == 1 and word.isalpha() and word.isupper():
        # An initial. Exceptions: the pronoun I, and a variable or state at the end of a sentence.
        return word == "I" or (_begins_sentence(text, after) and _WORD_AFTER.match(text, after + 1) is not None)
    lowered = word.lower()
    if lowered in _BEFORE_NAMES:
        return _begins_sentence(text, after)
    return not (lowered in _BEFORE_MORE or (lowered in _BEFORE_NUMBERS and following.isdecimal()))


def _begins_sentence(text: str, place: int) -> bool:
    word = _WORD_AFTER.match(text, place)
    return word is not None and word[0].lower() in _BEGINNINGS


def _with_leading_space(sentences: list[str]) -> list[str]:
    kept: list[str] = []
    before = ""
    for sentence in sentences:
        if sentence.strip():
            kept.append(before + sentence)
            before = ""
        elif kept:
            kept[-1] += sentence
        else:
            before += sentence
    return kept
