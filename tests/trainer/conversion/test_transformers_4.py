"""transformers 4 reads the exports: its logits of every family are those of the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.conversion.verify_all import EXPORT, NATIVE
from tests.trainer.families.published_models import published
from tests.trainer.families.test_transformers_parity import VARIANTS
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.families.catalogue import FAMILIES
from trainer.hub.folder import HubFolder

ROOT = Path(__file__).resolve().parents[3]
# scripts/proofs.sh installs it there: one environment has one version.
PLACE = os.environ.get("TRANSFORMERS_4", "")
MODELS = {
    f"{number:02d} {family.model_type}": (family, changes)
    for number, (family, changes) in enumerate([*((family, {}) for family in FAMILIES if family.heads), *VARIANTS])
}
OWN = "this trainer's own import (transformers"


def is_faulty(name: str) -> bool:
    """True if transformers 4 computes the model otherwise than its authors."""
    family, changes = MODELS[name]
    return family.model_type == "deepseek_v2" or (family.model_type == "qwen2_moe" and "sliding_window" in changes)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[object] | str]:
    """The words of a process with transformers 4 on the export of each model."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        published(family, **changes).save_pretrained(folder / name / "hub")
        with HubFolder(folder / name / "hub") as source:
            checkpoint = import_hub(source, folder / name / NATIVE, lambda _: None)
        export_hub(Export.open(checkpoint), folder / name / EXPORT, lambda _: None)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.trainer.conversion.verify_all", str(folder)],
        env={**os.environ, "PYTHONPATH": f"{PLACE}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[object] | str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.proof
@pytest.mark.skipif(not PLACE, reason="TRANSFORMERS_4 names no folder with transformers 4 (scripts/proofs.sh does)")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_4_computes_what_was_exported(name: str, results) -> None:
    result = results[name]
    if "ministral3" in name:
        # Newer than 4.57: its own sentence says to update it.
        assert isinstance(result, str) and "`ministral3`" in result
        return
    witness, is_equal = result
    assert is_equal
    assert str(witness).startswith(OWN if is_faulty(name) else "transformers 4.")
