"""``python -m trainer`` in processes forked from the rank server, without importing torch again."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.rank_server import rank_context
from tests.waiting import HANG_S


def run_trainer(*words: str, cwd: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``python -m trainer WORDS``; ``environment`` is its whole environment."""
    with tempfile.TemporaryDirectory(prefix="forked-command-") as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        process = rank_context().Process(target=_be_trainer, args=(words, cwd, dict(environment), out, err))
        process.start()
        process.join(HANG_S)
        code = process.exitcode
        process.kill()
        process.join()
        assert code is not None, f"not done in {HANG_S:g} s: {words}\n{out.read_text()}{err.read_text()}"
        return code, out.read_text(), err.read_text()


def _be_trainer(words: tuple[str, ...], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    from trainer.__main__ import main

    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # The server has cached its own folder for temporary files.
    tempfile.tempdir = None
    sys.exit(main(words))
