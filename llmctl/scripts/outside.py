"""Variables that a shell, a scheduler, a launcher or the user sets: their meaning for a script that is only read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmctl.scripts.shell.folders import here
from llmctl.scripts.shell.values import NOT_SET, Chunk, Missing, Value, absent, plain, text_of, words_of
from trainer.config.paths.variables import PATH_KEYS, may_be_secret
from trainer.planning.command_line import UsageError, parse_command_line

_HERE = frozenset(("PWD", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "SGE_O_WORKDIR", "LS_SUBCWD", "PJM_O_WORKDIR"))
_NODES = frozenset(("NHOSTS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PJM_NODE"))
_GPUS = frozenset(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
_RANKS = frozenset(("SLURM_NTASKS", "SLURM_NPROCS"))
_FIRST_RANK = frozenset(
    (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "PMI_RANK"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PBS_NODENUM", "PMIX_RANK"),
    )
)
_IN_JOB = re.compile(
    r"MASTER_(ADDR|PORT)|WORLD_SIZE|LOCAL_WORLD_SIZE|JOB_(ID|NAME)|PE_HOSTFILE|NSLOTS|HOST(NAME)?|USER|LOGNAME|TMPDIR"
    r"|(SLURM|SGE|PBS|LSB|LSF|PJM|OMPI|PMI|PMIX|PALS|FLUX|COBALT)_\w+|PATH|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH"
    r"|CPATH|PYTHONPATH|MANPATH|CUDA_(HOME|PATH|ROOT)|SHELL|LANG|EDITOR|RANDOM|SECONDS|EPOCHSECONDS|UID|PPID|\$|!|_"
)


@dataclass(frozen=True)
class JobSize:
    """Size of a script's job, as far as its directives say.

    Attributes:
        nodes: number of nodes; None if unknown.
        gpus: GPUs, or ranks, of a node; None if unknown.
    """

    nodes: int | None = None
    gpus: int | None = None


def outside_value(name: str, line: int, size: JobSize, script: str) -> Value | None:
    """The value of a variable that no line of the script sets; None if nothing sets it.

    Args:
        name: of the variable.
        line: line that uses the variable.
        size: of the job.
        script: name of the script's file, for ``$0``.
    """
    if name == "HOME":
        return plain("~", line)
    if name in _HERE:
        return here(line)
    if name in ("0", "BASH_SOURCE"):
        return plain(f"./{script}", line)
    if name == "?":
        return plain("0", line)
    if name in _FIRST_RANK:
        return absent(Missing(line, f"${name}", "is the number of a rank or node", name, stand_in="0"))
    for names, number, what in (
        (_NODES, size.nodes, "the number of nodes"),
        (_GPUS, size.gpus, "the number of ranks of a node"),
        (_RANKS, size.nodes * size.gpus if size.nodes and size.gpus else None, "the number of ranks"),
    ):
        if name in names:
            why = f"is {what}, which no directive of the script gives"
            return plain(str(number), line) if number else absent(Missing(line, f"${name}", why, name))
    if _IN_JOB.fullmatch(name):
        return absent(Missing(line, f"${name}", "is known only inside the job", name))
    return None


@dataclass(frozen=True)
class Surroundings:
    """The environment in which a script is read, as bash passes it on to the script.

    Attributes:
        environment: variables and their values.
        taken: line, variable and sentence of each one whose value the training line uses.
        kept: the same of each one that stays a variable.
    """

    environment: Mapping[str, str]
    taken: list[tuple[int, str, str]] = field(default_factory=list)
    kept: list[tuple[int, str, str]] = field(default_factory=list)

    def fill_in(self, words: Sequence[Value]) -> list[Value]:
        """The words of a training line, in which the variables that only the environment sets have their values.

        An absolute path stays a variable, in the config: the run may be submitted to another machine.
        """
        found: list[Value] = []
        is_path = False
        for word in words:
            text = text_of(word)
            if text.startswith("--"):
                is_path = _takes_a_path(text.partition("=")[0])
            found += words_of(self._filled(chunk, is_path=is_path) for chunk in word)
        return found

    def fill_in_folder(self, folder: Value) -> Value:
        """The folder of a training line, as ``fill_in``."""
        return tuple(self._filled(chunk, is_path=True) for chunk in folder)

    def _filled(self, chunk: Chunk, *, is_path: bool) -> Chunk:
        missing = chunk.missing
        if missing is None or missing.why != NOT_SET or may_be_secret(missing.name):
            return chunk
        value = self.environment.get(missing.name)
        if not value:
            return chunk
        stays = is_path and value.startswith(("/", "~"))
        told = "is set there, and stays a variable of the config" if stays else f"is {value!r} in the environment"
        sentence, place = (missing.line, f"${missing.name}", told), self.kept if stays else self.taken
        if sentence not in place:
            place.append(sentence)
        if stays:
            return replace(chunk, text=f"${{{missing.name}}}", missing=None, divides=False)
        return replace(chunk, text=value, missing=None)


def _takes_a_path(flag: str) -> bool:
    try:
        keys = parse_command_line([flag, "/x"]).values.keys()
    except UsageError:
        return False
    return bool(keys) and keys <= PATH_KEYS
