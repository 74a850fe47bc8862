"""Variables that the scripts of container jobs pass on, with fake launchers and containers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from llmctl.site.container import ContainerPlan
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, ContainerProfile, load_profile
from llmctl.submit.render import interactive_script
from tests.llmctl.scripts.script_cases import FOLDERS, RUN_ID, render_case
from tests.llmctl.scripts.test_run import LAUNCHERS, PYTHON, Stage
from tests.waiting import HANG_S


def run_job(folder, profile, *, launcher, environ=None, image="/images/one.sqsh", env=()):
    job = JobSpec(name="gpt", nodes=2, launcher=launcher, container=image, env=env)
    # The stand-in for "ip" gives every interface an address.
    rendezvous = profile.rendezvous.model_copy(update={"interface": "eth9"})
    profile = profile.model_copy(update={"runs_root": str(folder / "runs"), "rendezvous": rendezvous})
    rendered = render_case(profile, job, python=PYTHON, ranks_per_node=4, working_dir=folder)
    stage = Stage(folder, environ or {})
    stage.run(rendered, folder / "runs" / RUN_ID)
    return stage


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize("runtime", ["enroot", "apptainer"])
def test_a_rank_in_a_container_knows_its_number(tmp_path, runtime, launcher):
    profile = ClusterProfile(name="site", scheduler="slurm", container=ContainerProfile(runtime=runtime))
    stage = run_job(tmp_path, profile, launcher=launcher, environ={"LLMCTL_RANK": "5"})
    (got,) = stage.environments()
    name = b"SLURM_PROCID" if launcher == "srun" else b"OMPI_COMM_WORLD_RANK"
    assert (got[name], got[b"NODE_RANK"], got[b"MASTER_ADDR"]) == (b"5", b"1", b"10.0.0.1")
    low, high = profile.rendezvous.ports
    assert low <= int(got[b"MASTER_PORT"]) <= high
    words = stage.called(runtime)[-1]
    job = os.fsencode(tmp_path / "runs" / RUN_ID / "attempts/1/job.sh")
    assert words[-3:] == [b"bash", job, b"inside"]


def test_a_missing_program_on_a_node_is_named(tmp_path):
    site = ContainerProfile(runtime="singularity")
    profile = ClusterProfile(name="site", scheduler="slurm", container=site)
    lost = profile.environment.model_copy(update={"setup": (f"hash -r; export PATH={without_images(tmp_path)}",)})
    profile = profile.model_copy(update={"environment": lost})
    with pytest.raises(AssertionError, match="singularity is missing .* add its module to environment.modules"):
        run_job(tmp_path, profile, launcher="srun")


def without_images(folder):
    """A PATH with every program except container runtimes."""
    links = folder / "links"
    links.mkdir()
    for path in LAUNCHERS.iterdir():
        if path.name not in ("singularity", "apptainer", "enroot"):
            (links / path.name).symlink_to(path)
    return f"{links}:/usr/bin:/bin"


def imported_with(folder, runtime, environ):
    """Environment of an image import."""
    site = ContainerProfile(runtime=runtime, image_folder=str(folder / "images"))
    profile = ClusterProfile(name="site", scheduler="slurm", container=site)
    stage = run_job(folder, profile, launcher="torchrun", image="ubuntu:24.04", environ=environ)
    (entries,) = stage.called("import-environment")
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}


@pytest.mark.parametrize(
    ("runtime", "kept", "scratch"),
    [
        ("enroot", "ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH"),
        ("pyxis", "ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH"),
        ("apptainer", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"),
        ("singularity", "SINGULARITY_CACHEDIR", "SINGULARITY_TMPDIR"),
    ],
)
def test_an_image_import_writes_neither_to_home_nor_to_tmp(tmp_path, runtime, kept, scratch):
    cache = tmp_path / "plain" / "images" / f".cache.{os.getuid()}"
    got = imported_with(tmp_path / "plain", runtime, {"TMPDIR": "/tmp/17.1.all.q"})
    assert (got[kept], got[scratch]) == (str(cache), str(cache / "tmp"))
    assert (cache / "tmp").is_dir()
    got = imported_with(tmp_path / "given", runtime, {kept: "/mine", "TMPDIR": "/local/17"})
    assert (got[kept], got[scratch]) == ("/mine", "/local/17")


@pytest.mark.parametrize("runtime", ["enroot", "apptainer"])
def test_two_users_import_the_same_image_into_the_folder_of_a_group(tmp_path, runtime):
    """Another user's files cannot be opened, and that user's import ends first."""
    images = tmp_path / "images"
    image = images / f"ubuntu+24.04.{'sqsh' if runtime == 'enroot' else 'sif'}"
    for name in (f"{image}.lock", f"{image}.new"):
        # A folder in place of the file: neither root nor another user can open a folder for writing.
        Path(name).mkdir(parents=True)
    imported_with(tmp_path, runtime, {"LLMCTL_FASTER": str(image)})
    assert image.read_text() == "faster\n"
    assert not Path(f"{image}.{os.getuid()}.new").exists()


def test_an_image_is_imported_once(tmp_path):
    imported_with(tmp_path, "enroot", {})
    assert (tmp_path / "images" / "ubuntu+24.04.sqsh").read_text() == "0\n"
    assert not [path for path in (tmp_path / "images").iterdir() if path.suffix == ".new"]


def test_caches_are_in_runs_root_unless_it_is_in_home_or_a_variable_is_set(tmp_path):
    profile = ClusterProfile(name="site", scheduler="slurm")

    def caches(name, **changes):
        stage = run_job(tmp_path / name, profile, launcher="srun", image=None, **changes)
        (got,) = stage.environments()
        names = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HF_HOME", "LLMCTL_CACHE_DIR")
        return [os.fsdecode(got[os.fsencode(name)]) if os.fsencode(name) in got else None for name in names]

    root = tmp_path / "plain" / "runs" / RUN_ID / "own" / "cache"
    assert caches("plain") == [str(root / name) for name in ("triton", "torch_extensions", "huggingface", "llmctl")]
    assert caches("at_home", environ={"HOME": str(tmp_path / "at_home")}) == [None] * 4
    given = caches("given", env=(("TRITON_CACHE_DIR", "/mine"),), environ={"HF_HOME": "/ours"})
    assert (given[0], given[2]) == ("/mine", "/ours")
    (tmp_path / "user" / ".cache" / "huggingface").mkdir(parents=True)
    logged_in = caches("logged_in", environ={"HOME": str(tmp_path / "user")})
    assert logged_in[0] is not None
    assert logged_in[2] is None


SETUP = ('export ADDED="inside:${IMAGES-}"', "OTHER='a b'; export OTHER")


@pytest.mark.parametrize("runtime", ["enroot", "apptainer", "pyxis"])
def test_container_setup_lines_run_inside_the_container(tmp_path, runtime):
    """IMAGES is unset inside, because enroot does not pass it on."""
    site = ContainerProfile(runtime=runtime, setup=SETUP)
    profile = ClusterProfile(name="site", scheduler="slurm", container=site)
    stage = run_job(tmp_path, profile, launcher="torchrun", environ={"IMAGES": "outside"})
    (got,) = stage.environments()
    assert got[b"ADDED"] == (b"inside:" if runtime == "enroot" else b"inside:outside")
    assert got[b"OTHER"] == b"a b"


@pytest.mark.parametrize("runtime", ["enroot", "apptainer", "pyxis"])
def test_container_setup_lines_run_for_an_attached_command_too(tmp_path, runtime):
    site = ContainerProfile(runtime=runtime, setup=SETUP)
    profile = ClusterProfile(name="site", scheduler="slurm", runs_root=str(tmp_path), container=site)
    plan = ContainerPlan(runtime, "/image.sqsh", None, (), site)
    script = interactive_script(profile, FOLDERS, PYTHON, on_cpu=False, container=plan)
    environ = {"PATH": f"{LAUNCHERS}:/usr/bin:/bin", "HOME": str(tmp_path), "LLMCTL_RECORD": str(tmp_path)}
    argv = ["bash", "-c", script, "bash", "bash", "-c", 'printf "%s|" "$ADDED" "$OTHER" "$@"', "bash", "a  b"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "inside:|a b|a  b|"


def test_gcp_a3_keeps_the_library_path_of_the_image():
    profile = load_profile(FOLDERS, "gcp-a3")
    script = render_case(
        profile.model_copy(update={"runs_root": "/runs"}), JobSpec(name="gpt", container="ubuntu")
    ).script
    assert "container-env=" in script
    assert not re.search(r"container-env=\S*LD_LIBRARY_PATH", script)
    inside = script[script.index("# In the container") :]
    assert 'export LD_LIBRARY_PATH="/var/lib/tcpx/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"' in inside
