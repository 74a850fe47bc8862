"""``llmctl interactive --run`` for a run in an image: same image, or a warning."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.context import Context
from llmctl.operate.attach import AttachedJob, Attachment
from llmctl.operate.interactive import attach_session
from llmctl.paths import UserFolders
from llmctl.site.profile import SCHEDULERS, ClusterProfile, ContainerProfile
from tests.llmctl.run_directories import make_run


def session_of(folder: Path, scheduler: str, site: ContainerProfile, image: str | None):
    made = make_run(folder / "runs", "demo-1", cluster="site")
    record = replace(made.record, job={"name": "demo", "nodes": 2, "container": image})
    profile = ClusterProfile(name="site", scheduler=scheduler, runs_root=str(folder / "runs"), container=site)
    folders = UserFolders(home=folder, config=folder / "config", state=folder / "state")
    folders.clusters.mkdir(parents=True)
    (folders.clusters / "site.yaml").touch()
    context = Context((), ("hostname",), {}, folder, folders)
    return attach_session(context, profile, Attachment(record, {"LLMCTL_RANK": "3"}, "", AttachedJob("17", "n2")))


@pytest.mark.parametrize(
    ("scheduler", "runtime"), [("slurm", "enroot"), ("slurm", "apptainer"), ("slurm", "singularity")]
)
def test_attach_enters_the_image_of_the_run(tmp_path, scheduler, runtime):
    session = session_of(tmp_path, scheduler, ContainerProfile(runtime=runtime), "/images/one.img")
    (script,) = [word for word in session.argv if "load_environment" in word]
    (entered,) = [line for line in script.splitlines() if line.startswith(f"set -- {runtime} ")]
    assert entered.endswith(' /images/one.img "$@"')
    assert f"{tmp_path}/runs:{tmp_path}/runs" in script
    assert session.warning == ""


@pytest.mark.parametrize(("name", "joins"), [(None, False), ("llm", True)])
def test_pyxis_joins_a_container_by_its_name_only(tmp_path, name, joins):
    session = session_of(tmp_path, "slurm", ContainerProfile(runtime="pyxis", name=name), "/images/one.sqsh")
    assert ("--container-name=llm:exec" in " ".join(session.argv)) == joins
    assert ("set container.name" in session.warning) == (not joins)


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if load_queue_backend(name)])
@pytest.mark.parametrize("image", [None, "/images/one.sif"])
def test_attach_works_with_and_without_an_image_on_every_scheduler(tmp_path, scheduler, image):
    session = session_of(tmp_path, scheduler, ContainerProfile(runtime="apptainer"), image)
    assert session.argv
    assert session.warning == ""
