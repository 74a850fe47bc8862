"""tiktoken's vocabularies: ranked byte strings, and a regular expression that splits text.

Three file formats hold such vocabularies: OpenAI's .tiktoken (base64 and rank per line), the JSON list that
Megatron-LM's TikTokenizer reads, and Mistral's tekken.json, the same list with its settings. In both lists special
tokens come before the ranks. The first two formats do not hold the regular expression.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.engines import EngineCandidate, EngineRefusal
from trainer.data.tokenizers.gigatoken_engine import GigatokenEngine, load_ranks
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import TokenBatch, join_arrays
from trainer.data.tokenizers.words import WordPieces, words_by_text

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


def _cased(contractions: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


PATTERNS = {
    "r50k": _R50K,
    "p50k": _R50K,
    "cl100k": _CL100K,
    "o200k": _cased(_CONTRACTIONS, r"\p{N}{1,3}"),
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _cased("", r"\p{N}"),
}
"""OpenAI's patterns (tiktoken_ext/openai_public.py) and Megatron-LM's two (--tiktoken-pattern)."""
_SCHEMES = {"r50k": "gpt2", "cl100k": "gpt4", "o200k": "o200k"}
"""Patterns that gigatoken knows -> gigatoken's names."""
_FILES = {
    "r50k_base": ("r50k", {"<|endoftext|>": 50256}),
    "gpt2": ("r50k", {"<|endoftext|>": 50256}),
    "p50k_base": ("p50k", {"<|endoftext|>": 50256}),
    "multilingual": ("r50k", {"<|endoftext|>": 50257}),
    "cl100k_base": (
        "cl100k",
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""Names of published files -> pattern and special tokens, which a .tiktoken file does not hold."""
_LIST_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens that Megatron-LM puts before the ranks of a list, in this order."""
_TEKKEN_SPECIALS = ("<unk>", "<s>", "</s>")
_LIST_IDS = 1 << 17
_BYTES = 256


@dataclass(frozen=True)
class Ranks:
    """Content of a file.

    Attributes:
        ids: byte string -> id; ids are in the order of the ranks.
        pattern: name in PATTERNS, or a regular expression.
        specials: name -> id.
    """

    ids: dict[bytes, int]
    pattern: str
    specials: dict[str, int] = field(default_factory=dict)


def read_ranks(path: Path, settings: TokenizerSettings) -> Ranks:
    """Read a .tiktoken file, or a list in JSON.

    Raises:
        DataError: the file cannot be read, has neither format, lacks a byte, has a duplicate rank, or has no known
            pattern.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer ({error.strerror}); name a file of ranks") from None
    ranks = (
        _read_list(path, content, settings)
        if content.lstrip()[:1] in (b"[", b"{")
        else _read_lines(path, content, settings)
    )
    absent = sum(bytes([value]) not in ranks.ids for value in range(_BYTES))
    if absent:
        raise DataError(f"{path}: has no token for {absent} of the 256 bytes; it is damaged or truncated")
    return ranks


def _read_lines(path: Path, content: bytes, settings: TokenizerSettings) -> Ranks:
    ids: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            spelled, rank = line.split()
            piece, token = base64.b64decode(spelled, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}:{number}: is not base64 and rank: {line[:60]!r}; name a .tiktoken file") from None
        if piece in ids or token in seen or token < 0:
            raise DataError(f"{path}:{number}: gives {piece!r} the rank {token}, but one of the two is already in use")
        ids[piece] = token
        seen.add(token)
    known = _FILES.get(path.name.removesuffix(".tiktoken"))
    # Published files skip at most one rank before the special tokens.
    if known and min(known[1].values()) > max(seen, default=-1) + 2:
        raise DataError(
            f"{path}: ends at rank {max(seen, default=-1)}, but a file of this name continues to "
            f"{min(known[1].values())}; it is truncated: get it again"
        )
    pattern = settings.tiktoken_pattern or (known[0] if known else None)
    if pattern is None:
        raise DataError(
            f"{path}: does not define how text is split into words, and is none of {', '.join(_FILES)}; set "
            f"tiktoken_pattern to {', '.join(PATTERNS)} or a regular expression"
        )
    specials = {name: token for name, token in known[1].items() if token not in seen} if known else {}
    return Ranks(ids, pattern, specials)


def _read_list(path: Path, content: bytes, settings: TokenizerSettings) -> Ranks:
    try:
        values = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}; name a list of ranks or a tekken.json") from None
    config = values.get("config") if isinstance(values, dict) else {}
    entries = values.get("vocab") if isinstance(values, dict) else values
    if not isinstance(config, dict) or not isinstance(entries, list):
        raise DataError(f"{path}: is neither a list of ranks nor a tekken.json with config and vocab")
    first = _count(path, config, "default_num_special_tokens", settings.tiktoken_num_special_tokens)
    size = _count(path, config, "default_vocab_size", settings.vocab_size or _LIST_IDS)
    if size <= first:
        raise DataError(f"{path}: its {first} special tokens leave no room in {size} ids; raise vocab_size")
    ids: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[: size - first]):
        try:
            piece, stated = base64.b64decode(entry["token_bytes"], validate=True), entry["rank"]
        except (TypeError, KeyError, ValueError, binascii.Error):
            raise DataError(f"{path}: entry {rank} has no rank and token_bytes: {str(entry)[:60]}") from None
        if stated != rank or piece in ids:
            raise DataError(f"{path}: entry {rank} has rank {stated} for {piece!r}; each rank must come once, in order")
        ids[piece] = first + rank
    pattern = settings.tiktoken_pattern or config.get("pattern") or "v2"
    return Ranks(ids, str(pattern), _list_specials(path, values, first, settings.tokenizer_special_tokens))


def _count(path: Path, config: Mapping[str, Any], key: str, usual: int) -> int:
    number = config.get(key, usual)
    if type(number) is not int or number < 0:
        raise DataError(f"{path}: its config.{key} is {str(number)[:60]!r}, but must be a number of tokens")
    return number


def _list_specials(path: Path, values: Any, first: int, given: Sequence[str]) -> dict[str, int]:
    stated = values.get("special_tokens") if isinstance(values, dict) else None
    if isinstance(stated, list):  # newer tekken files list their special tokens
        for entry in stated:
            kinds = isinstance(entry, dict) and (type(entry.get("rank")), type(entry.get("token_str")))
            if kinds != (int, str):
                raise DataError(f"{path}: special token {str(entry)[:60]} has no rank and token_str")
        return {entry["token_str"]: entry["rank"] for entry in stated if 0 <= entry["rank"] < first}
    names: Sequence[str] = _TEKKEN_SPECIALS if isinstance(values, dict) else _LIST_SPECIALS
    if isinstance(values, list) and set(names) <= set(given):
        # Megatron-LM's --tokenizer-special-tokens: all of these names in any order, and further names.
        names = list(dict.fromkeys(given))
        if len(names) > first:
            raise DataError(f"{path}: has {first} special tokens, but {len(names)} are named; name fewer")
    return {name: token for token, name in enumerate(names[:first])}


class RanksVocabulary:
    """A tiktoken vocabulary.

    Args:
        path: file of the vocabulary.
        settings: settings with the pattern, and the number of special tokens of a list.

    Raises:
        DataError: see read_ranks.
    """

    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self.origin = str(path)
        self.special_ids: Mapping[str, int] = {}
        self.special_names: Mapping[str, str] = {}
        self._path = path
        self._ranks = read_ranks(path, settings)
        self.named: Mapping[str, int] = self._ranks.specials
        self.size = 1 + max(*self._ranks.ids.values(), *self._ranks.specials.values())

    @property
    def _pattern(self) -> str:
        return PATTERNS.get(self._ranks.pattern, self._ranks.pattern)

    @cached_property
    def sha256(self) -> str:
        """Digest of the pattern and the ranks."""
        digest = hashlib.sha256(self._pattern.encode())
        for piece, token in sorted(self._ranks.ids.items(), key=lambda entry: entry[1]):
            digest.update(b"%d %s\n" % (token, base64.b64encode(piece)))
        return digest.hexdigest()

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token, or of the bytes of ``name``."""
        special = self._ranks.specials.get(name)
        return self._ranks.ids.get(name.encode()) if special is None else special

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        return {token: piece for piece, token in self._ranks.ids.items()}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""
        return b"".join(self._pieces.get(token, b"") for token in tokens).decode("utf-8", "replace")

    def word_pieces(self) -> WordPieces:
        """Find words by the space before them."""
        pieces = self._pieces
        return words_by_text(
            pieces[token].decode("utf-8", "replace") if token in pieces else None for token in range(self.size)
        )

    def engines(self) -> Sequence[EngineCandidate]:
        """List gigatoken if it knows the pattern; tiktoken is the reference."""
        candidates = [EngineCandidate("tiktoken", lambda: TikTokenEngine(self._ranks.ids, self._pattern, self.origin))]
        path, scheme = self._path, _SCHEMES.get(self._ranks.pattern)
        if scheme is not None and 0 in self._pieces:
            candidates.insert(
                0, EngineCandidate("gigatoken", lambda: GigatokenEngine(lambda: load_ranks(path, scheme)))
            )
        return candidates


class TikTokenEngine:
    """The tiktoken library, on the calling thread.

    Raises:
        ModuleNotFoundError: tiktoken is not installed.
        EngineRefusal: the pattern is not a valid regular expression.
    """

    def __init__(self, ids: Mapping[bytes, int], pattern: str, origin: str) -> None:
        from tiktoken import Encoding

        self._origin = origin
        try:
            self._encoding = Encoding(origin, pat_str=pattern, mergeable_ranks=dict(ids), special_tokens={})
        except Exception as error:  # the library raises no narrower class
            raise EngineRefusal(f"tiktoken_pattern is not a regular expression of tiktoken: {error}") from None

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text."""
        encode = self._encoding.encode_to_numpy
        try:
            return join_arrays([encode(text, disallowed_special=()) for text in texts])
        except ValueError as error:
            raise DataError(
                f"{self._origin}: tiktoken cannot split a text into words, usually because of a million spaces in a "
                f"row; remove this text, or pip install gigatoken: {error}"
            ) from None
