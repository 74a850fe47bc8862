"""Cases of benchmarks.data_index for both programs. Needs only numpy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SEED, SEQ_LENGTH, VOCAB_SIZE, EOD = 1234, 2048, 50_000, 7
MEAN_LENGTH, SPREAD = 664.0, 1.2
"""Lognormal document lengths: mean in tokens, and standard deviation of the logarithm."""
LONGEST, SHORT_SEQ_PROB = 509, 0.1
"""BERT samples: tokens without special tokens, and the share of short samples."""
SENTENCES = 16.0
"""Mean of the geometric number of sentences per document."""


@dataclass(frozen=True)
class Case:
    """One measured case."""

    kind: str
    """Kind of work: index, blend, resume, mapping or read.

    index builds and saves the index of a run. blend computes the places of all samples, resume that of the last sample.
    mapping computes BERT's samples once. read reads samples, in batches if the program supports batches."""
    prefix: str = ""
    cache: str = ""
    samples: int = 0
    """Samples of the run; 0: one epoch."""
    weights: tuple[float, ...] = ()
    documents: bool = False
    """True to include the bounds that separate documents."""
    positions: bool = False
    """True to reset positions in each document and mask the loss at its end."""


class Stopwatch:
    """CPU time (user + system, all threads), wall time, and memory beyond the imports."""

    def __init__(self) -> None:
        self._resident = peak_mb()
        self.start()

    def start(self) -> None:
        """Restart the clock."""
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def stop(self, passes: int = 1) -> None:
        """Record the cost of one of ``passes`` since ``start``."""
        self.cpu_s, self.wall_s = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self.cpu_s, self.wall_s = self.cpu_s / passes, self.wall_s / passes
        self.memory_mb = peak_mb() - self._resident

    def read(self) -> dict[str, float]:
        """The recorded figures."""
        return {"cpu_s": self.cpu_s, "wall_s": self.wall_s, "memory_mb": self.memory_mb}


def peak_mb() -> float:
    """Peak memory of this program. ru_maxrss would include that of the parent process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def digest(*arrays: npt.NDArray[Any]) -> str:
    return digest_of(arrays)


def digest_of(arrays: Iterable[npt.NDArray[Any]]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def document_lengths(documents: int) -> npt.NDArray[np.int32]:
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, documents)
    return np.clip(drawn, 1, 1_000_000).astype(np.int32)


def documents_of_sentences(documents: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Tokens of each sentence, 24 on average, and bounds of the documents."""
    random = np.random.default_rng(0)
    entries = np.concatenate([[0], np.cumsum(random.geometric(1 / SENTENCES, documents))])
    return np.clip(random.lognormal(3, 0.6, entries[-1]), 1, 512).astype(np.int32), entries


def some_places(case: Case) -> npt.NDArray[np.int64]:
    return np.unique(np.random.default_rng(1).integers(0, case.samples, 2000)).astype(np.int64)


def main(measures: Mapping[str, Callable[[Case, Stopwatch], str]], case: str, answer: Path) -> None:
    """Measure one case, given as JSON, and write the result to the file ``answer``."""
    asked = json.loads(case)
    what = Case(**{**asked, "weights": tuple(asked["weights"])})
    watch = Stopwatch()
    result = measures[what.kind](what, watch)
    answer.write_text(json.dumps({**watch.read(), "result": result}))


def as_json(case: Case) -> str:
    return json.dumps(asdict(case))
