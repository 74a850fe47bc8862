"""Sentence ends in several scripts; no text is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.prepare.sentences import split_sentences

CASES = [
    ["Dr. Smith went to Washington.", "He met Mr. J. Doe at 5 p.m. on Jan. 3.", "It cost $3.14!", "Really?", "Yes."],
    ["It ended at 5 p.m.", "The rest left.", '"That\'s fine," she wrote.', "(We agreed.)", "No. 5 is alive."],
    ["See Fig. 3 and e.g. the first.", "Version 2.0 is out... and then.", "Hmm...", "It was I.", "He left"],
    ["The U.S. Army and Acme Inc. Tokyo agreed.", "So did the U.S.", "They sat in the sun.", "Really?", "No.", "Art."],
    [
        "They met in Washington, D.C.",
        "Printed copies went to Gulf Oil Corp.",
        "Sales fell by 5 p.m. Monday at Mt. Holly.",
    ],
    [
        "The map is linear in T.",
        "The space is V.",
        "We say that J. A. Smith of N. Y. Central is a fine chap.",
        "See Op. 3.",
    ],
    ["計算ノードは一つのジョブだけを実行します。", "「順番を待ちます。」", "本当？！", "円周率は３．１４です．"],
    ["中文没有空格，标点符号。", "真的吗？", "是的！"],
    ["오늘은 날씨가 맑습니다.", "우리는 걸었습니다.", "정말요?", "네!"],
    ["यह पहला वाक्य है।", "यह दूसरा है।"],
    ["هل هذا سؤال؟", "نعم."],
    ["Title", "A line\nof a paragraph.", "Another."],
]
SEPARATORS = {6: "", 7: "", 11: "\n\n"}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_sentence_ends(number: int) -> None:
    text = SEPARATORS.get(number, " ").join(CASES[number])
    assert split_sentences(text) == CASES[number]
    kept = split_sentences(f" {text} \n", keep_newlines=True)
    assert "".join(kept) == f" {text} \n"
    assert [sentence.strip() for sentence in kept] == CASES[number]


@given(st.text(st.sampled_from("aB1.!?。」\"' \n\u3000\u2028।") | st.characters(), max_size=40))
def test_no_letter_is_lost_or_moved(text: str) -> None:
    kept = split_sentences(text, keep_newlines=True)
    assert "".join(kept) == (text if text.strip() else "")
    sentences = split_sentences(text)
    assert all(sentence == sentence.strip() != "" for sentence in sentences)
    assert sentences == [sentence.strip() for sentence in kept]


@pytest.mark.parametrize("row", [".", "?!", "\n", '."', "…)"])
def test_long_rows_take_no_longer_than_other_text(row: str) -> None:
    """Quadratic time would be half an hour for half a million dots."""
    text = row * (500_000 // len(row)) + "x"
    assert "".join(split_sentences(text, keep_newlines=True)) == text


def test_empty_text_and_white_space_have_no_sentences() -> None:
    assert [split_sentences(text, keep) for text in ("", " \n\n ") for keep in (False, True)] == [[]] * 4
