"""Import of a registry image, once for all nodes."""

import fcntl
import os
import stat
import subprocess
import sys
from contextlib import suppress
from typing import Dict, List, Mapping

from .trust import OTHERS_WRITE, TrustError, check_file, check_root

_PREFIX = {"apptainer": ("APPTAINER", "SINGULARITY"), "singularity": ("SINGULARITY",)}
_END_BYTES = 4096


def import_image(runtime: str, source: str, target: str, environ: Mapping[str, str]) -> int:
    """Import an image unless the file exists.

    If two jobs of a user import the same image, the second job waits for the first.

    Args:
        runtime: pyxis, enroot, apptainer or singularity.
        source: the image, in the syntax of enroot import or apptainer pull.
        target: path of the image file.
        environ: environment of the job.

    Returns:
        0, or 1 after a message on standard error.
    """
    folder = os.path.dirname(target)
    _close(folder)
    if os.path.exists(target):
        return _check_owner(target)
    # Each user has a separate lock and unfinished image: the folder may belong to a group.
    own = f"{target}.{os.getuid()}"
    aside = f"{own}.new"
    why = ""
    try:
        os.makedirs(folder, exist_ok=True)
        _close(folder)
        print(f"llmctl: importing {source} to {target}", file=sys.stderr, flush=True)
        with open(f"{own}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(target):
                # Write aside, then rename: nobody sees half an image. The tools refuse to overwrite a file.
                with suppress(FileNotFoundError):
                    os.unlink(aside)
                is_enroot = runtime in ("pyxis", "enroot")
                argv = ["enroot", "import", "--output"] if is_enroot else [runtime, "pull"]
                why = _fetch([*argv, aside, source], _beside_images(runtime, folder, environ))
                # Another user may have imported the image meanwhile.
                if os.path.exists(target):
                    os.unlink(aside)
                elif not why:
                    os.chmod(aside, os.stat(aside).st_mode & 0o755)
                    os.rename(aside, target)
    except OSError as error:
        why = f"{error.filename or runtime}: {error.strerror}"
    if os.path.exists(target):
        return _check_owner(target)
    print(f"llmctl: {source} cannot be imported to {target}: {why}", file=sys.stderr)
    return 1


def _fetch(argv: List[str], environ: Mapping[str, str]) -> str:
    """Run the tool that fetches an image; returns why it failed, with its last line; empty after success."""
    end = b""
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output = process.stdout
        assert output is not None
        for piece in iter(lambda: os.read(output.fileno(), 65536), b""):
            # All of it stands in the job's log at once, as an import may take long.
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            end = (end + piece)[-_END_BYTES:]
    if process.returncode == 0:
        return ""
    how = f"ended with exit code {process.returncode}"
    if process.returncode < 0:
        how = f"was ended by signal {-process.returncode}"
    said = [line.strip() for line in end.decode(errors="replace").splitlines() if line.strip()]
    return f"{argv[0]} {argv[1]} {how}" + (f" and the last line {said[-1][:200]!r}" if said else "")


def _close(folder: str) -> None:
    """Keep others from replacing images in a folder of this user; the group may still add images."""
    with suppress(OSError):
        facts = os.stat(folder)
        if facts.st_uid == os.getuid() and facts.st_mode & OTHERS_WRITE:
            os.chmod(folder, stat.S_IMODE(facts.st_mode) | stat.S_ISVTX)


def _check_owner(target: str) -> int:
    """0 if only this user or root can have written an image, else 1 after a message: a job runs what is in it."""
    try:
        check_root(os.path.dirname(os.path.realpath(target)))
        check_file(os.path.realpath(target))
    except TrustError as error:
        print(
            f"llmctl: {target} is not used: {error}; set container.image_folder of the profile to a folder of your own",
            file=sys.stderr,
        )
        return 1
    return 0


def _beside_images(runtime: str, folder: str, environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of an import, with caches and scratch files beside the images.

    Both take tens of GB. By default they lie in the home directory and in /tmp.
    """
    cache = f"{folder}/.cache.{os.getuid()}"
    os.makedirs(f"{cache}/tmp", exist_ok=True)
    scratch = environ.get("TMPDIR") or "/tmp"
    if scratch.startswith("/tmp"):
        scratch = f"{cache}/tmp"
    if runtime in ("pyxis", "enroot"):
        return {"ENROOT_CACHE_PATH": cache, "ENROOT_TEMP_PATH": scratch, **environ}
    # apptainer reads the SINGULARITY_ names where the APPTAINER_ names are not set.
    prefixes = _PREFIX[runtime]
    own = {f"{prefixes[0]}_CACHEDIR": cache, f"{prefixes[0]}_TMPDIR": scratch}
    for kind in ("CACHEDIR", "TMPDIR"):
        given = [environ[name] for name in (f"{prefix}_{kind}" for prefix in prefixes) if environ.get(name)]
        if given:
            own[f"{prefixes[0]}_{kind}"] = given[0]
    return {**environ, **own}
