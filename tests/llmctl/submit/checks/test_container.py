"""Images of jobs: names and mounts by the rules of pyxis, the search for a runtime, and jobs without an image."""

import sys

import pytest

from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from tests.llmctl.run_directories import TRANSPORT
from tests.llmctl.submit.test_queue_submit import place, queued, submit, write_profile

__all__ = ["place"]

CONTAINERS = [
    (["--container", "a b"], ["--container", "is not valid"]),
    (["--container", "img.sqsh"], ["--container", "begins with / or ."]),
    (["--container", "/nowhere/img.sqsh"], ["--container", "there is no /nowhere/img.sqsh"]),
    (["--container", "nvcr.io#nvidia/pytorch:25.01", "--mount", "data:/data"], ["--mount", "SRC is an absolute path"]),
    (["--container", "ubuntu", "--mount", "/data:data"], ["--mount", "DST is an absolute path"]),
    (["--container", "ubuntu", "--mount", "/a:/b,/c:/d"], ["--mount", "one --mount for each"]),
    (["--container", "ubuntu", "--mount", "/a:/b:ro,x"], ["--mount", "joined by +"]),
]


@pytest.mark.parametrize(("arguments", "message"), CONTAINERS, ids=lambda value: str(value)[:60])
def test_images_and_mounts_by_the_rules_of_pyxis(place, capsys, arguments, message):
    write_profile(place, container={"runtime": "pyxis"})
    assert submit(*arguments) == 2
    err = capsys.readouterr().err
    assert [words for words in message if words not in err] == []


def test_a_registry_image_as_everybody_writes_it_reaches_pyxis_with_its_mark(place, capsys):
    write_profile(place, container={"runtime": "pyxis"})
    typed = "nvcr.io/nvidia/pytorch:25.01-py3"
    assert submit("--container", typed, "--show-script") == 0
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3'" in capsys.readouterr().out
    (place / "bin/srun").write_text("#!/bin/bash\necho '      --container-image=[USER@][REGISTRY#]IMAGE'\n")
    (place / "bin/srun").chmod(0o755)
    assert submit("--container", typed) == 0
    record = RunRecord.load(place / "runs" / capsys.readouterr().out.strip(), TRANSPORT)
    assert record.job["container"] == typed


BARE = "no image is given"


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({}, ("c.yaml",), f"{BARE}: the run uses no container, but {sys.executable} on the nodes themselves"),
        ({}, ("--", "true"), f"{BARE}: COMMAND runs on the nodes themselves"),
        ({"environment": {"modules": ["cuda"]}}, ("--", "true"), ""),
        ({"environment": {"python": "/opt/python"}}, ("c.yaml",), ""),
        ({"environment": {"kind": "container", "path": "ubuntu"}}, ("c.yaml",), ""),
        ({}, ("--container", "ubuntu", "--", "true"), ""),
        ({"container": {}}, ("c.yaml",), ""),
    ],
)
def test_a_job_without_an_image_where_jobs_have_one_is_told_what_it_uses(place, capsys, changes, arguments, says):
    write_profile(place, **{"container": {"runtime": "pyxis"}, **changes})
    assert main(["submit", "--cluster", "bed", "--group", "g", "--dry-run", *arguments]) == 0
    err = capsys.readouterr().err
    assert says in err and (BARE in err) == bool(says)


def test_a_registry_image_is_passed_unchanged_and_the_plugin_is_checked(place, capsys):
    write_profile(place, container={"runtime": "pyxis"})
    image = "nvcr.io#nvidia/pytorch:25.01-py3"
    arguments = ["--container", image, "--mount", "tmpfs:/scratch", "--mount", "/tmp:/data:ro+rprivate"]
    assert submit("--show-script", *arguments) == 0
    assert f"--container-image={image}" in capsys.readouterr().out
    (place / "bin/srun").write_text("#!/bin/bash\necho '  --cpu-bind=  Bind tasks'\n")
    (place / "bin/srun").chmod(0o755)
    assert submit(*arguments) == 3
    assert "has no --container-image" in capsys.readouterr().err
    assert not (place / "bin/argv").exists()
    (place / "bin/srun").write_text("#!/bin/bash\necho '      --container-image=[USER@][REGISTRY#]IMAGE'\n")
    assert submit(*arguments) == 0


def test_the_container_runtime_is_searched_with_the_modules_of_the_profile(place, capsys):
    """A missing runtime gives a warning; a module that cannot be loaded is an error."""
    setup = 'if [ ! -e fails ]; then PATH="$PATH:$HOME_OF_MODULE"; else echo no such module >&2; false; fi || return 1'
    software = {"setup": [setup.replace("$HOME_OF_MODULE", f"{place}/module")]}
    write_profile(place, container={"runtime": "apptainer"}, environment=software)
    assert submit("--container", "ubuntu") == 0
    message = capsys.readouterr().err
    assert "has no apptainer; unless the compute nodes have it" in message
    assert "environment.modules in" in message
    (place / "module").mkdir()
    (place / "module/apptainer").write_text("#!/bin/bash\n")
    (place / "module/apptainer").chmod(0o755)
    assert submit("--container", "ubuntu") == 0
    assert "has no apptainer" not in capsys.readouterr().err
    jobs = len(queued(place))
    write_profile(place, container={"runtime": "apptainer"}, environment={"setup": [f"touch fails; {setup}"]})
    assert submit("--container", "ubuntu") == 3
    assert "no such module" in capsys.readouterr().err
    assert len(queued(place)) == jobs


def test_the_folder_of_copies_is_mounted(place, capsys):
    """A container's own /dev/shm would be gone when the run begins again."""
    write_profile(place, container={"runtime": "pyxis"})
    training = ["submit", "--cluster", "bed", "c.yaml", "--container", "ubuntu", "--show-script"]
    assert main(training) == 0
    assert "/dev/shm:/dev/shm" not in capsys.readouterr().out
    assert main([*training, "--set", "checkpoint.copy_interval=20", "--set", "checkpoint.copy_folder=/dev/shm"]) == 0
    assert "/dev/shm:/dev/shm" in capsys.readouterr().out
