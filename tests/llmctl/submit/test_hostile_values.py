"""Values that a scheduler or a shell could misread: refused, or printed so that bash reads the same value."""

import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmctl.backends import load_queue_backend
from llmctl.backends.base import JobRequest
from llmctl.cli.main import main
from llmctl.errors import ProfileError, SchedulerError
from llmctl.paths import CLUSTER_NAME
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RUN_ID
from llmctl.site.job import NAME, VARIABLE, WORD, JobError, JobSpec
from llmctl.site.overlay_file import changed_text
from llmctl.site.profile import (
    SCHEDULERS,
    ClusterProfile,
    DefaultsProfile,
    EnvironmentProfile,
    LaunchProfile,
    ResourceType,
    profile_of,
)
from tests.llmctl.run_directories import make_run
from tests.llmctl.scripts.script_cases import render_case
from trainer.config.paths.task_files import task_file_problem

HOSTILE = {
    "space": "a b",
    "tab": "a\tb",
    "newline": "a\nb",
    "newline at the end": "a\n",
    "carriage return": "a\rb",
    "line separator": "a\u2028b",
    "no-break space": "a\u00a0b",
    "NUL": "a\0b",
    "command": "a$(touch x)",
    "variable": "a$HOME",
    "backquote": "a`touch x`",
    "semicolon": "a;b",
    "and": "a&&b",
    "pipe": "a|b",
    "redirection": "a>b",
    "single quote": "a'b",
    "double quote": 'a"b',
    "backslash": "a\\b",
    "comment": "a#b",
    "asterisk": "a*",
    "braces": "a{b}",
    "tilde": "~a",
    "dash at the beginning": "-a",
    "wide letter": "\uff41",
    "wide digit": "\uff11",
    "Cyrillic letter": "\u0430",
    "Cyrillic letter inside": "p\u0430y",
    "empty": "",
}
QUEUES = tuple(name for name in SCHEDULERS if load_queue_backend(name) is not None)
WORDS = ("group", "resource_type", "queue", "reservation")
FLAGS = ("--name", "--group", "--resource-type", "--queue", "--reservation")
GIVEN = tuple(value for value in HOSTILE.values() if value)
"""An empty flag stands for the default."""
PREFIXES = ("#SBATCH ", "#$ ", "#PBS ", "#BSUB ")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a cluster of each scheduler, named like the scheduler; an empty working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for kind in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    # No program of a scheduler is found, should a value be accepted.
    monkeypatch.setenv("PATH", str(tmp_path / "work"))
    for name in ("LLMCTL_GROUP", "LLMCTL_RUNS_ROOT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config/llmctl/clusters").mkdir(parents=True)
    for scheduler in SCHEDULERS:
        write_profile(tmp_path, scheduler)
    return tmp_path


def write_profile(home, scheduler, **more):
    path = home / f"config/llmctl/clusters/{scheduler}.yaml"
    values = {"scheduler": scheduler, "runs_root": f"{home}/runs", "hosts": ["localhost"]}
    path.write_text(yaml.safe_dump({**values, **more}))


def refusal(capsys, cluster, *arguments, code):
    """The message of a refused submission, which is one block without a traceback."""
    assert main(["submit", "--cluster", cluster, *arguments, "--", "true"]) == code
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err and "internal error" not in output.err
    return output.err


def check_nothing_written(home):
    assert not (home / "runs").exists() and not (home / "state").exists()
    assert list((home / "work").iterdir()) == []


@pytest.mark.parametrize("key", ["name", *WORDS])
def test_a_word_of_a_directive_is_plain(key):
    for value in HOSTILE.values():
        with pytest.raises(JobError, match=f"^job.{key}: .* is not valid: "):
            JobSpec(**{"name": "n", key: value})


def test_a_node_to_leave_out_is_plain():
    JobSpec(name="n", exclude=("n[1-3,7]", "me@g2"))
    for value in HOSTILE.values():
        with pytest.raises(JobError, match=r"^job.exclude: .* cannot name a node"):
            JobSpec(name="n", exclude=("h1", value))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_hostile_flag_is_refused_and_nothing_is_written(home, capsys, scheduler):
    for flag in FLAGS:
        # All values at the doors of one scheduler, and two at the doors of each.
        is_whole = scheduler == "slurm" and flag in ("--name", "--queue")
        for value in GIVEN if is_whole else ("a\n", "a$(touch x)"):
            said = refusal(capsys, scheduler, f"{flag}={value}", code=2)
            assert said.startswith(f"llmctl: {flag}: {value!r} is not valid: "), (flag, value)
    said = refusal(capsys, scheduler, "--exclude=h1,a$(touch x)", code=2)
    assert said.startswith("llmctl: --exclude: 'a$(touch x)' cannot name a node"), said
    said = refusal(capsys, scheduler, "--run-id=a\n", code=2)
    assert said.startswith("llmctl: --run-id a\n: is not valid: ")
    check_nothing_written(home)


def test_a_hostile_value_of_another_origin_names_the_origin(home, capsys, monkeypatch):
    for value in ("a b", "a\n"):
        monkeypatch.setenv("LLMCTL_GROUP", value)
        assert refusal(capsys, "slurm", code=3).startswith(f"llmctl: LLMCTL_GROUP: job.group: {value!r} is not valid: ")
        assert refusal(capsys, "slurm", "--group=g", "--set", f"job.queue={value!r}", code=2)
    monkeypatch.delenv("LLMCTL_GROUP")
    write_profile(home, "slurm", defaults={"queue": "a\ntouch x"})
    said = refusal(capsys, "slurm", code=3)
    assert said.startswith(f"llmctl: {home}/config/llmctl/clusters/slurm.yaml: defaults.queue: 'a\\ntouch x' is not")
    check_nothing_written(home)


@pytest.mark.parametrize("key", ["env", "command", "container", "mounts", "code"])
def test_a_nul_is_refused(key):
    value = {"env": (("A", "\0"),), "container": "/a\0b"}.get(key, ("/a\0:/b",))
    with pytest.raises(JobError, match=f"^job.{key}: a value contains a NUL"):
        JobSpec(**{"name": "n", key: value})


@pytest.mark.parametrize("name", ["time", "run id", "name of a variable", "name of a cluster", "secret", "after"])
def test_other_values_of_a_script_are_plain(home, capsys, name):
    patterns = {"run id": RUN_ID, "name of a variable": VARIABLE, "name of a cluster": CLUSTER_NAME}
    flags = {"time": "--time", "secret": "--secret", "after": "--after"}
    for value in HOSTILE.values():
        if name in patterns:
            assert not patterns[name].fullmatch(value)
        elif value in GIVEN:
            said = refusal(capsys, "slurm", f"{flags[name]}={value}", code=5 if name == "after" else 2)
            assert "no run is called" in said if name == "after" else said.startswith(f"llmctl: {flags[name]}")
    check_nothing_written(home)


def test_a_tag_of_yaml_runs_nothing(home, capsys):
    made = home / "work/made"
    tag = f"!!python/object/apply:os.mkdir [{made}]"
    assert "is not YAML" in refusal(capsys, "slurm", "--set", f"job.queue={tag}", code=2)
    (home / "config/llmctl/clusters/slurm.yaml").write_text(f"scheduler: slurm\nruns_root: {tag}\n")
    assert "is not valid YAML" in refusal(capsys, "slurm", code=3)
    assert changed_text(f"notice: {tag}\n", {("runs_root",): "/runs"}) is None
    assert task_file_problem(f"task: {tag}\n".encode()) is None
    check_nothing_written(home)


def test_the_value_of_a_secret_is_not_shown():
    with pytest.raises(JobError, match="never its value") as caught:
        JobSpec(name="n", secrets=("TOKEN=hunter2",))
    assert "TOKEN" in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_names_of_images_and_flags_of_mounts_are_plain(home, capsys, runtime):
    write_profile(home, "slurm", container={"runtime": runtime})
    image, mount = "nvcr.io#nvidia/pytorch:25.09-py3", "/data:/data:ro"
    assert (
        main(["submit", "--cluster=slurm", "--show-script", f"--container={image}", f"--mount={mount}", "--", "a"]) == 0
    )
    capsys.readouterr()
    for value in GIVEN:
        if "#" not in value:
            said = refusal(capsys, "slurm", f"--container={value}", code=2)
            assert said.startswith("llmctl: --container: "), value
        if runtime == "pyxis" and not value.startswith("-"):
            said = refusal(capsys, "slurm", f"--container={image}", f"--mount=/a:/b:{value}", code=2)
            assert said.startswith("llmctl: --mount: "), value
    check_nothing_written(home)


ANSWERS = {
    "slurm": ("{}\n", "Submitted batch job {}\n"),
    "sge": ('Your job {} ("x") has been submitted\n', "{}\n"),
    "pbs": ("{}.pbs1\n", "12.{}\n"),
    "lsf": ("Job <{}> is submitted to queue <normal>.\n",),
}


@pytest.mark.parametrize("scheduler", QUEUES)
def test_the_id_in_the_answer_of_a_scheduler_is_plain(scheduler):
    queue = load_queue_backend(scheduler)
    for answer in ANSWERS[scheduler]:
        assert queue.parse_job_id(answer.format(1)) in ("1", "1.pbs1", "12.1")
        for value in HOSTILE.values():
            with suppress(SchedulerError):
                assert re.fullmatch(r"\w[\w.-]*", queue.parse_job_id(answer.format(f"1{value}"))), value


def test_the_id_of_a_job_to_wait_for_is_plain(home, capsys):
    for value in ("1\ntouch x", "1;touch x", "1 2", "$(touch x)", "1\n", "-1", '1"'):
        made = make_run(home / "runs", "first", cluster="slurm")
        made.submit_to_queue(value)
        state = home / "state/llmctl"
        RunIndex(state).add(made.record)
        said = refusal(capsys, "slurm", "--show-script", "--after=first", code=5)
        assert f"{made.path}/run.json: {value!r} cannot be the id of a job" in said
        for folder in (made.path, state):
            shutil.rmtree(folder)


def layers_of(value):
    """Profiles with a hostile value, by key."""
    return {
        "group": {"group": value},
        "defaults.queue": {"defaults": {"queue": value}},
        "defaults.resource_type": {"defaults": {"resource_type": value}},
        f"resource_types.{value}": {"resource_types": {value: {"gpus": 1}}},
        "resource_types.gpu.queue": {"resource_types": {"gpu": {"queue": value}}},
        "resource_types.gpu.gpu_type": {"resource_types": {"gpu": {"gpu_type": value}}},
        "hosts.0": {"hosts": [value]},
        "login.host": {"login": {"host": value}},
        "login.proxy_jump": {"login": {"proxy_jump": value}},
        "rendezvous.interface": {"rendezvous": {"interface": value}},
        "container.name": {"container": {"name": value}},
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_a_word_of_a_profile_is_plain(name):
    place = Path("/p/bed.yaml")
    for key, layer in layers_of(HOSTILE[name]).items():
        with pytest.raises(ProfileError, match=f"^{place}: {re.escape(key)}: .* is not valid: "):
            profile_of("bed", [(place, {"scheduler": "slurm", **layer})])


@pytest.mark.parametrize("name", ["newline", "newline at the end", "carriage return", "NUL"])
def test_a_directive_of_a_profile_is_one_line(name):
    for layer in ({"options": [HOSTILE[name]]}, {"resource_types": {"gpu": {"options": [HOSTILE[name]]}}}):
        with pytest.raises(ProfileError, match="options.0: .* is not valid"):
            profile_of("bed", [(Path("/p/bed.yaml"), {"scheduler": "slurm", **layer})])


def request_of(scheduler, word, job_name):
    """A request with a word in every place of a directive."""
    resource = ResourceType(gpus=4, cores=8, gpu_type=word, queue=word)
    return JobRequest(
        profile=ClusterProfile(name="bed", scheduler=scheduler, runs_root="/runs"),
        job_name=job_name,
        run_dir="/runs/r",
        nodes=2,
        ranks_per_node=4,
        gpus_per_node=4,
        time_s=3600,
        resource_type=word,
        resource=resource,
        group=word,
        queue=word,
        reservation=word,
        priority=-1,
        after=("12", "13"),
    )


def words_of(lines):
    """The words of each line, as bash sees them if it reads the line as a command's arguments."""
    script = "".join(f"printf '%s\\0' {line}; printf '\\n\\0'\n" for line in lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\0")[:-1] for line in done.stdout.split("\n\0")[:-1]]


@pytest.mark.parametrize("scheduler", QUEUES)
def test_accepted_words_add_no_word_to_a_directive(scheduler):
    """Every character that a pattern accepts, in every directive, read by bash and by shlex."""
    queue = load_queue_backend(scheduler)
    characters = [chr(code) for code in (*range(1, 256), 0x2028, 0xFF41, 0x0430)]
    word, name, run_id = (
        "a" + "".join(each for each in characters if pattern.fullmatch(f"a{each}b")) for pattern in (WORD, NAME, RUN_ID)
    )
    assert len(word) > len(name) > 60
    for accepted in (word, word[::-1], *(f"{word[:40]}{end}" for end in word)):
        plain = queue.directives(request_of(scheduler, "a", "a"))
        lines = queue.directives(request_of(scheduler, accepted, queue.job_name(run_id)))
        found = words_of(lines) if accepted == word else [shlex.split(line, comments=True) for line in lines]
        assert [len(words) for words in found] == [len(words) for words in words_of(plain)], accepted
        assert found == [shlex.split(line) for line in lines]
        assert any(accepted.partition(".")[0] in each for words in found for each in words)


NASTY = "".join(value for value in HOSTILE.values() if "\0" not in value)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_free_values_change_no_directive_and_no_comment(scheduler):
    """Paths, images, mounts, variables and arguments may hold any character; a script quotes them."""
    assert script_with(scheduler, NASTY) == script_with(scheduler, "plain")


def test_no_value_of_a_secret_or_of_our_own_variables_comes_from_env():
    names = ("TOKEN", "LLMCTL_RUN_ID", "MASTER_ADDR")
    given = dict.fromkeys(names, "hunter2")
    profile = ClusterProfile(name="bed", scheduler="slurm", runs_root="/runs", env=given)
    job = JobSpec(name="n", env=tuple(given.items()), secrets=("TOKEN",), command=("true",))
    assert "hunter2" not in render_case(profile, job).script


def script_with(scheduler, value):
    """Lines of the script that a scheduler reads; bash must read a script without complaint."""
    software = EnvironmentProfile(modules=(value,), module_init=value, kind="venv", path=f"/{value}")
    profile = ClusterProfile(
        name="bed",
        scheduler=scheduler,
        runs_root="/runs",
        hosts=("node1", "node2"),
        environment=software,
        launch=LaunchProfile(srun_options=(value,), mpirun=value, mpirun_options=(value,)),
        env={"A": value},
        resource_types={"gpu": ResourceType(gpus=4)},
        defaults=DefaultsProfile(resource_type="gpu"),
    )
    if scheduler == "slurm":
        profile = profile.model_copy(update={"container": profile.container.model_copy(update={"runtime": "pyxis"})})
    job = JobSpec(
        name="n",
        nodes=2,
        time_s=60,
        container=f"/{value}",
        mounts=(f"/{value}:/x",),
        env=(("B", value),),
        secrets=("TOKEN",),
        command=(value, "--", value),
    )
    places = {"python": f"/{value}/python", "working_dir": Path(f"/{value}"), "secrets_file": Path(f"/{value}")}
    lines = []
    for each in (job, replace(job, container=None, mounts=()), replace(job, container=None, mounts=(), command=())):
        script = render_case(profile, each, **places).script
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.stderr == ""
        lines += [line for line in re.split(r"[\n\r]", script) if line.startswith("#")]
    assert any(line.startswith(PREFIXES) for line in lines) == (scheduler in QUEUES)
    return lines
