"""Choice of tokens, and text from tokens. 2 s on one core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.generation.errors import GenerationError
from trainer.generation.model import check_rows, most_positions
from trainer.generation.prompts import read_prompts
from trainer.generation.sampling import choose_tokens, row_generators, token_probabilities
from trainer.generation.settings import GenerationSettings
from trainer.generation.text import TextRow, TextStream
from trainer.planning.build_config import build_config

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


class Bytes:
    """Tokenizer of which each token is one byte."""

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def drawn(settings: GenerationSettings, count: int) -> set[int]:
    generators = row_generators(settings, [0])
    return {int(choose_tokens(LOGITS, settings, generators)) for _ in range(count)}


def test_top_k_and_top_p_never_draw_other_tokens() -> None:
    everything = GenerationSettings(seed=3)
    assert drawn(everything, 500) == {0, 1, 2, 3}
    assert drawn(replace(everything, top_k=2), 200) == {2, 3}
    shares = torch.softmax(LOGITS, -1)[0]
    # The fewest tokens that reach 0.7 are two: the first has 0.64, the second 0.24.
    assert float(shares[3]) < 0.7 < float(shares[2] + shares[3])
    assert drawn(replace(everything, top_p=0.7), 200) == {2, 3}
    assert drawn(replace(everything, top_p=0.6), 50) == {3}
    assert drawn(replace(everything, temperature=0.0), 5) == {3}


def test_probabilities_are_those_of_the_kept_tokens() -> None:
    settings = GenerationSettings(temperature=2.0, top_k=3, top_p=0.8)
    found = token_probabilities(LOGITS, settings)
    shares = torch.softmax(torch.tensor([-torch.inf, 0.5, 1.0, 1.5]), -1)
    assert float(shares[3] + shares[2]) >= 0.8
    expected = torch.tensor([0.0, 0.0, shares[2], shares[3]]) / (shares[2] + shares[3])
    torch.testing.assert_close(found[0], expected)


def test_a_row_has_its_own_stream() -> None:
    settings = GenerationSettings(seed=5)
    wide = torch.zeros(2, 1000)
    both = choose_tokens(wide, settings, row_generators(settings, [0, 1]))
    alone = [choose_tokens(wide[:1], settings, row_generators(settings, [row])) for row in (0, 1)]
    assert both.tolist() == [int(one) for one in alone]
    assert both[0] != both[1]
    again = choose_tokens(wide, replace(settings, seed=6), row_generators(replace(settings, seed=6), [0, 1]))
    assert both.tolist() != again.tolist()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "temperature: -1 is not a finite number of 0 or more"),
        ({"temperature": float("nan")}, "temperature: nan is not"),
        ({"top_k": -1}, "top_k: -1 is negative"),
        ({"top_p": 0.0}, "top_p: 0 is not above 0 and at most 1"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1 is negative"),
    ],
)
def test_wrong_settings(values: dict[str, float], says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        GenerationSettings(**values)  # type: ignore[arg-type]


def test_texts_that_do_not_fit() -> None:
    check_rows([[1] * 7], 10, 8, more=1)
    with pytest.raises(
        GenerationError, match="text 2: has 8 tokens, but rows of this model end at 8 tokens; shorten it to 7"
    ):
        check_rows([[1], [1] * 8], 10, 8, more=1)
    with pytest.raises(GenerationError, match="text 1: is empty"):
        check_rows([[]], 10, 8)
    with pytest.raises(GenerationError, match="text 1: holds token 10, but the model's vocabulary has 10 tokens"):
        check_rows([[10]], 10, 8)


def row_of(text: str, stop: Sequence[str] = (), prompt: str = "p") -> SimpleNamespace:
    """Feed the bytes of ``text``; the pieces that were told, the text, and the number of bytes taken."""
    pieces: list[str] = []
    row = TextRow(TextStream(Bytes(), prompt.encode()), stop, pieces.append)  # type: ignore[arg-type]
    data = text.encode()
    taken = next((count for count, byte in enumerate(data, 1) if row.add(byte)), None)
    row.finish()
    return SimpleNamespace(pieces=pieces, text=row.text, taken=taken)


def test_only_whole_characters_are_told() -> None:
    found = row_of("aé日🎈b")
    assert found.pieces == ["a", "é", "日", "🎈", "b"]
    pieces: list[str] = []
    row = TextRow(TextStream(Bytes(), b""), (), pieces.append)  # type: ignore[arg-type]
    for byte in "é".encode()[:1]:
        row.add(byte)
    assert pieces == []
    row.finish()
    assert pieces == ["\ufffd"]


def test_the_text_ends_before_the_first_stop_string() -> None:
    found = row_of("one\n\ntwo", ["three", "\n\n"])
    assert (found.text, found.taken) == ("one", 5)
    assert "".join(found.pieces) == "one"
    assert row_of("aab aac", ["aac"]).text == "aab "
    # What looked like a beginning of a stop string is told at the end.
    assert row_of("one\n", ["\n\n"]).text == "one\n"


def test_prompts_of_files(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty").write_text("\n")
    assert read_prompts(["zero"], str(tmp_path / "p.txt")) == ["zero", "one", "two"]
    assert read_prompts([], str(tmp_path / "p.jsonl")) == ["a\nb"]
    for name, says in (("no", "cannot be read: No such file"), ("bad.jsonl", "is no"), ("empty", "has no prompts")):
        with pytest.raises(GenerationError, match=says):
            read_prompts([], str(tmp_path / name))


def test_rows_of_longrope_end_where_its_angles_change() -> None:
    """One token more would change the angles of keys that are kept."""
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    scaling = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16, **factors}
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "position_embedding_type": "rope"}
    for longest, expected in ((64, 16), (8, 8)):
        model = {**shape, "max_position_embeddings": longest, "rope_scaling": scaling}
        values = {"model": model, "training": {"train_iters": 1, "seq_length": 8}, "optimizer": {"lr": 0.1}}
        assert most_positions(build_config(values)) == expected
