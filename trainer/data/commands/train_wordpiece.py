"""Train BERT's vocab.txt, with merges by frequency.

Source: Schuster and Nakajima 2012, "Japanese and Korean voice search".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainer.data.commands.corpus import pieces_at_line_ends
from trainer.data.tokenizers.vocabulary_size import check_size, too_little_text
from trainer.data.tokenizers.wordpiece import CONTINUATION, SPECIAL, wordpiece_content

ALPHABET_SHARE = 8
"""At most 1/8 of the tokens are letters, and as many their forms within a word: 4,000 of each in 32,000."""


def train_wordpiece(
    read: Callable[[], Iterable[str]], vocab_size: int, lower_case: bool, special_tokens: Sequence[str]
) -> str:
    """Return the content of a vocab.txt of ``vocab_size`` tokens.

    The same texts give the same file, on any number of threads. Memory: the distinct words of the text.

    Args:
        read: returns the texts; called twice, first for their letters, and a third time for a text of few words.
        vocab_size: number of tokens, including [PAD], [UNK], [CLS], [SEP] and [MASK].
        lower_case: convert text to lower case, and remove accents.
        special_tokens: names of further special tokens, which never occur in encoded text.

    Raises:
        DataError: the texts are too small for so many tokens.
    """
    from tokenizers import Tokenizer

    names = [*dict.fromkeys([*SPECIAL, *special_tokens])]
    check_size(vocab_size, *smallest_wordpiece(special_tokens))
    content = wordpiece_content({name: token for token, name in enumerate(names)}, lower_case)
    parts = Tokenizer.from_str(json.dumps(content))
    assert parts.normalizer is not None
    counts: Counter[str] = Counter()
    for text in read():
        counts.update(parts.normalizer.normalize_str(text))
    letters = sorted((letter for letter in counts if not letter.isspace()), key=lambda item: (-counts[item], item))
    vocabulary: dict[str, int] = {}
    # If the words of the text do not fill the vocabulary, a second attempt takes more letters.
    most = max(1, vocab_size // ALPHABET_SHARE), (vocab_size - len(names)) // 2
    for number in dict.fromkeys(min(len(letters), limit) for limit in most):
        vocabulary = _learn(read(), parts, vocab_size, names, sorted(letters[:number]))
        if len(vocabulary) == vocab_size:
            return "".join(f"{piece}\n" for piece in sorted(vocabulary, key=vocabulary.__getitem__))
    raise too_little_text(len(vocabulary), vocab_size, *smallest_wordpiece(special_tokens))


def smallest_wordpiece(special_tokens: Sequence[str]) -> tuple[int, str]:
    """Return the smallest vocabulary size, and a description of this vocabulary."""
    names = len({*SPECIAL, *special_tokens})
    return names + 2, f"{names} special tokens, and one letter at the start of words and within words"


def _learn(
    texts: Iterable[str], parts: Any, vocab_size: int, names: Sequence[str], letters: Sequence[str]
) -> dict[str, int]:
    """Return tokens and their ids: ``vocab_size`` of them if the texts suffice."""
    from tokenizers import Tokenizer, models, trainers

    # Listed beforehand, letters have ids that do not depend on the order in which threads encounter words. Merges of
    # equal frequency are ordered by id, so they do not depend on this order either.
    fixed = [*dict.fromkeys([*names, *letters, *(CONTINUATION + letter for letter in letters)])]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces_at_line_ends(text)), trainer)
    return tokenizer.get_vocab(with_added_tokens=True)
