"""Whether a SentencePiece model gives both sides of a space between two words the tokens that they have together.

BPE joins neighbours to pieces (Sennrich et al. 2016, arXiv:1508.07909, algorithm 1), which neighbours do not depend on
what no piece holds together. A unigram model (Kudo 2018, arXiv:1804.10959) adds up the scores of a whole text, and
rounds: what is equally likely, as aa a and a aa, is decided by all that stands before, so that no text can be cut: of
10 MB of documentation the library made 3,815,791 tokens, and of its parts one fewer.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizers.model_proto import BPE, NORMAL, ModelProto

_SPACE = 0x20
_ENDS_KEY = 0x100
_LETTERS = range(ord("a"), ord("z") + 1)
_ACROSS_WORDS = re.compile("[^ \u2581][ \u2581]")


def is_cut_between_words(model: ModelProto) -> bool:
    """Whether texts may be cut between a letter and a space, of a to z and one, that stands before another letter.

    So it is if no piece and no rule of normalisation holds the two, the space keeps its piece, and what follows has it
    in front, because it is its own or because every text has one.
    """
    return (
        model.model_type == BPE
        and model.escaped_spaces
        and not model.suffix_space
        and (model.dummy_prefix or not model.fewer_spaces)
        # Else it may be unknown, and one with an unknown letter before it.
        and any(piece.text == "\u2581" and piece.kind == NORMAL for piece in model.pieces)
        and not any(_ACROSS_WORDS.search(piece.text) for piece in model.pieces)
        and not changes_spaces(model.charsmap)
    )


def changes_spaces(charsmap: bytes) -> bool:
    """Whether a rule of normalisation is for a space, alone or beside a letter of a to z.

    Rules are the keys of a double array (Aoe 1989, "An efficient digital search algorithm by using a double-array
    structure"), whose units are those of github.com/s-yata/darts-clone: label in bits 0 to 7, whether a key ends in
    bit 8, and where the children are in bits 9 to 31.

    Args:
        charsmap: the rules, compiled: bytes of the double array, the array, and what the keys become.
    """
    if len(charsmap) < 4:
        return False
    size = min(int.from_bytes(charsmap[:4], "little"), len(charsmap) - 4)
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    offsets = (units >> 10) << ((units & 0x200) >> 6)

    def children(nodes: npt.NDArray[np.int64], label: int) -> npt.NDArray[np.int64]:
        places = nodes ^ offsets[nodes] ^ label
        places = places[places < len(units)]
        found: npt.NDArray[np.int64] = places[(units[places] & 0x800000FF) == label]
        return found

    nodes = np.zeros(min(1, len(units)), np.int64)
    space = children(nodes, _SPACE)
    if (units[space] & _ENDS_KEY).any() or any(len(children(space, label)) for label in _LETTERS):
        return True
    seen = np.zeros(len(units), np.bool_)
    while len(nodes):
        seen[nodes] = True
        below = {label: children(nodes, label) for label in range(1, 256)}
        if any(len(children(below[label], _SPACE)) for label in _LETTERS):
            return True
        # Rules that end alike share what is behind, and a damaged array may lead in a circle.
        found = np.unique(np.concatenate(list(below.values())))
        nodes = found[~seen[found]]
    return False
