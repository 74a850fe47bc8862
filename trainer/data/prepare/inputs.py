"""The files that hold text: which a name or pattern means, and how their bytes are read."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from trainer.data.errors import DataError

Kind = Literal["jsonl", "text", "parquet"]
Packing = Literal["", "gz", "zst", "bz2", "xz"]
_JSON_LINES = (".jsonl", ".json", ".ndjson")
_IN_FOLDERS = (*_JSON_LINES, ".txt", ".text", ".parquet")
"""What is taken of a folder that is named as a whole. Not .md: beside data that is its description."""
_ARCHIVES = {".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".7z", ".rar"}
_PACKINGS: dict[str, Packing] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
_PAIR = (".bin", ".idx")
_CACHED = (".index", ".mapping")
_DESCRIPTION = "description.txt"
"""How Megatron-LM ends the names of what it writes about the indexes in ``cache``."""
_MOST_ENDINGS = 3
"""Of what a folder leaves out so many endings are named."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_LETTERS = 16
"""So many tell UTF-16 without a mark from what happens to hold NUL bytes."""
_HEAD = 4096
_BUFFER = 1 << 20
_PACKED = 4096
"""Bytes of a compressed file that are decompressed at once: few, since a byte may hold thousands."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found.

    Attributes:
        path: absolute.
        size: bytes on the disk.
        mtime_ns: when it was last written.
    """

    path: str
    size: int
    mtime_ns: int

    @property
    def kind(self) -> Kind:
        """What it holds, by its name: JSON lines, a Parquet table, or plain text."""
        return kind_of(self.path)

    @property
    def packing(self) -> Packing:
        """How it is compressed, by its name."""
        return packing_of(self.path)


def kind_of(path: str) -> Kind:
    """What a file of this name holds; of an unknown ending: plain text."""
    suffix = _suffix_inside(Path(path))
    if suffix in _JSON_LINES:
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "text"


def packing_of(path: str) -> Packing:
    """How a file of this name is compressed; "" if it is not."""
    return _PACKINGS.get(Path(path).suffix.lower(), "")


def _suffix_inside(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def find_inputs(words: Sequence[str], tell: Callable[[str], object] | None = None) -> list[InputFile]:
    """The files that ``words`` mean: files, patterns as of the shell (``**`` too) and folders, in this order.

    Those of a pattern or folder come by name; of a folder all .jsonl, .json, .ndjson, .txt, .text and .parquet files
    below it, compressed or not. What prepared data has beside it, unfinished or not, is input only if it is named.

    Args:
        words: as the user gave them.
        tell: is given a sentence for each folder with files of other endings or links to folders, which are no input.

    Raises:
        DataError: a word means no file, or a file that another word means, too, cannot be read or is no text.
    """
    found: list[InputFile] = []
    known: dict[tuple[int, int], str] = {}
    for word in words:
        if not word:
            raise DataError("--input: is empty; name files, patterns or folders")
        paths = _paths(word, tell)
        if not paths:
            raise DataError(f"--input: {word} {_nothing(word)}")
        for path in paths:
            file, identity = _examine(path)
            first = known.setdefault(identity, file.path)
            # A hard link has a name of its own, and some file systems give a number twice.
            if first is not file.path and os.path.realpath(first) == os.path.realpath(path):
                raise DataError(f"--input: {word} means {path} a second time; its documents would be there twice")
            found.append(file)
    return found


def means_one_of(output: Path, inputs: Sequence[InputFile]) -> bool:
    """Whether writing ``output`` would put it in place of an input."""
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
    """Whether it is one, or a link to nothing: what that was to be would be missed by nobody."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _inside(root: Path) -> tuple[list[str], Counter[str], int]:
    """The input below a folder, how many files of each other ending, but for hidden ones, and links to folders.

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
    by_count = sorted(endings.items(), key=lambda one: (-one[1], one[0]))
    named = ", ".join(f"{count:,} {ending}" for ending, count in by_count[:_MOST_ENDINGS])
    more = ", ..." if len(endings) > _MOST_ENDINGS else ""
    total = endings.total()
    parts = [f"{total:,} {'file' if total == 1 else 'files'} of other endings ({named}{more})"] if total else []
    parts += [f"{links:,} {'link to a folder' if links == 1 else 'links to folders'}"] if links else []
    verb = "is" if total + links == 1 else "are"
    return f"--input: {word}: {' and '.join(parts)} {verb} left out; what is named, or meant by a pattern, is read"


def _is_ours(path: Path, root: Path) -> bool:
    """Whether a file belongs to prepared data: to a pair, the journal of a preparation, or a cache of indexes.

    Folders count below ``root`` alone, which was named.
    """
    if path.suffix in (".json", *_PAIR) and all(path.with_suffix(end).exists() for end in _PAIR):
        return True
    folders = list(takewhile(lambda folder: folder != root, path.parents))
    if any(folder.name.endswith(".preparing") for folder in folders):
        return True
    caches = [folder for folder in folders if folder.name == "cache"] if path.name.endswith(_DESCRIPTION) else []
    return any(any(folder.parent.glob("*.idx")) for folder in caches)


def _nothing(word: str) -> str:
    if Path(os.path.expanduser(word)).is_dir():  # noqa: PTH111
        return f"holds no file that ends in {', '.join(_IN_FOLDERS)}, compressed or not; name the files"
    return "matches no file; patterns are * ? [..] and ** as in the shell, on the machine where this runs"


def _examine(path: str) -> tuple[InputFile, tuple[int, int]]:
    """The file at ``path``, and the numbers of its device and inode."""
    if kind_of(path) == "parquet" and packing_of(path):
        raise DataError(
            f"{path}: is Parquet that is compressed as a whole, of which no part can be read; decompress it"
        )
    if _ARCHIVES & {_suffix_inside(Path(path)), Path(path).suffix.lower()}:
        raise DataError(f"{path}: is an archive of files; unpack it, and name its folder")
    try:
        with open(path, "rb", buffering=0, opener=_at_once) as file:  # noqa: PTH123 (the path as it was given)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(
                    f"{path}: is a pipe or device, and text is read from files alone, in parts and again after a kill; "
                    "write it to a file"
                )
            head = file.read(_HEAD) if kind_of(path) == "text" and not packing_of(path) else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}{_remedy(path)}") from None
    check_is_text(path, head)
    return InputFile(str(Path(path).absolute()), status.st_size, status.st_mtime_ns), (status.st_dev, status.st_ino)


def _remedy(path: str) -> str:
    if path == "-" or path.startswith("/dev/fd/"):
        return "; standard input and pipes are not read: write what they give to a file"
    if "://" in path:
        return "; an address is no file of this machine: fetch what is there, and name that"
    if Path(path).is_symlink():
        return "; it is a link to nothing that is there: put it back, or remove the link"
    return ""


def _at_once(path: str, flags: int) -> int:
    """Open it without waiting for who writes into it, as a pipe does."""
    return os.open(path, flags | os.O_NONBLOCK)


def check_is_text(path: str, begins: bytes) -> None:
    """Refuse a file whose first bytes show that it is no text.

    Raises:
        DataError: it is UTF-16, or holds NUL bytes, as archives, images and compressed files do.
    """
    wide = _wide_encoding(begins)
    if wide:
        raise DataError(f"{path}: is {wide}, not UTF-8; convert it, as by iconv -f {wide} -t UTF-8")
    if b"\0" in begins[:_HEAD]:
        raise DataError(
            f"{path}: is no text, as it holds NUL bytes; text is read from {', '.join(_IN_FOLDERS)} and files of any "
            f"other ending that are plain text, also compressed, if the name ends in {', '.join(_PACKINGS)}"
        )


def _wide_encoding(begins: bytes) -> str:
    """UTF-32 or UTF-16, by the mark in front or by letters whose other byte is NUL; "" if it is neither."""
    if begins.startswith(_UTF32):
        return "UTF-32"
    halves = begins[: 2 * _LETTERS : 2], begins[1 : 2 * _LETTERS : 2]
    for half, other, name in zip(halves, reversed(halves), ("UTF-16BE", "UTF-16LE"), strict=True):
        # One letter says little, but for the one that begins JSON lines.
        if half and not half.strip(b"\0") and b"\0" not in other and (len(other) > 1 or other == b"{"):
            return name
    return "UTF-16" if begins.startswith(_UTF16) else ""


class _Unpacked(io.BufferedReader):
    """A decompressed stream that closes its file, too."""

    def __init__(self, stream: io.RawIOBase, file: BinaryIO) -> None:
        super().__init__(stream, _BUFFER)
        self._file = file

    @property
    def position(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        super().close()
        self._file.close()


class _Members(io.RawIOBase):
    """The members of a compressed file, one after another, up to the file's end.

    The streams of bz2 and lzma end at what they do not know behind a member, though another may follow that is damaged,
    and zstandard's does not tell where the last is cut off.

    Args:
        file: the compressed one.
        begin: gives what decompresses the next member.
        padding: bytes that may stand between members.
    """

    def __init__(self, file: BinaryIO, begin: Callable[[], Any], padding: bytes = b"") -> None:
        self._file = file
        self._begin = begin
        self._padding = padding
        self._member: Any = None
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            # Those of bz2 and lzma hold back what was not asked for: little input may be gigabytes of text.
            if not self._packed and getattr(self._member, "needs_input", True):
                self._packed = self._file.read(_PACKED)
                if not self._packed:
                    if self._member is not None:
                        raise EOFError("it ends within compressed data")
                    return 0
            if self._member is None:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    continue
                self._member = self._begin()
            most = (_BUFFER,) if hasattr(self._member, "needs_input") else ()
            self._content = memoryview(self._member.decompress(self._packed, *most))
            self._packed = b""
            if self._member.eof:
                self._packed = self._member.unused_data
                self._member = None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def open_bytes(path: str) -> BinaryIO:
    """The content of ``path``, decompressed, with a buffer of a megabyte.

    Raises:
        DataError: it is compressed by zstd, and the package that reads it is not installed.
        OSError: it cannot be opened.
    """
    packing = packing_of(path)
    file = Path(path).open("rb", buffering=_BUFFER)  # noqa: SIM115 (closed with what is returned)
    if packing == "":
        return file
    try:
        return cast(BinaryIO, _Unpacked(_decompressor(path, packing, file), file))
    except BaseException:
        file.close()
        raise


def bytes_read(stream: BinaryIO) -> int:
    """How many bytes of its file a stream of ``open_bytes`` has read, or a little more."""
    return stream.position if isinstance(stream, _Unpacked) else stream.tell()


def _decompressor(path: str, packing: Packing, file: BinaryIO) -> io.RawIOBase:
    if packing == "gz":
        return cast(io.RawIOBase, gzip.GzipFile(fileobj=file, mode="rb"))
    if packing == "bz2":
        return _Members(file, bz2.BZ2Decompressor)
    if packing == "xz":
        # The .xz File Format 1.2.1, section 2.2: stream padding.
        return _Members(file, lzma.LZMADecompressor, padding=b"\0")
    try:
        import zstandard
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: needs the package zstandard; install it (pip install zstandard), or decompress the file (zstd -d)"
        ) from None
    # 2 GiB: files of `zstd --long=31` cannot be read with less.
    return _Members(file, lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj())


def reading_errors() -> tuple[type[Exception], ...]:
    """What reading raises: of the system, and of decompressors on a damaged or cut-off file."""
    known: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        import zstandard
    except ModuleNotFoundError:
        return known
    return (*known, zstandard.ZstdError)


def unreadable(path: str, error: Exception) -> DataError:
    """What to say of one of ``reading_errors``."""
    packing = packing_of(path)
    is_content = bool(packing) and getattr(error, "errno", None) is None
    remedy = f"; it is damaged, cut off, or no .{packing} at all: get it anew, or rename it" if is_content else ""
    return DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{remedy}")
