"""Probes of a login node (a shell script, a Python program) and parsers of their output.

Pure. The script's output has sections, so that a command's output or a shell's greeting disturbs no other section.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MARK = "==llmctl-doctor=="
_TIMEOUT_S = 20
"""Limit per command: an overloaded scheduler or a hanging file system must not delay the other commands."""


@dataclass(frozen=True)
class Section:
    """Result of one command: exit status (127 for a missing command) and output."""

    status: int
    text: str


def probe_script(commands: Sequence[tuple[str, str]]) -> str:
    """Build a bash script that runs each command without input, with a time limit.

    Args:
        commands: (section name, shell line); the caller quotes words inside the line.
    """
    lines = [
        # Terse output without colours, in any locale.
        "limit=; command -v timeout >/dev/null 2>&1 && limit='timeout -k 2 " + f"{_TIMEOUT_S}'",
        "section() {",
        f"    printf '\\n{_MARK} %s\\n' \"$1\"",
        '    $limit bash -c "$2" </dev/null 2>&1',
        f"    printf '\\n{_MARK} end %s\\n' \"$?\"",
        "}",
    ]
    lines += [f"section {shlex.quote(name)} {shlex.quote(command)}" for name, command in commands]
    return "\n".join(lines) + "\n"


def parse_sections(output: str) -> dict[str, Section]:
    """Parse the sections in the output of ``probe_script``."""
    found: dict[str, Section] = {}
    name, lines = None, []
    for line in output.splitlines():
        mark, _, rest = line.partition(f"{_MARK} ")
        if mark or not rest:
            lines.append(line)
        elif rest.startswith("end ") and name is not None:
            found[name] = Section(int(rest[4:]) if rest[4:].isdigit() else 1, "\n".join(lines).strip())
            name = None
        else:
            name, lines = rest, []
    return found


@dataclass(frozen=True)
class Quota:
    """One line of ``quota`` or ``lfs quota``; numbers in KiB and files, 0 for no limit."""

    filesystem: str
    used: int
    limit: int
    files: int
    files_limit: int

    @property
    def fullness(self) -> float:
        """Used fraction of the nearer limit, from 0; above 1 is over the limit."""
        parts = [(self.used, self.limit), (self.files, self.files_limit)]
        return max((used / limit for used, limit in parts if limit), default=0.0)


_SUFFIX = {"k": 1, "K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30, "P": 1 << 40}


def parse_quotas(text: str) -> list[Quota]:
    """Parse the table of quota(1) or lfs-quota(1), which have the same columns.

    Columns: file system, blocks, quota, limit, grace, files, quota, limit, grace; blocks in KiB, or with a suffix under
    ``-s``; a ``*`` marks a value over quota; grace may be empty or ``-``. A long name has its own line.
    """
    found = []
    pending = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 1 and words[0].startswith(("/", "nfs")) or (len(words) == 1 and ":" in words[0]):
            pending = words[0]
            continue
        if pending:
            words, pending = [pending, *words], ""
        numbers = [_amount(word) for word in words[1:]]
        if len(words) < 7 or numbers[0] is None or numbers[1] is None or numbers[2] is None:
            continue
        # Grace is a word such as 6days or -, or is absent: the next three numbers are about files.
        rest = [value for value in numbers[3:] if value is not None]
        if len(rest) < 3:
            continue
        found.append(Quota(words[0], numbers[0], numbers[2] or numbers[1], rest[0], rest[2] or rest[1]))
    return found


def _amount(word: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMGTP]?)\*?", word)
    if match is None:
        return None
    return int(float(match[1]) * _SUFFIX.get(match[2], 1))


def parse_interfaces(text: str) -> dict[str, str]:
    """Interface -> its IPv4 address, from ``ip -4 -o addr show``: ``2: eth0    inet 10.0.0.5/24 brd ...``."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"\d+:\s+(\S+?)(?:@\S+)?\s+inet\s+([\d.]+)", line)
        if match:
            found.setdefault(match[1], match[2])
    return found


@dataclass(frozen=True)
class Gpu:
    """One line of ``nvidia-smi --query-gpu=name,driver_version,compute_cap``."""

    name: str
    driver: str
    capability: str | None


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the GPUs listed by nvidia-smi; drivers before 510 do not know compute_cap, and say so in the line."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 2 and re.fullmatch(r"\d+(\.\d+)+", fields[1]):
            capability = fields[2] if len(fields) > 2 and re.fullmatch(r"\d+\.\d+", fields[2]) else None
            found.append(Gpu(fields[0], fields[1], capability))
    return found


PYTHON_PROGRAM = r"""
import json, os, sys, time
facts = {"executable": sys.executable, "version": list(sys.version_info[:3]), "prefix": sys.prefix}
facts["filesystem_encoding"] = sys.getfilesystemencoding()
try:
    from importlib.machinery import PathFinder
    apex = PathFinder.find_spec("apex")
    places = list((apex and apex.submodule_search_locations) or [])
    if places and not any(os.path.isdir(os.path.join(place, "optimizers")) for place in places):
        facts["unrelated_apex"] = places[0]
except Exception as error:
    facts["apex_error"] = str(error)
packages = {}
try:
    from importlib import metadata
    for name in ("numpy", "safetensors", "tokenizers", "pydantic", "pyyaml", "flash-attn", "transformer-engine"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
except ImportError:
    pass
facts["packages"] = packages
started = time.time()
try:
    import torch
    facts["torch"] = torch.__version__
    facts["torch_path"] = os.path.dirname(torch.__file__)
    facts["cuda"] = torch.version.cuda
    facts["hip"] = getattr(torch.version, "hip", None)
    # get_arch_list() is empty without a GPU, as on most login nodes; the flags below are its source.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")
    facts["built_for"] = list(torch.cuda.get_arch_list()) or (flags() or "").split()
    facts["gpus"] = torch.cuda.device_count()
    facts["gpu_works"] = torch.cuda.is_available()
except ImportError as error:
    facts["torch_error"] = str(error)
except Exception as error:
    facts.setdefault("torch_error", "%s: %s" % (type(error).__name__, error))
facts["import_s"] = round(time.time() - started, 1)
print("==llmctl-python== " + json.dumps(facts))
"""
"""Prints facts about a Python and its torch as one line. Runs on any Python 3, so that doctor can report an old one."""


def parse_python(output: str) -> dict[str, Any] | None:
    """Parse the facts in PYTHON_PROGRAM's output, among any other text; None if there are none."""
    for line in output.splitlines():
        _, mark, text = line.partition("==llmctl-python== ")
        if mark:
            try:
                facts = json.loads(text)
            except ValueError:
                return None
            return facts if isinstance(facts, dict) else None
    return None
