"""Real text as JSON lines from Debian's documentation: English, Japanese, Chinese, Korean, and code.

    python -m benchmarks.debian_text FOLDER        # needs apt-get and dpkg-deb; about 75 MB to download, no root

Files are unmodified and ordered by package and name, so that a Debian release always gives the same text.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "linux-doc-6.1",
    "python3.11-doc",
    "manpages-ja",
    "manpages",
    "manpages-dev",
    "debian-reference-ja",
    "perl-doc",
    "git-doc",
)
_TEXTS = ("*.pod", "*.rst.gz", "*.txt.gz", "*.rst.txt", "*.txt", "man/**/*.gz", "doc/**/*.ja.txt.gz")
TARGET_BYTES = 100_000_000


def make_text(folder: Path) -> Path:
    """Make ``folder``/debian.jsonl of at most 100 MB, unless it exists.

    Raises:
        subprocess.CalledProcessError: a package cannot be downloaded.
    """
    target = folder / "debian.jsonl"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "-qq", "download", package], cwd=folder, check=True)
        (found,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", found, folder / package], check=True)
    partial = target.with_suffix(".partial")
    size = 0
    with partial.open("w", encoding="utf-8") as file:
        for path, text in _texts(folder):
            line = json.dumps({"text": text, "source": str(path.relative_to(folder))}, ensure_ascii=False) + "\n"
            size += len(line.encode())
            if size > TARGET_BYTES:
                break
            file.write(line)
    partial.rename(target)
    return target


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        root = folder / package / "usr/share"
        for path in sorted({path for pattern in _TEXTS for path in root.rglob(pattern)}):
            if not path.is_file() or path.is_symlink():
                continue
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield path, text


if __name__ == "__main__":
    print(make_text(Path(sys.argv[1])))
