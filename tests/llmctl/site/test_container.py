"""Names of images, for pyxis, enroot and Apptainer."""

import pytest

from llmctl.site.container import ContainerPlan, enroot_name
from llmctl.site.profile import ContainerProfile

# (as typed, for pyxis and enroot)
NAMES = [
    ("ubuntu", "ubuntu"),
    ("ubuntu:24.04", "ubuntu:24.04"),
    ("nvidia/cuda:12.8.0-base", "nvidia/cuda:12.8.0-base"),
    ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
    ("nvcr.io#nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
    ("me@nvcr.io/nvidia/pytorch:25.01-py3", "me@nvcr.io#nvidia/pytorch:25.01-py3"),
    ("a.b@nvidia/cuda", "a.b@nvidia/cuda"),
    ("registry:5000/pytorch", "registry:5000#pytorch"),
    ("localhost/pytorch:1", "localhost#pytorch:1"),
    ("ghcr.io/group/image@sha256:ab12", "ghcr.io#group/image@sha256:ab12"),
    ("docker.io/nvidia/cuda:12", "nvidia/cuda:12"),
    ("docker://nvcr.io/nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
    ("docker://nvidia/cuda", "docker://nvidia/cuda"),
    ("dockerd://my.host/image:1", "dockerd://my.host/image:1"),
    ("podman://localhost/image", "podman://localhost/image"),
    ("/images/v1.2/pytorch.sqsh", "/images/v1.2/pytorch.sqsh"),
]


@pytest.mark.parametrize(("typed", "name"), NAMES)
def test_the_name_of_an_image_in_the_syntax_of_enroot(typed, name):
    assert enroot_name(typed) == name
    plan = ContainerPlan("pyxis", typed, None, (), ContainerProfile(runtime="pyxis"))
    assert plan.srun_options[0] == f"--container-image={name}"
    assert plan.image == typed


@pytest.mark.parametrize(
    ("runtime", "typed", "source"),
    [
        ("enroot", "nvcr.io/nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
        ("enroot", "docker://nvcr.io/nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
        ("pyxis", "dockerd://image:1", "dockerd://image:1"),
        ("enroot", "ubuntu", "docker://ubuntu"),
        ("apptainer", "nvcr.io/nvidia/pytorch", "docker://nvcr.io/nvidia/pytorch"),
        ("singularity", "nvcr.io#nvidia/pytorch", "docker://nvcr.io/nvidia/pytorch"),
    ],
)
def test_the_uri_that_an_import_fetches(runtime, typed, source):
    plan = ContainerPlan(runtime, typed, "/images/one.sqsh", (), ContainerProfile(runtime=runtime))
    assert plan.source == source
