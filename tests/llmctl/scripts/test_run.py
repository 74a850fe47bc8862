"""Job scripts in real bash, with fake launchers, containers and Python that record their arguments.

Whole scripts of every profile and launcher first; then values that are hard to quote, through every template.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmctl.backends import load_backend
from llmctl.site.job import JobError, JobSpec
from llmctl.site.profile import SCHEDULERS, ClusterProfile, ContainerProfile, EnvironmentProfile
from llmctl.submit.render import RenderedJob, interactive_script
from tests.llmctl.scripts.script_cases import CASES, FOLDERS, IMAGE, RUN_ID, ScriptCase, install, render_case
from tests.waiting import HANG_S

LAUNCHERS = Path(__file__).parents[2] / "standins" / "launchers"
PYTHON = str(LAUNCHERS / "python")
SECRET = "s3cr3t-of-a-user"
HOSTS = ("node1", "node2")
STARTERS = {"slurm": "srun", "sge": "qrsh", "pbs": "pbs_tmrsh", "lsf": "blaunch"}


@dataclass
class Stage:
    """A folder in which one script runs, and the records of the fake programs."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, rendered: RenderedJob, run_dir: Path, *, code: int = 0, arguments: tuple[str, ...] = ()) -> None:
        done = self._run(rendered, run_dir, arguments)
        logs = b"".join(path.read_bytes() for path in run_dir.glob("attempts/1/*.log"))
        assert done.returncode == code, (done.stdout, done.stderr, logs)

    def run_to_end(self, rendered: RenderedJob, run_dir: Path, arguments: tuple[str, ...] = ()) -> int:
        """Run the script; returns its exit code."""
        return self._run(rendered, run_dir, arguments).returncode

    def _run(
        self, rendered: RenderedJob, run_dir: Path, arguments: tuple[str, ...]
    ) -> subprocess.CompletedProcess[bytes]:
        records = self.folder / "records"
        records.mkdir(parents=True)
        install(rendered, run_dir)
        home = self.folder / "home"
        home.mkdir()
        (home / "nodes").write_text("".join(f"{host}\n{host}\n" for host in HOSTS))
        (home / "pe").write_text("".join(f"{host} 1 all.q@{host} UNDEFINED\n" for host in HOSTS))
        environ = {
            "PATH": f"{LAUNCHERS}:/usr/bin:/bin",
            "HOME": str(home),
            "LLMCTL_RECORD": str(records),
            "SLURM_JOB_ID": "4242",
            "SLURM_JOB_NODELIST": ",".join(HOSTS),
            "JOB_ID": "4242",
            "PE_HOSTFILE": str(home / "pe"),
            "SGE_ROOT": "/none",
            "ARC": "none",
            "PBS_JOBID": "4242[7].pbs1",
            "PBS_NODEFILE": str(home / "nodes"),
            "LSB_JOBID": "4242",
            "LSB_MCPU_HOSTS": "".join(f"{host} 4 " for host in HOSTS),
            **self.environ,
        }
        return subprocess.run(
            ["bash", run_dir / "job.sh", *arguments],
            env=environ,
            cwd=home,
            capture_output=True,
            timeout=HANG_S,
            check=False,
        )

    def called(self, name: str) -> list[list[bytes]]:
        paths = sorted((self.folder / "records").glob(f"{name}.*"))
        return [path.read_bytes().split(b"\0")[:-1] for path in paths]

    def environments(self) -> list[dict[bytes, bytes]]:
        return [dict(entry.partition(b"=")[::2] for entry in entries) for entries in self.called("environment")]

    def names(self) -> set[str]:
        return {path.name.partition(".")[0] for path in (self.folder / "records").glob("[a-z]*")}


def write_secret(path: Path, value: str = SECRET) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.fsencode(f"TOKEN\0{value}\0"))
    return path


def run_case(case: ScriptCase, folder: Path) -> None:
    """One script of a bundled profile, from job.sh to the trainer's command line."""
    (folder / "init").mkdir(parents=True)
    (folder / "init" / "modules").write_text("module() { :; }\n")
    profile = case.profile()
    software = profile.environment.model_copy(update={"module_init": str(folder / "init" / "modules"), "setup": ()})
    profile = profile.model_copy(update={"runs_root": str(folder / "runs"), "environment": software})
    is_ssh = profile.scheduler == "ssh"
    job = JobSpec(
        name="gpt",
        # On machines behind ssh each job.sh waits for the others, which the test does not start.
        nodes=1 if is_ssh else 2,
        launcher=case.launcher,
        container=IMAGE if case.in_container else None,
        secrets=("TOKEN",),
    )
    site = profile.container.model_copy(update={"image_folder": str(folder / "images")})
    # The stand-in for "ip" gives every interface an address.
    rendezvous = profile.rendezvous.model_copy(update={"interface": profile.rendezvous.interface or "eth9"})
    profile = profile.model_copy(update={"container": site, "rendezvous": rendezvous})
    secrets = write_secret(folder / "secrets")
    rendered = render_case(profile, job, python=PYTHON, secrets_file=secrets)
    stage = Stage(folder)
    run_dir = folder / "runs" / RUN_ID
    stage.run(rendered, run_dir, arguments=("0",) if is_ssh and case.launcher != "mpirun" else ())
    check_case(case, profile, stage, run_dir, nodes=job.nodes)
    assert not secrets.exists()


def check_case(case: ScriptCase, profile: ClusterProfile, stage: Stage, run_dir: Path, *, nodes: int) -> None:
    resource = profile.resource_types.get(profile.defaults.resource_type or "")
    ranks = resource.gpus if resource is not None and resource.gpus else 4
    command, environment = stage.called("python")[0], stage.environments()[0]
    port = environment[b"MASTER_PORT"].decode()
    low, high = profile.rendezvous.ports
    assert low <= int(port) <= high
    trainer = [b"-m", b"trainer", b"pretrain", b"--config", os.fsencode(run_dir / "config.yaml")]
    assert command[-5:] == trainer
    if case.launcher == "torchrun":
        options = dict(zip(command[2:-5:2], command[3:-5:2], strict=True))
        assert command[:2] == [b"-m", b"torch.distributed.run"]
        assert (options[b"--nnodes"], options[b"--nproc-per-node"]) == (str(nodes).encode(), str(ranks).encode())
        assert (options[b"--master-addr"], options[b"--master-port"]) == (b"10.0.0.1", port.encode())
    else:
        assert command == trainer
    for name, value in {**profile.env, "TOKEN": SECRET, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port}.items():
        assert environment[name.encode()] == os.fsencode(value)
    hostfile = (run_dir / "attempts" / "1" / "hostfile").read_text()
    assert hostfile == "".join(f"{host} slots={ranks}\n" for host in HOSTS[:nodes])
    assert json.loads((run_dir / "attempts" / "1" / "exit.json").read_text())["reason"] == "completed"
    started = json.loads((run_dir / "attempts" / "1" / "started.json").read_text())
    known = {"slurm": "4242", "sge": "4242", "pbs": "4242.pbs1", "lsf": "4242"}
    assert profile.scheduler == "ssh" or started["job_id"] == known[profile.scheduler]
    starter = "mpirun" if case.launcher == "mpirun" else STARTERS.get(profile.scheduler)
    assert starter is None or starter in stage.names()
    if case.launcher == "mpirun":
        (words,) = stage.called("mpirun")
        assert words[words.index(b"-np") + 1] == str(nodes * ranks).encode()
        assert words[words.index(b"-hostfile") + 1] == os.fsencode(run_dir / "attempts" / "1" / "hostfile")
    if case.in_container and profile.container.runtime != "pyxis":
        assert profile.container.runtime in stage.names()
    if case.in_container and profile.container.runtime == "pyxis" and case.launcher != "mpirun":
        assert [word for word in stage.called("srun")[0] if word.startswith(b"--container-image=")]
    given = b"\0".join(
        word for name in stage.names() - {"environment"} for words in stage.called(name) for word in words
    )
    assert SECRET.encode() not in given


def test_every_script_starts_the_trainer_on_the_first_node(tmp_path):
    """Many scripts at once, because a script mostly waits."""

    def outcome(case: ScriptCase) -> str:
        try:
            run_case(case, tmp_path / str(case))
        except Exception as error:  # noqa: BLE001 (all failures are reported together)
            return f"{case}: {type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(6) as pool:
        problems = [problem for problem in pool.map(outcome, CASES) if problem]
    assert not problems, "\n\n".join(problems)


PIECES = [
    *"'\"`$\\!#&|;<>()[]{}*?~=%^ \t\n\r\x01\x7f-",
    *("$(touch pwned)", "`touch pwned`", "${HOME}", "$HOME", "'$(touch pwned)'", "\n\n", "--", "-n", "-rf", "{a,b}"),
    *("{{ 7 * 7 }}", "{% raw %}", "{*", "*}", "é", "日本", "\u2028", "\udcff", "\udc80\udcfe"),
    *("%s", "\\n", "\\\n", "EOF"),
]
# Some have the names of variables of the scripts.
NAMES = [
    *("attempt_dir", "run_dir", "container", "container_options", "hosts", "secrets", "command", "nodes", "node"),
    *("code", "name", "value", "signal", "agents", "attempt", "options", "inside", "status", "pid", "words", "python"),
    *("X", "_y"),
]
ROUNDS = 2
WORDS = 24


def hostile(rng: random.Random, *, without: str = "") -> str:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(7)))
    return "".join(letter for letter in text if letter not in without)


def hostile_text(rng: random.Random, *, without: str = "") -> str:
    """Text that a profile can hold, without undecodable bytes."""
    return hostile(rng, without=without + "\udcff\udc80\udcfe")


def hostile_folder(rng: random.Random) -> str:
    """A path's component with characters that runs_root may have (see submit/checks/site.py)."""
    text = hostile_text(rng, without=":/\n\r\t\x01\x7f\u2028")
    return f"{rng.choice('- ~*')}{text}"


@dataclass(frozen=True)
class HostileCase:
    """One script full of hostile values."""

    scheduler: str
    launcher: str
    runtime: str | None
    seed: int

    def run(self, folder: Path) -> int:
        """Number of values that came back unchanged; fails if a value changed."""
        rng = random.Random(f"{self}")
        place = folder / hostile_folder(rng)
        arguments = [hostile(rng) for _ in range(WORDS)]
        env = {name: hostile(rng) for name in rng.sample(NAMES, 12)}
        site_env = {f"SITE_{number}": hostile_text(rng) for number in range(4)}
        secret = f"{SECRET}{hostile(rng)}"
        working = place / f"w{hostile(rng, without='/')}"
        image = str(place / "image.sif") if self.runtime != "pyxis" else "./image.sqsh"
        venv = place / "venv"
        venv.joinpath("bin").mkdir(parents=True)
        (venv / "bin" / "activate").write_text("")
        working.mkdir()
        module = hostile_text(rng)
        (folder / "modules").write_text('module() { printf "%s\\0" "$@" >>"$LLMCTL_RECORD/module.0"; }\n')
        profile = ClusterProfile(
            name="site",
            scheduler=self.scheduler,
            runs_root=str(place),
            hosts=HOSTS,
            env=site_env,
            environment=EnvironmentProfile(
                kind="venv", path=str(venv), modules=(module,), module_init=str(folder / "modules")
            ),
            container=ContainerProfile(runtime=self.runtime),
        )
        job = JobSpec(
            name="c",
            nodes=1,
            launcher=self.launcher,
            env=tuple(env.items()),
            secrets=("TOKEN",),
            command=(PYTHON, *arguments),
            container=image if self.runtime else None,
            mounts=(f"{place}:/data",) if self.runtime else (),
        )
        secrets = write_secret(place / "secrets" / f"s{hostile(rng, without='/')}", secret)
        rendered = render_case(profile, job, working_dir=working, secrets_file=secrets, ranks_per_node=1, python=PYTHON)
        files = {"PE_HOSTFILE": "/none", "PBS_NODEFILE": str(folder / "one"), "LSB_MCPU_HOSTS": "node1 4"}
        (folder / "one").write_text("node1\n")
        stage = Stage(folder, {"SLURM_JOB_NODELIST": "node1", **files})
        is_part = self.scheduler == "ssh" and self.launcher != "mpirun"
        stage.run(rendered, place / RUN_ID, arguments=("0",) if is_part else ())
        assert stage.called("python")[0] == [os.fsencode(word) for word in arguments]
        got = stage.environments()[0]
        wanted = {**site_env, **env, "TOKEN": secret, "LLMCTL_RUN_DIR": str(place / RUN_ID), "PWD": str(working)}
        for name, value in wanted.items():
            assert got[name.encode()] == os.fsencode(value), name
        assert stage.called("module")[-1] == [b"load", os.fsencode(module)] * (len(stage.called("module")[-1]) // 2)
        if self.runtime is not None:
            words = [word for name in ("srun", self.runtime) for call in stage.called(name) for word in call]
            assert [word for word in words if os.fsencode(f"{place}:/data") in word]
        for path in [*place.rglob("*"), *folder.glob("records/*")]:
            if path.is_file() and path != secrets and not path.name.startswith("environment."):
                assert SECRET.encode() not in path.read_bytes(), path
        assert not [path for path in folder.rglob("pwned")]
        return len(arguments) + len(wanted) + 3


def hostile_cases() -> Iterator[HostileCase]:
    runtimes = {"slurm": (None, "pyxis", "enroot"), "pbs": (None, "singularity"), "sge": (None, "apptainer")}
    for scheduler in SCHEDULERS:
        for launcher in load_backend(scheduler).launchers:
            for runtime in runtimes.get(scheduler, (None,)):
                if runtime != "pyxis" or launcher != "mpirun":
                    yield from (HostileCase(scheduler, launcher, runtime, seed) for seed in range(ROUNDS))


def test_a_thousand_values_come_back_unchanged(tmp_path):
    def outcome(numbered: tuple[int, HostileCase]) -> int | str:
        number, case = numbered
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            return case.run(folder)
        except Exception as error:  # noqa: BLE001
            return f"{case}: {type(error).__name__}: {error}"

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(outcome, enumerate(hostile_cases())))
    problems = [one for one in outcomes if isinstance(one, str)]
    assert not problems, "\n\n".join(problems)
    assert sum(one for one in outcomes if isinstance(one, int)) >= 1000


@pytest.mark.parametrize("runtime", [None, "pyxis", "apptainer", "enroot"])
@pytest.mark.parametrize("seed", range(3))
def test_interactive_passes_every_value_on(tmp_path, runtime, seed):
    from llmctl.site.container import ContainerPlan

    rng = random.Random(f"{runtime} {seed}")
    arguments = [hostile(rng) for _ in range(WORDS)]
    env = {name: hostile(rng) for name in rng.sample(NAMES, 12)}
    place = tmp_path / hostile_folder(rng)
    (tmp_path / "records").mkdir()
    from_site = hostile_text(rng)
    profile = ClusterProfile(name="site", scheduler="slurm", runs_root=str(place), env={"SITE": from_site})
    site = ContainerProfile(runtime=runtime)
    container = ContainerPlan(runtime, "/image.sqsh", None, (f"{place}:/data",), site) if runtime else None
    script = interactive_script(
        profile,
        FOLDERS,
        PYTHON,
        on_cpu=True,
        run_id=RUN_ID,
        run_dir=place,
        env=tuple(env.items()),
        container=container,
    )
    subprocess.run(
        ["bash", "-c", os.fsencode(script), "bash", *(["bash", "-c", 'exec "$@"', "bash"] if runtime else []), PYTHON]
        + [os.fsencode(word) for word in arguments],
        env={"PATH": f"{LAUNCHERS}:/usr/bin:/bin", "HOME": str(tmp_path), "LLMCTL_RECORD": str(tmp_path / "records")},
        cwd=tmp_path,
        timeout=HANG_S,
        check=True,
    )
    stage = Stage(tmp_path)
    assert stage.called("python") == [[os.fsencode(word) for word in arguments]]
    (got,) = stage.environments()
    own = {"LLMCTL_RUN_DIR": str(place), "LLMCTL_INTERACTIVE": "1", "OMP_NUM_THREADS": "1", "SITE": from_site}
    for name, value in {**env, **own}.items():
        assert got[name.encode()] == os.fsencode(value), name
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("values", [{"env": (("X", "a\0b"),)}, {"command": ("echo", "a\0b")}])
def test_a_nul_is_refused(values):
    with pytest.raises(JobError, match="NUL"):
        JobSpec(name="x", **values)
