"""A script under bash in a sandbox: the programs that it starts are recorded, and none of them runs.

Linux namespaces keep the script from the network and from the files of this machine. Launchers, containers and Python
are replaced by ``recorder.sh``.
"""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork")
_LIMIT_S = 40
JOB, HOME = "/job", "/home/user"
"""Folders of a sandbox: the repository, and the user's own."""
STUBS = (
    *("torchrun", "python", "python3", "pip", "pip3", "mpirun", "mpiexec", "mpiexec.hydra", "mpirun_rsh"),
    *("orterun", "srun", "deepspeed", "singularity", "apptainer", "docker", "podman", "sbatch", "qsub"),
    *("squeue", "scontrol", "sinfo", "qstat", "ssh", "pdsh", "scp", "rsync", "module", "ml", "conda", "mamba"),
    *("spack", "wget", "curl", "git", "gsutil", "aws", "azcopy", "rocm-smi", "accelerate", "aprun", "nsys"),
    *("numactl", "taskset", "sudo", "uv", "wandb", "huggingface-cli", "ray", "ifconfig", "ibdev2netdev"),
)


@dataclass(frozen=True)
class Start:
    """One start of a script.

    Attributes:
        repository: folder with the script, of which the sandbox has a copy.
        script: path in the repository.
        folder: in which bash starts, as a path in the repository.
        arguments: of the script.
        environment: variables.
        changed: path in the repository -> another text.
        folders: further folders, by path in the sandbox.
        files: further empty files.
        programs: further programs, which are recorded.
        links: path in the sandbox -> file of the repository.
        gpus: number of GPUs that ``nvidia-smi`` lists.
        now: the time that ``date`` prints.
    """

    repository: Path
    script: str
    folder: str
    now: datetime
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    programs: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0


@dataclass(frozen=True)
class Recorded:
    """Result of a start.

    Attributes:
        commands: folder, program and words of each recorded command, in their order.
        errors: text on the standard error.
    """

    commands: tuple[tuple[str, ...], ...]
    errors: str


def folder_in_sandbox(folder: str) -> str:
    """The place of a folder of the repository."""
    return JOB if folder in ("", ".") else f"{JOB}/{folder}"


def is_available() -> bool:
    """True if this machine lets a user have namespaces of their own."""
    if any(shutil.which(name) is None for name in ("unshare", "pivot_root", "setpriv", "tar", "mount")):
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = [*_UNSHARE, "mount", "-t", "tmpfs", "none", folder]
        return subprocess.run(tried, capture_output=True, check=False, timeout=_LIMIT_S).returncode == 0


def record(start: Start) -> Recorded:
    """Run a script in a sandbox.

    Raises:
        RuntimeError: the sandbox cannot be set up.
        TimeoutError: the script does not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        root, inputs = Path(folder) / "root", Path(folder) / "input"
        root.mkdir()
        _write_inputs(start, inputs)
        command = [*_UNSHARE, "--kill-child", "bash", str(_HERE / "sandbox_root.sh"), str(root), str(inputs)]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{start.script} does not end within {_LIMIT_S} s") from None
    if done.returncode:
        raise RuntimeError(f"the sandbox ends with {done.returncode}: {done.stderr.decode()[-300:]}")
    return _recorded(done.stdout)


def _recorded(archive: bytes) -> Recorded:
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        for member in found.getmembers():
            content = found.extractfile(member)
            texts[member.name.removeprefix("./")] = content.read().decode("utf-8", "replace") if content else ""
    errors = texts.pop("errors", "")
    commands = [tuple(text.split("\0")[:-1]) for name, text in sorted(texts.items()) if name != "." and text]
    return Recorded(tuple(commands), errors)


def _write_inputs(start: Start, inputs: Path) -> None:
    for name in ("over", "stubs"):
        (inputs / name).mkdir(parents=True)
    (inputs / "job").symlink_to(start.repository.resolve())
    for path, text in start.changed.items():
        (inputs / "over" / path).parent.mkdir(parents=True, exist_ok=True)
        (inputs / "over" / path).write_text(text, encoding="utf-8", errors="surrogateescape")
    shutil.copy(_HERE / "recorder.sh", inputs / "stubs/recorder")
    (inputs / "stubs/recorder").chmod(0o755)
    for name in (*STUBS, *(one for one in start.programs if "/" not in one)):
        if not (inputs / "stubs" / name).is_symlink():
            (inputs / "stubs" / name).symlink_to("/usr/local/bin/recorder")
    for name, command in (
        ("date", f'exec /usr/bin/date -d @{start.now.timestamp():.0f} "$@"'),
        ("sleep", "exit 0"),
        ("hostname", "echo node1"),
        ("nvidia-smi", f"for ((gpu = 0; gpu < {start.gpus}; gpu++)); do echo GPU $gpu; done"),
    ):
        (inputs / "stubs" / name).write_text(f"#!/bin/bash\n{command}\n", encoding="utf-8")
        (inputs / "stubs" / name).chmod(0o755)
    (inputs / "start").write_text(_start_text(start), encoding="utf-8")


def _start_text(start: Start) -> str:
    """Commands that make the script's surroundings, and start the script."""
    lines = [f"cd {shlex.quote(folder_in_sandbox(start.folder))}"]
    lines += [f"mkdir -p -- {shlex.quote(one)}" for one in sorted(start.folders)]
    for path, target in start.links.items():
        linked = f"ln -s {shlex.quote(f'{JOB}/{target}')} {shlex.quote(path)}"
        lines.append(f'mkdir -p -- "$(dirname -- {shlex.quote(path)})"; {linked}')
    for path, program in [*((one, "") for one in start.files), *((one, "yes") for one in start.programs if "/" in one)]:
        # A relative path is below a folder of the script, nobody knows which.
        for below in ["", *sorted(start.folders)] if not path.startswith("/") else [""]:
            place = shlex.quote(f"{below}/{path}" if below else path)
            made = f"ln -sf /usr/local/bin/recorder {place}" if program else f"[ -e {place} ] || : > {place}"
            lines.append(f'mkdir -p -- "$(dirname -- {place})"; {made}')
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "USER": "user", "TERM": "xterm"}
    # Limits of this machine are not those of a cluster.
    own |= {"BASH_FUNC_ulimit%%": "() { :; }", **start.environment}
    pairs = [shlex.quote(f"{name}={value}") for name, value in own.items()]
    words = [shlex.quote(word) for word in (_shown(start), *start.arguments)]
    return "\n".join([*lines, f"exec env -i {' '.join(pairs)} timeout 20 bash {' '.join(words)}"]) + "\n"


def _shown(start: Start) -> str:
    """The script from the folder in which bash starts, as a user writes the path."""
    inside = Path(start.script).relative_to(start.folder or ".")
    return f"./{inside}"
