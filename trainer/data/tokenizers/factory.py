"""Tokenizer factory: recognise the kind of the files, and read them.

Never uses the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.data_flags import TOKENIZER_TYPES
from trainer.config.paths.hub_names import hub_remedy, is_hub_name
from trainer.data.errors import DataError
from trainer.data.tokenizers.gpt2 import added_token, read_gpt2
from trainer.data.tokenizers.huggingface import HuggingFaceVocabulary
from trainer.data.tokenizers.null import NullTokenizer
from trainer.data.tokenizers.sentencepiece_model import SentencePieceVocabulary
from trainer.data.tokenizers.settings import TokenizerSettings, settings_of
from trainer.data.tokenizers.special_names import declared_names, names_in, read_json_beside
from trainer.data.tokenizers.tiktoken_ranks import RanksVocabulary
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.data.tokenizers.user_tokenizer import open_user_tokenizer
from trainer.data.tokenizers.vocabulary import Vocabulary, VocabularyTokenizer
from trainer.data.tokenizers.wordpiece import read_wordpiece
from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import is_gguf, read_local_header
from trainer.families.gguf.tokenizer import tokenizer_files

if TYPE_CHECKING:
    from trainer.config.sections.data import DataConfig

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_SENTENCEPIECE_FILE = "tokenizer.model"
_WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
_MOST_IDS = (1 << 31) - 1
"""Largest vocabulary: ids have 31 bits, and one more id ends documents."""
_REMEDY = (
    "name a tokenizer.json, a SentencePiece .model, a .tiktoken file or a folder that holds a tokenizer, or "
    "vocab_file (and merge_file)"
)


def load_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Open the tokenizer that a config's data section names.

    Args:
        data: the section.
        vocab_size: vocabulary size of the model, the number of ids of a NullTokenizer.

    Raises:
        DataError: no tokenizer is named, or the tokenizer cannot be used.
    """
    settings = settings_of(data, vocab_size)
    if not settings.is_set:
        raise DataError(f"data.tokenizer_model: is unset; {_REMEDY}")
    return open_tokenizer(settings)


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Read the files that ``settings`` name.

    Raises:
        DataError: no tokenizer is named, a file is missing, damaged or of another kind than requested, or the package
            that reads the file is not installed.
    """
    kind = settings.tokenizer_type
    if settings.tokenizer_function is not None:
        if settings.has_files or kind is not None:
            raise DataError(
                "tokenizer_function: cannot be combined with a tokenizer's files or tokenizer_type; leave out one of "
                "them"
            )
        return open_user_tokenizer(settings.tokenizer_function)
    if kind is not None and kind not in TOKENIZER_TYPES:
        raise DataError(f"tokenizer_type: {kind!r} is not available; valid are {', '.join(TOKENIZER_TYPES)}")
    if kind == "NullTokenizer":
        if settings.vocab_size is None or not 1 <= settings.vocab_size < _MOST_IDS:
            raise DataError(
                f"vocab_size: NullTokenizer needs it, from 1 to {_MOST_IDS - 1}; set model.vocab_size, or --vocab-size "
                "of llmctl data prepare"
            )
        return NullTokenizer(settings.vocab_size)
    if not settings.is_set:
        raise DataError(f"tokenizer_model: is unset; {_REMEDY}")
    found = type_of(settings) if kind is None else kind
    gguf = _gguf_file(settings)
    vocabulary = _vocabulary(found, settings) if gguf is None else _vocabulary_of_gguf(found, gguf, settings)
    return VocabularyTokenizer(vocabulary, settings, open_tokenizer)


def type_of(settings: TokenizerSettings) -> str:
    """Recognise the type of tokenizer by the names of the files.

    Raises:
        DataError: the files are of no known kind.
    """
    path = _path(settings.tokenizer_model or settings.vocab_file)
    if settings.merge_file or path.name == "vocab.json" or (path.suffix == ".json" and not settings.tokenizer_model):
        return "GPT2BPETokenizer"
    if not settings.tokenizer_model:
        return _wordpiece_case(path)
    if is_gguf(path):
        return "SentencePieceTokenizer" if _SENTENCEPIECE_FILE in _files_of_gguf(path) else "HuggingFaceTokenizer"
    if path.is_dir():
        return _type_of_folder(path)
    if path.suffix == ".model" or ".model." in path.name:
        return _type_of_content(path)
    if path.suffix == ".tiktoken" or path.name.startswith("tekken"):
        return "TikTokenizer"
    return _wordpiece_case(path) if path.suffix == ".txt" else "HuggingFaceTokenizer"


def _type_of_folder(folder: Path) -> str:
    if (folder / "tokenizer.json").is_file():
        return "HuggingFaceTokenizer"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return "GPT2BPETokenizer"
    if (folder / "tokenizer.model").is_file():
        return _type_of_content(folder / "tokenizer.model")
    if any(folder.glob("tekken*.json")) or any(folder.glob("*.tiktoken")):
        return "TikTokenizer"
    if (folder / "vocab.txt").is_file():
        return _wordpiece_case(folder / "vocab.txt")
    if any(folder.glob("*.model")):
        return "SentencePieceTokenizer"
    raise DataError(
        f"{folder}: holds no tokenizer.json, vocab.json with merges.txt, tokenizer.model, .tiktoken file, tekken.json "
        "or vocab.txt; name the folder or file of a tokenizer"
    )


def _type_of_content(path: Path) -> str:
    # Llama 3's tokenizer.model holds ranks, as lines of base64 and a number; SentencePiece's begins with 0x0A.
    try:
        with path.open("rb") as file:
            line = file.readline(100)
    except OSError:
        return "SentencePieceTokenizer"
    return "TikTokenizer" if line.strip().endswith(b" 0") else "SentencePieceTokenizer"


def _wordpiece_case(vocab_file: Path) -> str:
    lower = read_json_beside(vocab_file.parent / "tokenizer_config.json").get("do_lower_case")
    if not isinstance(lower, bool):
        raise DataError(
            f"{vocab_file}: its folder has no tokenizer_config.json with do_lower_case; set tokenizer_type to "
            f"{' or '.join(_WORDPIECE)}"
        )
    return _WORDPIECE[0] if lower else _WORDPIECE[1]


def _vocabulary(kind: str, settings: TokenizerSettings) -> Vocabulary:
    model = None if settings.tokenizer_model is None else _path(settings.tokenizer_model)
    if kind == "GPT2BPETokenizer":
        vocab_file = _file(settings.vocab_file, model, "vocab.json", "vocab_file")
        merge_file = _file(settings.merge_file, model, "merges.txt", "merge_file")
        content = read_gpt2(vocab_file, merge_file)
        _add_tokens_beside(content, vocab_file.parent)
        around = settings.tokenizer_hf_include_special_tokens
        return HuggingFaceVocabulary(content, str(vocab_file), declared_names(vocab_file.parent), around)
    if kind in _WORDPIECE:
        vocab_file = _file(settings.vocab_file, model, "vocab.txt", "vocab_file")
        content = read_wordpiece(vocab_file, lower_case=kind == _WORDPIECE[0])
        return HuggingFaceVocabulary(content, str(vocab_file), declared_names(vocab_file.parent))
    if model is None:
        raise DataError(f"tokenizer_model: {kind} needs it; {_REMEDY}")
    if kind == "TikTokenizer":
        return RanksVocabulary(_only(model, ("*.tiktoken", "tekken*.json", "tokenizer.model")), settings)
    if kind in _SENTENCEPIECE:
        file = _only(model, (_SENTENCEPIECE_FILE, "*.model"))
        return SentencePieceVocabulary(_read_model(file), str(file), declared_names(file.parent))
    file = model / "tokenizer.json" if model.is_dir() else model
    around = settings.tokenizer_hf_include_special_tokens
    return HuggingFaceVocabulary(_read_content(file), str(file), declared_names(file.parent), around)


def _gguf_file(settings: TokenizerSettings) -> Path | None:
    """The GGUF file that holds the tokenizer; None for other files."""
    path = None if settings.tokenizer_model is None else _path(settings.tokenizer_model)
    return path if path is not None and is_gguf(path) else None


def _files_of_gguf(path: Path) -> Mapping[str, bytes]:
    """The files that the tokenizer in a GGUF file stands for."""
    try:
        metadata = read_local_header(path).metadata
    except FamilyError as error:
        raise DataError(str(error)) from None
    found = tokenizer_files(metadata, len(metadata.get("tokenizer.ggml.tokens", [])))
    if not found.files:
        raise DataError(f"{path}: {'; '.join(found.notes)}")
    return found.files


def _vocabulary_of_gguf(kind: str, path: Path, settings: TokenizerSettings) -> Vocabulary:
    files = _files_of_gguf(path)
    names = names_in(json.loads(files["tokenizer_config.json"]))
    if _SENTENCEPIECE_FILE in files and kind in _SENTENCEPIECE:
        return SentencePieceVocabulary(files[_SENTENCEPIECE_FILE], str(path), names)
    if "tokenizer.json" in files and kind == "HuggingFaceTokenizer":
        content = json.loads(files["tokenizer.json"])
        return HuggingFaceVocabulary(content, str(path), names, settings.tokenizer_hf_include_special_tokens)
    raise DataError(f"tokenizer_type: is {kind}, but {path} holds another tokenizer; leave the type out")


def _read_model(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot read the tokenizer ({error.strerror}); name a SentencePiece .model") from None


def _read_content(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{file}: cannot read the tokenizer ({error.strerror}); name a tokenizer.json or its folder{_of_hub(file)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: is not a valid tokenizer.json: {error}; name a tokenizer.json or its folder"
        ) from None


def _of_hub(file: Path) -> str:
    """Return the remedy for a name of the Hugging Face hub (OWNER/NAME); else empty."""
    return hub_remedy(str(file), "tokenizer*") if is_hub_name(str(file)) else ""


def _add_tokens_beside(content: dict[str, Any], folder: Path) -> None:
    """Add the tokens of transformers' tokenizer_config.json to a vocabulary without a tokenizer.json."""
    added = read_json_beside(folder / "tokenizer_config.json").get("added_tokens_decoder")
    known = {token["id"] for token in content["added_tokens"]}
    for key, token in (added if isinstance(added, dict) else {}).items():
        named = isinstance(token, dict) and isinstance(token.get("content"), str)
        if named and key.isdecimal() and int(key) not in known:
            content["added_tokens"].append(added_token(token["content"], int(key)))


def _path(name: str | None) -> Path:
    if name is None:
        raise DataError(f"vocab_file: is unset; {_REMEDY}")
    return Path(name).expanduser()


def _file(named: str | None, model: Path | None, usual: str, key: str) -> Path:
    """Return the file of ``key``; default: the usual name in or beside the tokenizer."""
    if named is not None:
        return _path(named)
    if model is None:
        raise DataError(f"{key}: is unset; name the file {usual}, or set tokenizer_model to the folder that holds it")
    if model.is_dir():
        return model / usual
    return model if model.suffix == Path(usual).suffix else model.with_name(usual)


def _only(model: Path, patterns: tuple[str, ...]) -> Path:
    """Return ``model`` if it is a file, else the matching file in that folder.

    Only the first pattern with a match counts, and the match must be unique.
    """
    if not model.is_dir():
        return model
    for pattern in patterns:
        found = sorted(model.glob(pattern))
        if len(found) > 1:
            names = " and ".join(path.name for path in found[:3])
            raise DataError(f"{model}: holds {names}; name the file")
        if found:
            return found[0]
    raise DataError(f"{model}: holds no {' or '.join(patterns)}; name the file")
