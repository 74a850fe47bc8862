"""Words of other programs on the command line, for the messages about them."""

import difflib
from collections.abc import Mapping, Sequence

_ANSWERS = {
    "llmctl submit starts a run": "run launch start",
    "llmctl submit starts a training run": "train pretrain",
    "llmctl submit CONFIG, or llmctl submit -- COMMAND, starts a run": "sbatch qsub",
    "llmctl submit --torchrun -- train.py ARGS starts a program in every rank": "torchrun",
    "llmctl submit -- COMMAND, or llmctl interactive -- COMMAND, runs any program on a cluster": "srun",
    "llmctl interactive opens a shell in the environment of jobs": "shell",
    "llmctl interactive --run RUN opens a shell beside a run": "ssh attach",
    "llmctl list lists runs": "ls history sacct",
    "llmctl status shows the runs that have not ended": "ps jobs queue squeue qstat",
    "llmctl runs rm frees the disk space of a run": "rm remove delete clean prune",
    "llmctl watch shows runs as they go on": "top",
    "llmctl logs -f RUN follows a run": "follow tail",
    "llmctl logs RUN shows the output of a run": "log",
    "llmctl cancel RUN ends a run": "stop kill scancel qdel down",
    "llmctl resume RUN resumes a run from its latest checkpoint": "restart continue",
    "llmctl checkpoint import and llmctl checkpoint export convert models": "convert",
    "llmctl checkpoint import reads a model, llmctl import-script a script": "import",
    "llmctl checkpoint export writes a Hugging Face folder": "export",
    "llmctl evaluate measures a trained model": "eval",
    "llmctl generate continues prompts": "chat",
    "llmctl data prepare tokenizes text": "tokenize preprocess prepare",
    "llmctl nodes shows the nodes of a cluster": "sinfo",
    "llmctl init writes a config": "config",
    "llmctl init writes a config, llmctl clusters new the profile of a cluster": "new",
    "llmctl docs lists the pages of the documentation, llmctl docs PAGE shows one": "doc man manual guide",
    "llmctl --version shows the version": "version",
}

ELSEWHERE: Mapping[str, str] = {word: answer for answer, words in _ANSWERS.items() for word in words.split()}
"""Word -> command that does what other programs mean by the word."""


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Message for a word that names no command: the command that does this, or the nearest one."""
    known = ELSEWHERE.get(word.lower())
    near = difflib.get_close_matches(word, commands, n=1)
    answer = known or (f"did you mean {near[0]}?" if near else "`llmctl --help` lists the commands")
    return f"no command is called {word!r}; {answer}"
