"""Input files: expand names and patterns, and check what the files hold."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from trainer.data.errors import DataError
from trainer.data.prepare.compression import PACKINGS, Packing, packing_of

Kind = Literal["jsonl", "text", "parquet"]
_JSON_LINES = (".jsonl", ".json", ".ndjson")
_IN_FOLDERS = (*_JSON_LINES, ".txt", ".text", ".parquet")
"""Endings that are read from a folder. Not .md: a .md file beside data describes the data."""
_ARCHIVES = {".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".7z", ".rar"}
_DATASET_ENDINGS = (".bin", ".idx")
_CACHED = (".index", ".mapping")
_DESCRIPTION = "description.txt"
"""Ending of the names of the files in ``cache`` in which Megatron-LM describes its indexes."""
_MOST_ENDINGS = 3
"""Number of endings named in the warning about files left out of a folder."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_LETTERS = 16
"""So many letters distinguish UTF-16 without a byte-order mark from content that happens to hold NUL bytes."""
_HEAD = 4096


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as found.

    Attributes:
        path: absolute path.
        size: bytes on disk.
        mtime_ns: time of the last write.
    """

    path: str
    size: int
    mtime_ns: int

    @property
    def kind(self) -> Kind:
        """Kind of content by the file's name: JSON lines, Parquet table or plain text."""
        return kind_of(self.path)

    @property
    def packing(self) -> Packing:
        """Compression, by the file's name."""
        return packing_of(self.path)


def kind_of(path: str) -> Kind:
    """Return a file's kind of content by its name; plain text for unknown endings."""
    suffix = _suffix_inside(Path(path))
    if suffix in _JSON_LINES:
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "text"


def _suffix_inside(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def find_inputs(words: Sequence[str], tell: Callable[[str], object] | None = None) -> list[InputFile]:
    """Return the files that ``words`` name, in the order of the words.

    A word is a file, a shell pattern (with ``**`` too) or a folder.
    The files of a pattern or folder are sorted by name. A folder means all .jsonl, .json, .ndjson, .txt, .text and
    .parquet files below it, compressed or not. Files that belong to prepared data, finished or not, are input only if
    they are named.

    Args:
        words: words from the command line.
        tell: called with a sentence for each folder from which files of other endings or links to folders are left out.

    Raises:
        DataError: a word matches no file, or a file that another word also matches, that cannot be read or is not text.
    """
    found: list[InputFile] = []
    known: dict[tuple[int, int], str] = {}
    for word in words:
        if not word:
            raise DataError("--input: is empty; give files, patterns or folders")
        paths = _paths(word, tell)
        if not paths:
            raise DataError(f"--input: {word} {_nothing(word)}")
        for path in paths:
            file, identity = _examine(path)
            first = known.setdefault(identity, file.path)
            # Compare paths, too: hard links share an inode, and some file systems use an inode number twice.
            if first is not file.path and os.path.realpath(first) == os.path.realpath(path):
                raise DataError(f"--input: {word} matches {path} again; its documents would be in the output twice")
            found.append(file)
    return found


def means_one_of(output: Path, inputs: Sequence[InputFile]) -> bool:
    """True if writing ``output`` would replace an input."""
    place = os.path.realpath(output)
    return output.exists() and any(os.path.realpath(file.path) == place for file in inputs)


def _paths(word: str, tell: Callable[[str], object] | None) -> list[str]:
    path = os.path.expanduser(word)  # noqa: PTH111 (a Path would lose a slash at the end of a pattern)
    if Path(path).is_dir():
        found, left_out, links = _inside(Path(path))
        if found and (left_out or links) and tell is not None:
            tell(_left_out(word, left_out, links))
        return found
    if glob.has_magic(path) and not Path(path).exists():
        root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(path).parts))
        names = glob.glob(path, recursive=True)  # noqa: PTH207 (patterns may be absolute)
        return sorted(name for name in names if _is_file(Path(name)) and not _is_ours(Path(name), root))
    return [path]


def _is_file(path: Path) -> bool:
    """True for a file, and for a broken link, which must be reported."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _inside(root: Path) -> tuple[list[str], Counter[str], int]:
    """List the input below a folder, and count all other files and links.

    Returns the input files, the number of other files per ending (without hidden files), and of links to folders.

    Raises:
        DataError: a folder cannot be read.
    """
    found: list[str] = []
    left_out: Counter[str] = Counter()
    links = 0

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for place, folders, names in os.walk(root, onerror=refuse):
        folder = Path(place)
        links += sum((folder / name).is_symlink() for name in folders)
        is_hidden = any(part.startswith(".") for part in folder.relative_to(root).parts)
        for name in names:
            path = folder / name
            ending = _suffix_inside(path)
            if ending in _IN_FOLDERS:
                if _is_file(path) and not _is_ours(path, root):
                    found.append(str(path))
            elif not is_hidden and not name.startswith(".") and not (ending in _CACHED or _is_ours(path, root)):
                left_out[ending or "without an ending"] += 1
    return sorted(found), left_out, links


def _left_out(word: str, endings: Counter[str], links: int) -> str:
    by_count = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{count:,} {ending}" for ending, count in by_count[:_MOST_ENDINGS])
    more = ", ..." if len(endings) > _MOST_ENDINGS else ""
    total = endings.total()
    parts = [f"{total:,} {'file' if total == 1 else 'files'} of other endings ({named}{more})"] if total else []
    parts += [f"{links:,} {'link to a folder' if links == 1 else 'links to folders'}"] if links else []
    verb = "is" if total + links == 1 else "are"
    return f"--input: {word}: {' and '.join(parts)} {verb} left out; to read them, name them or give a pattern"


def _is_ours(path: Path, root: Path) -> bool:
    """True if a file belongs to a dataset, a journal or an index cache.

    Only folders below ``root``, the folder that the user named, are considered.
    """
    if path.suffix in (".json", *_DATASET_ENDINGS) and all(path.with_suffix(end).exists() for end in _DATASET_ENDINGS):
        return True
    folders = list(takewhile(lambda folder: folder != root, path.parents))
    if any(folder.name.endswith(".preparing") for folder in folders):
        return True
    caches = [folder for folder in folders if folder.name == "cache"] if path.name.endswith(_DESCRIPTION) else []
    return any(any(folder.parent.glob("*.idx")) for folder in caches)


def _nothing(word: str) -> str:
    if Path(os.path.expanduser(word)).is_dir():  # noqa: PTH111
        return f"holds no file that ends in {', '.join(_IN_FOLDERS)}, compressed or not; name the files"
    return "matches no file; patterns are * ? [..] and ** as in the shell, on the machine that runs this command"


def _examine(path: str) -> tuple[InputFile, tuple[int, int]]:
    """Return the file at ``path``, and the numbers of its device and inode."""
    if kind_of(path) == "parquet" and packing_of(path):
        raise DataError(
            f"{path}: is a Parquet file compressed as a whole, which cannot be read in parts; decompress the file"
        )
    if _ARCHIVES & {_suffix_inside(Path(path)), Path(path).suffix.lower()}:
        raise DataError(f"{path}: is an archive of files; unpack it, and name the resulting folder")
    try:
        with open(path, "rb", buffering=0, opener=_open_nonblocking) as file:  # noqa: PTH123 (the path as given)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(
                    f"{path}: is a pipe or device, but text is read only from files, in parts and again after a kill; "
                    "write the text to a file"
                )
            head = file.read(_HEAD) if kind_of(path) == "text" and not packing_of(path) else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}{_remedy(path)}") from None
    check_is_text(path, head)
    return InputFile(str(Path(path).absolute()), status.st_size, status.st_mtime_ns), (status.st_dev, status.st_ino)


def _remedy(path: str) -> str:
    if path == "-" or path.startswith("/dev/fd/"):
        return "; standard input and pipes are not read: write the text to a file"
    if "://" in path:
        return "; a URL is not a local file: download the data, and give the local path"
    if Path(path).is_symlink():
        return "; it is a broken link: restore its target, or remove the link"
    is_hub_name = path.count("/") == 1 and not Path(path).parent.exists()
    return f"; download a data set of the hub first: hf download --repo-type dataset {path}" if is_hub_name else ""


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, as a pipe would wait, for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def check_is_text(path: str, begins: bytes) -> None:
    """Reject a file whose first bytes are not UTF-8 text.

    Raises:
        DataError: the file is UTF-16 or UTF-32, or holds NUL bytes, as archives, images and compressed files do.
    """
    wide = _wide_encoding(begins)
    if wide:
        raise DataError(f"{path}: is {wide}, not UTF-8; convert it, for example with iconv -f {wide} -t UTF-8")
    if b"\0" in begins[:_HEAD]:
        raise DataError(
            f"{path}: is not text, because it holds NUL bytes; valid are {', '.join(_IN_FOLDERS)} and plain text with "
            f"any other ending, also compressed, if the name ends in {', '.join(PACKINGS)}"
        )


def _wide_encoding(begins: bytes) -> str:
    """Detect UTF-32 or UTF-16 by byte-order mark or alternating NUL bytes; "" for neither."""
    if begins.startswith(_UTF32):
        return "UTF-32"
    halves = begins[: 2 * _LETTERS : 2], begins[1 : 2 * _LETTERS : 2]
    for half, other, name in zip(halves, reversed(halves), ("UTF-16BE", "UTF-16LE"), strict=True):
        # One letter is not enough evidence, except the brace that begins JSON lines.
        if half and not half.strip(b"\0") and b"\0" not in other and (len(other) > 1 or other == b"{"):
            return name
    return "UTF-16" if begins.startswith(_UTF16) else ""
