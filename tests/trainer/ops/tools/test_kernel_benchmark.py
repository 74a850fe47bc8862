"""The benchmark of kernels at tiny sizes: every op and backend, and its figures."""

import json

import pytest

from benchmarks.kernels import CASES, main
from tests.trainer.ops.test_operations import NATIVE
from trainer.ops.dispatch.registry import OPERATIONS

FLAGS = ("--tiny", "--device", "cpu", "--repeats", "1")


def test_every_operation_is_measured():
    alone = {operation.name for operation in OPERATIONS if operation.implementations.keys() == {"reference"}}
    assert CASES.keys() == {operation.name for operation in OPERATIONS} - alone


@pytest.mark.usefixtures("kernel_library")
def test_native_is_measured_beside_torch_and_the_reference(capsys):
    assert main([*FLAGS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    backends = {}
    for row in document["measurements"]:
        backends.setdefault(row["operation"], set()).add(row["backend"])
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / document["copy_gb_per_s"])
    assert all("reference" in there for there in backends.values())
    assert {name for name, there in backends.items() if "native" in there} == {one.name for one in NATIVE}
    assert backends["adamw"] == {"native", "torch", "reference"}
    norm = next(row for row in document["measurements"] if row["backend"] == "native")
    # Five passes over 8 x 8 bfloat16: two of forward, three of backward.
    assert norm["gb_per_s"] * norm["seconds"] == pytest.approx(5 * 8 * 8 * 2 / 1e9)


def test_without_the_library_the_others_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LLMCTL_CACHE_DIR", str(tmp_path))
    assert main([*FLAGS, "rms_norm"]) == 3
    said = capsys.readouterr()
    assert "native was not measured: the library is not built; run llmctl env kernels build" in said.err
    rows = [line.split(" | ")[:3] for line in said.out.splitlines() if line.startswith("| rms_norm")]
    assert rows == [["| rms_norm", "8x8", "reference"]] * 2


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit):
        main([*FLAGS, "norm"])
    assert "no such op: norm; choose from rms_norm, " in capsys.readouterr().err
