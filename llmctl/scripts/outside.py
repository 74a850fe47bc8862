"""Variables that a shell, a scheduler, a launcher or the user sets: their meaning for a script that is only read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmctl.scripts.shell.folders import here
from llmctl.scripts.shell.values import Chunk, Missing, Value, absent, plain, text_of
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
        used: variable that the script uses and does not set -> the first line that does.
        kept: those of them that stay variables.
    """

    environment: Mapping[str, str]
    used: dict[str, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    def value_of(self, name: str, line: int) -> Value | None:
        """The value of a variable that no line of the script sets; None without one, or for a secret."""
        value = self.environment.get(name)
        if not value or may_be_secret(name):
            return None
        self.used.setdefault(name, line)
        return (Chunk(value, line, quoted=True, source=name),)

    def words(self, words: Sequence[Value]) -> list[Value]:
        """The words of a training line, with variables for the absolute paths that the environment has.

        The run may be submitted to another machine.
        """
        found: list[Value] = []
        is_path = False
        for word in words:
            if text_of(word).startswith("--"):
                is_path = _takes_a_path(text_of(word).partition("=")[0])
            found.append(self.folder(word) if is_path else word)
        return found

    def folder(self, path: Value) -> Value:
        """A path, with variables for the absolute paths in it that the environment has."""
        return tuple(self._kept(chunk) for chunk in path)

    def _kept(self, chunk: Chunk) -> Chunk:
        is_whole = bool(chunk.source) and chunk.text == self.environment[chunk.source]
        if not is_whole or not chunk.text.startswith(("/", "~")):
            return chunk
        self.kept.add(chunk.source)
        return replace(chunk, text=f"${{{chunk.source}}}")

    def told(self) -> list[tuple[int, str, str]]:
        """Line, variable and sentence for each one that the script uses, without its value, which may be secret."""
        paths = "; paths of the config keep the variable"
        return [
            (line, f"${name}", f"has the value of the environment{paths if name in self.kept else ''}")
            for name, line in self.used.items()
        ]


def _takes_a_path(flag: str) -> bool:
    try:
        keys = parse_command_line([flag, "/x"]).values.keys()
    except UsageError:
        return False
    return bool(keys) and keys <= PATH_KEYS
