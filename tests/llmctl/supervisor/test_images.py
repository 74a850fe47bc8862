"""Images that a job imports, or finds imported, in a folder of several users."""

import os
import stat
from pathlib import Path

import pytest

from llmctl.site.container import plan_container
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, ContainerProfile
from llmctl.supervisor.images import import_image

ALICE = 61001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir(mode=0o755)
    (folder / "a.sqsh").write_text("x")
    (folder / "a.sqsh").chmod(0o644)
    return folder / "a.sqsh"


def is_used(image: Path) -> bool:
    return import_image("pyxis", "docker://a", str(image), {}) == 0


def test_an_imported_image_is_used(image):
    assert is_used(image)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo fetching; echo 'no such image: a' >&2; exit 3",
            "ended with exit code 3 and the last line 'no such image: a'",
        ),
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "was ended by signal 9"),
    ],
)
def test_a_failed_import_is_told_with_the_last_line_of_its_tool(image, tmp_path, capfd, monkeypatch, script, why):
    program = tmp_path / "enroot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    target = image.with_name("b.sqsh")
    assert import_image("pyxis", "docker://b", str(target), dict(os.environ)) == 1
    said = capfd.readouterr().err
    told = f"llmctl: docker://b cannot be imported to {target}: enroot import {why}"
    assert said.splitlines()[-1] == told
    assert ("\nfetching\n" in said) is ("fetching" in script)


@needs_root
def test_an_image_of_another_user_is_refused_with_its_owner(image, capsys):
    os.chown(image, ALICE, -1)
    assert not is_used(image)
    assert f"{image} belongs to user {ALICE}, not to you; set container.image_folder" in capsys.readouterr().err


@needs_root
def test_an_image_that_others_can_replace_is_refused(image, capsys):
    os.chown(image.parent, ALICE, -1)
    image.parent.chmod(0o775)
    assert not is_used(image)
    assert f"{image.parent} has no sticky bit" in capsys.readouterr().err
    image.parent.chmod(0o1775)
    assert is_used(image)


def test_an_own_folder_that_others_may_write_to_gets_the_sticky_bit(image):
    image.parent.chmod(0o775)
    assert is_used(image)
    assert stat.S_IMODE(image.parent.stat().st_mode) == 0o1775


def test_one_image_under_several_spellings_is_one_file():
    profile = ClusterProfile(
        name="c", scheduler="slurm", container=ContainerProfile(runtime="pyxis", image_folder="/images")
    )
    spellings = ("host:5000#a/b:tag", "host:5000/a/b:tag", "docker://host:5000#a/b:tag", "docker://host:5000/a/b:tag")
    plans = [plan_container(JobSpec(name="j", container=name), profile, cwd="/") for name in spellings]
    assert {plan.imported for plan in plans if plan is not None} == {"/images/host+5000+a+b+tag.sqsh"}
