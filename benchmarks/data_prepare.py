"""CPU time and memory of data preparation, compared with Megatron-LM's preprocess_data.py.

    python -m benchmarks.data_prepare --gpt2 ~/gpt2 --sentencepiece ~/tokenizer.model --write
    python -m benchmarks.data_prepare --gpt2 ~/gpt2 --megatron ~/Megatron-LM --megatron-python ~/py312/bin/python

~/gpt2 holds GPT-2's vocab.json and merges.txt. Without --input the text is that of benchmarks.debian_text. Memory is
sampled ten times a second from /proc/PID/smaps_rollup of every process. The report has the largest proportional set
size (Pss) of one process, and the largest sums of Pss and of resident set size (Rss) over all processes; the sum of Rss
counts shared memory several times. A further case is a single document of 20 MB. The outputs of both
programs are compared by checksum. Megatron-LM's Python needs megatron-core's requirements, transformers and
sentencepiece. A second run on a day is appended to the first report.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.debian_text import make_text

ROOT = Path(__file__).parents[1]
_LOOK_SECONDS = 0.1
_PAIR = ("o_text_document.bin", "o_text_document.idx")


@dataclass(frozen=True)
class Case:
    """One command and its input."""

    name: str
    program: str
    command: list[str]
    folder: Path
    text_bytes: int
    outputs: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True)
class Found:
    """Cost and output of a run."""

    wall_s: float
    cpu_s: float
    largest_mb: float
    together_mb: float
    resident_mb: float
    sha256: str


def processes_below(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from processes_below(int(child))


def memory_mb(pid: int) -> tuple[float, float]:
    """Proportional set size and resident set size of a process in MB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines[1:]}
    return sizes.get("Pss:", 0.0), sizes.get("Rss:", 0.0)


def run(case: Case) -> Found:
    """Run a case once.

    Raises:
        RuntimeError: the command failed.
    """
    with (case.folder / "log").open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            case.command, cwd=case.folder, env={**os.environ, **case.variables}, stdout=log, stderr=log
        )
        largest = together = resident = 0.0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            each = [memory_mb(one) for one in processes_below(process.pid)]
            largest = max(largest, *(own for own, _ in each))
            together = max(together, sum(own for own, _ in each))
            resident = max(resident, sum(whole for _, whole in each))
            time.sleep(_LOOK_SECONDS)
        wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{case.name}, {case.program}: {(case.folder / 'log').read_text()[-800:]}")
    outputs = [case.folder / name for name in case.outputs]
    return Found(wall, usage.ru_utime + usage.ru_stime, largest, together, resident, digest(outputs))


def digest(files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def ours(name: str, text: Path, folder: Path, tokenizer: list[str], workers: int) -> Case:
    command = [sys.executable, "-m", "trainer", "data", "prepare", str(text), "--output", f"{folder}/o"]
    command += ["--append-eod", "--workers", str(workers), *tokenizer]
    size = text.stat().st_size
    return Case(name, f"ours, {workers} workers", command, folder, size, _PAIR, {"PYTHONPATH": str(ROOT)})


def megatron(name: str, text: Path, folder: Path, tokenizer: list[str], flags: argparse.Namespace) -> Case:
    # The tokenizer loads the model "gpt2" by name even with files given. A folder of that name satisfies it.
    (folder / "gpt2").mkdir()
    (folder / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "gpt2/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    command = [str(flags.megatron_python), str(flags.megatron / "tools/preprocess_data.py"), "--input", str(text)]
    command += ["--output-prefix", f"{folder}/o", "--append-eod", "--workers", "1", *tokenizer]
    places = os.pathsep.join([str(flags.megatron), *flags.megatron_path])
    variables = {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return Case(name, "Megatron-LM, 1 worker", command, folder, text.stat().st_size, _PAIR, variables)


def tokenizer_flags(flags: argparse.Namespace) -> dict[str, list[str]]:
    tokenizers = {}
    if flags.gpt2 is not None:
        files = ["--vocab-file", str(flags.gpt2 / "vocab.json"), "--merge-file", str(flags.gpt2 / "merges.txt")]
        tokenizers["GPT-2 BPE"] = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    if flags.sentencepiece is not None:
        model = ["--tokenizer-model", str(flags.sentencepiece)]
        tokenizers["SentencePiece"] = ["--tokenizer-type", "GPTSentencePieceTokenizer", *model]
    return tokenizers


def cases(flags: argparse.Namespace, text: Path, large: Path | None, long: Path | None, place: Path) -> Iterator[Case]:
    tokenizers = tokenizer_flags(flags)

    def folder() -> Path:
        return Path(tempfile.mkdtemp(dir=place))

    for kind, words in tokenizers.items():
        name = f"{kind}, {text.stat().st_size / 1e6:,.0f} MB"
        for workers in flags.workers:
            yield ours(name, text, folder(), words, workers)
        if large is not None and words is next(iter(tokenizers.values())):
            yield ours(f"{kind}, {large.stat().st_size / 1e6:,.0f} MB", large, folder(), words, 2)
        if flags.megatron is not None:
            yield megatron(name, text, folder(), words, flags)
    if long is not None:
        for kind, words in tokenizers.items():
            yield ours(f"{kind}, one text of {long.stat().st_size / 1e6:,.0f} MB", long, folder(), words, 2)


def repeated(text: Path, size: int, target: Path) -> Path:
    """Repeat ``text`` to ``size`` bytes or more."""
    with target.open("wb") as file:
        while file.tell() < size:
            file.write(text.read_bytes())
    return target


def one_text(text: Path, size: int, target: Path) -> Path:
    """Join the texts of ``text`` to one document of ``size`` bytes or slightly more."""
    texts: list[str] = []
    left = size
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            left -= len(texts[-1].encode())
            if left <= 0:
                break
    target.write_text(json.dumps({"text": "".join(texts)}, ensure_ascii=False) + "\n", encoding="utf-8")
    return target


def table(found: list[tuple[Case, Found]]) -> list[str]:
    titles = ("case", "program", "CPU s", "MB per CPU s", "wall s", "largest process MB", "all MB", "all, Rss, MB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for case, one in found:
        lines.append(
            f"| {case.name} | {case.program} | {one.cpu_s:.1f} | {case.text_bytes / 1e6 / one.cpu_s:.1f} | "
            f"{one.wall_s:.1f} | {one.largest_mb:.0f} | {one.together_mb:.0f} | {one.resident_mb:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--gpt2", type=Path, metavar="FOLDER")
    parser.add_argument("--sentencepiece", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--large", type=int, default=1_000_000_000, metavar="BYTES", help="size of the large case; 0 disables it"
    )
    parser.add_argument(
        "--long", type=int, default=20_000_000, metavar="BYTES", help="size of the single document; 0 disables it"
    )
    parser.add_argument("--megatron", type=Path, metavar="FOLDER", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", type=Path, default=Path(sys.executable), metavar="FILE")
    parser.add_argument("--megatron-path", nargs="+", default=[], metavar="FOLDER", help="folders of further packages")
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = flags.input or make_text(Path.home() / ".cache/llmctl-benchmarks/text")
        large = repeated(text, flags.large, place / "large.jsonl") if flags.large else None
        long = one_text(text, flags.long, place / "long.jsonl") if flags.long else None
        found = []
        today = datetime.datetime.now(datetime.timezone.utc).date()
        target = Path(__file__).with_name("results") / f"data_prepare-{today}.md"
        before = f"{target.read_text()}\n#" if target.exists() else ""
        for case in cases(flags, text, large, long, place):
            found.append((case, run(case)))
            print(table(found)[-1], flush=True)
            if flags.write:
                target.write_text(before + report(text, found))
    print(report(text, found))


def report(text: Path, found: list[tuple[Case, Found]]) -> str:
    sums = {case.name: {one.sha256 for other, one in found if other.name == case.name} for case, _ in found}
    different = [name for name, all_sums in sums.items() if len(all_sums) > 1]
    lines = [
        f"# Preparing data, {datetime.datetime.now(datetime.timezone.utc).date()}",
        "",
        f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs, load average "
        f"{os.getloadavg()[0]:.1f}. Text: {text.name}, sha256 {hashlib.sha256(text.read_bytes()).hexdigest()}.",
        "The larger text repeats the smaller one, which favours caches of words. Under other load, compare CPU time",
        "instead of wall time.",
        f"All programs of a case wrote {'other bytes: ' + ', '.join(different) if different else 'the same bytes'}.",
        "",
        *table(found),
        "",
        *(f"{name}: sha256 of the output {' and '.join(sorted(all_sums))}" for name, all_sums in sums.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
