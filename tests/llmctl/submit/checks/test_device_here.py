"""The GPU of this machine, by what nvidia-smi prints."""

import pytest

from llmctl.submit.preview.estimate import device_here
from llmctl.transport.protocol import CommandResult


class Smi:
    """Stands for a transport to a machine whose nvidia-smi prints a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, *_: object, **__: object) -> CommandResult:
        return CommandResult(0, self.text, "")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\n", "H100"),
        ("NVIDIA A100-SXM4-40GB, 40960\nNVIDIA A100-SXM4-40GB, 40960\n", "A100-40GB"),
        ("NVIDIA GH200 480GB, [N/A]\n", "GH200"),
        ("NVIDIA GeForce RTX 4090, 24564\n", None),
        ("NVIDIA-SMI has failed, because the driver is not loaded\n", None),
        ("", None),
    ],
)
def test_the_gpu_is_found_by_its_name(text, name):
    found = device_here(Smi(text), has_gpus=True, ranks=1)
    assert (found and found.name) == name
