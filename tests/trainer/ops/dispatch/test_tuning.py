"""Tuning results: measurements that rank the native kernels first, and their storage."""

import json
from dataclasses import replace

import pytest
import torch

from tests.trainer.spawn import Ranks
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch import selection, setup
from trainer.ops.dispatch.build_consensus import BuildConsensus
from trainer.ops.dispatch.selection import Availability, choose_kernels
from trainer.ops.dispatch.setup import KernelSetup
from trainer.ops.dispatch.tuning import TuningResults, gpu_sources_key, measurements_in, rank, rankings_of
from trainer.ops.operation import BACKENDS, Implementation
from trainer.ops.rms_norm import RMS_NORM
from trainer.ops.tools import bench_command, doctor
from trainer.ops.tools.bench import BENCHES, Measurement, Plan, _ranked, usual_sizes
from trainer.planning.kernel_choice import RequestedBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUTO = RequestedBackend("auto", "training.kernel_backend", False)
FASTER = "the benchmark found torch faster"


def row(backend, seconds, of_copy=0.5, *, moved=1 << 30, **more):
    """A measurement of a call that moves ``moved`` bytes."""
    return {
        **{"device": "cuda", "dtype": "float32", "operation": "rms_norm", "size": "32768x4096", "backend": backend},
        **{"seconds": seconds, "gb_per_s": moved / seconds / 1e9, "of_copy": of_copy, "problem": "", **more},
    }


def test_a_native_kernel_that_is_fast_enough_stays_first():
    ranking = rank(
        # Less than a copy's speed does not justify a slower backend.
        [row("native", 1.0, 0.3), row("torch", 1.01), row("reference", 4.0), row("plain", 0.1), row("small", 0.1)]
    )
    assert ranking.order == ("native", "nvrtc", "torch", "reference", "compile")
    assert ranking.reasons == {"compile": "the benchmark measured torch here, but not compile"}


@pytest.mark.parametrize("native", ["native", "nvrtc"])
def test_a_native_kernel_that_is_slower_than_another_comes_last(native):
    ranking = rank([row(native, 1.0, 0.95), row("compile", 2.0), row("torch", 0.99), row("reference", 4.0)])
    assert ranking.order == ("torch", "compile", "reference", "native", "nvrtc")
    assert ranking.reasons == {"native": FASTER, "nvrtc": FASTER, "compile": FASTER}


def test_every_large_size_counts_and_no_small_one():
    rows = [row("native", 1.0, 0.9), row("torch", 2.0)]
    small = {"size": "64x256", "moved": 1 << 20}
    assert rank([*rows, row("native", 1.0, 0.1, **small), row("torch", 0.1, **small)]).order[0] == "native"
    other = {"size": "32768x8192"}
    assert rank([*rows, row("native", 1.0, 0.9, **other), row("torch", 0.9, **other)]).order[0] == "torch"
    # A backend that was not measured at every size has no rank.
    assert rank([*rows, row("native", 1.0, 0.9, **other), row("reference", 1.0, **other)]) is None


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("native", 1.0, 0.9)],
        [row("native", 1.0, 0.9), row("plain", 2.0)],
        [row("native", 1.0, 0.1, moved=1 << 20), row("torch", 0.1, moved=1 << 20)],
        [row("native", 1.0, 0.1), {**row("torch", 1.0), "problem": "out of memory"}],
    ],
)
def test_without_another_to_compare_with_there_is_no_ranking(rows):
    assert rank(rows) is None


def test_unmeasured_native_kernels_keep_their_place():
    ranking = rank([row("compile", 2.0), row("torch", 1.0), row("reference", 4.0)])
    assert ranking.order == ("native", "nvrtc", "torch", "compile", "reference")


def test_measurements_are_saved_per_gpu_name_and_torch(tmp_path):
    measured = TuningResults.of(tmp_path, "NVIDIA H200", "2.13.0+cu130")
    assert measured.path.parent == tmp_path / "kernels" / "measured"
    assert measured.path != TuningResults.of(tmp_path, "NVIDIA H100 80GB HBM3", "2.13.0+cu130").path
    assert measured.path != TuningResults.of(tmp_path, "NVIDIA H200", "2.12.0+cu130").path
    assert measured.text() == "" and measurements_in("") == []
    first = [row("native", 1.0, 0.9), row("torch", 2.0), row("compile", 1.5)]
    assert measured.keep(first)
    assert measurements_in(measured.text()) == first
    # Measurements of small sizes and failures do not replace earlier measurements.
    small = {"size": "64x256", "moved": 1 << 20}
    assert not measured.keep([row("native", 1.0, 0.1, **small), row("torch", 0.1, **small)])
    assert not measured.keep([row("native", 1.0, problem="out of memory"), row("torch", 1.0, problem="out of memory")])
    assert measurements_in(measured.text()) == first
    measured.keep([row("native", 1.0, 0.9, dtype="bfloat16"), row("reference", 2.0, dtype="bfloat16")])
    measured.keep([row("native", 3.0, 0.3, of_plain=1.0), row("torch", 2.0, of_plain=1.5)])
    rankings = rankings_of(measurements_in(measured.text()))
    assert {key: ranking.order[0] for key, ranking in rankings.items()} == {
        ("rms_norm", "float32"): "torch",
        ("rms_norm", "bfloat16"): "native",
    }
    assert [path.name for path in measured.path.parent.iterdir()] == [measured.path.name]


def test_measurements_of_other_sources_and_broken_files_are_ignored():
    document = {"sources": gpu_sources_key(), "measurements": [row("native", 1.0)]}
    assert len(measurements_in(json.dumps(document))) == 1
    for broken in (
        {**document, "sources": "others"},
        {**document, "measurements": [{"operation": "rms_norm"}]},
        {**document, "measurements": 3},
        {**document, "measurements": [3]},
        {**document, "measurements": [row("native", 1.0, operation=[])]},
        {**document, "measurements": [{**row("native", 1.0), "seconds": "one"}]},
        {"measurements": document["measurements"]},
        [document],
        "text",
    ):
        assert measurements_in(json.dumps(broken)) == []
    assert measurements_in(json.dumps(document)[:-5]) == []


@pytest.fixture
def operation(monkeypatch):
    """rms_norm with all backends, all correct, on every device."""

    def same(*arguments):
        return RMS_NORM.implementations["reference"].function(*arguments)

    everything = {name: Implementation(same) for name in BACKENDS if name != "nvrtc"}
    there = replace(RMS_NORM, implementations=everything)
    monkeypatch.setattr(selection, "OPERATIONS", (there,))
    return there


def chosen(rows, missing=(), requested=AUTO, dtype=torch.float32):
    availability = Availability({name: f"no {name}" for name in ("nvrtc", *missing)}, {}, rankings=rankings_of(rows))
    return choose_kernels({"rms_norm": requested}, availability, CPU, dtype, is_alone=True)


SLOW_OWN = [row("native", 2.5), row("compile", 3.0), row("torch", 2.0), row("reference", 4.0)]


@pytest.mark.usefixtures("operation")
def test_without_measurements_native_comes_first():
    assert chosen([]).backends == {"rms_norm": "native"}
    assert chosen([], missing=["native"]).backends == {"rms_norm": "torch"}
    # Another dtype has no measurements.
    assert chosen(SLOW_OWN, dtype=torch.bfloat16).backends == {"rms_norm": "native"}


@pytest.mark.usefixtures("operation")
def test_auto_uses_the_backend_that_measured_better_and_reports_it():
    found = chosen(SLOW_OWN)
    assert found.backends == {"rms_norm": "torch"}
    assert found.lines() == [
        "kernels: torch for rms_norm",
        f"kernels: rms_norm: torch instead of native: {FASTER}",
        "kernels: rms_norm: torch instead of compile: the benchmark found torch faster",
    ]
    assert chosen(SLOW_OWN, missing=["torch"]).backends == {"rms_norm": "compile"}
    assert chosen([row("native", 1.0, 0.9), row("reference", 4.0)]).lines() == ["kernels: native for rms_norm"]


@pytest.mark.usefixtures("operation")
def test_a_backend_by_name_is_used_despite_measurements():
    named = RequestedBackend("native", "training.kernel_backends.rms_norm", True)
    assert chosen(SLOW_OWN, requested=named).lines() == ["kernels: native for rms_norm"]


@pytest.mark.usefixtures("operation")
def test_reference_may_be_the_best():
    found = chosen([row("native", 1.0, 0.7), row("reference", 0.5)])
    assert found.backends == {"rms_norm": "reference"}
    assert dict(found.passed_over["rms_norm"])["native"] == "the benchmark found reference faster"


def here(monkeypatch, tmp_path, rows):
    """A machine with a GPU and saved measurements."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    settings = BuildSettings(tmp_path)
    if rows:
        setup.tuning_here(settings, CUDA).keep(rows)
    return settings


def test_saved_measurements_are_used_on_gpus(monkeypatch, tmp_path):
    settings = here(monkeypatch, tmp_path, SLOW_OWN)
    availability = KernelSetup(settings, CUDA).availability({"rms_norm": AUTO})
    assert availability.rankings[("rms_norm", "float32")].order[0] == "torch"
    assert KernelSetup(settings, CPU).availability({"rms_norm": AUTO}).rankings == {}
    assert KernelSetup(settings, CUDA).availability({"rms_norm": replace(AUTO, backend="reference")}).rankings == {}
    measured = setup.tuning_here(settings, CUDA)
    measured.path.write_text(measured.path.read_text().replace('"seconds": 2.5', '"seconds": "one"'))
    assert KernelSetup(settings, CUDA).availability({"rms_norm": AUTO}).rankings == {}


def said_by_the_first(rank, world_size):
    del world_size
    return BuildConsensus(CPU, builds=rank == 0).of_first(f"rank {rank}")


def test_all_ranks_use_the_measurements_of_rank_0():
    with Ranks(2) as ranks:
        assert ranks.run(said_by_the_first) == ["rank 0"] * 2
    assert BuildConsensus(CPU, builds=None).of_first("alone") == "alone"


def measurement(backend, seconds, of_copy):
    figures = row(backend, seconds, of_copy)
    return Measurement(**figures, is_chosen=backend == "native", of_reference=1.0, of_plain=1.0)


def test_the_bench_chooses_by_its_own_measurements(operation, monkeypatch):
    monkeypatch.setattr(selection, "self_test", lambda *_: None)
    rows = [measurement("native", 2.5, 0.7), measurement("torch", 2.0, 0.3), measurement("reference", 4.0, 0.2)]
    found = _ranked(operation, rows, Availability({}, {}), CUDA, torch.float32)
    assert {one.backend: one.is_chosen for one in found} == {"native": False, "torch": True, "reference": False}
    assert _ranked(operation, rows, Availability({}, {}), CPU, torch.float32) == rows


def test_the_bench_saves_measurements_of_a_gpu(monkeypatch, tmp_path, capsys):
    settings = here(monkeypatch, tmp_path, [])
    usual = Plan(compiles=True)
    bench_command._keep(SLOW_OWN, usual, settings)
    path = setup.tuning_here(settings, CUDA).path
    assert (
        capsys.readouterr().err
        == f"trainer kernels bench: saved in {path}; auto uses these measurements on this kind of GPU\n"
    )
    assert measurements_in(path.read_text()) == SLOW_OWN
    (tmp_path / "file").touch()
    bench_command._keep(SLOW_OWN, usual, BuildSettings(tmp_path / "file"))
    assert "the measurements cannot be saved, so auto does not use them: " in capsys.readouterr().err
    kept = path.read_text()
    bench_command._keep([row("native", 1.0, 0.9), row("torch", 2.0)], Plan(copy_mib=16), settings)
    assert "not saved for auto, which needs --repeats 7 and --copy-mib 256 or more" in capsys.readouterr().err
    bench_command._keep([row("native", 1.0, 0.9), row("torch", 2.0)], Plan(), settings)
    assert "not saved for auto, which needs measurements of the backend compile" in capsys.readouterr().err
    bench_command._keep([row("native", 1.0, 0.9)], usual, settings)
    assert (
        "not saved for auto, which needs measurements of large sizes and of several backends" in capsys.readouterr().err
    )
    assert path.read_text() == kept


def test_a_gpu_gets_sizes_that_take_it_longer_than_a_call():
    bench = BENCHES["rms_norm"]
    assert usual_sizes(bench, CPU) == [(4096, 4096), (64, 256)]
    assert usual_sizes(bench, CUDA) == [(32768, 4096), (64, 256)]


def test_the_doctor_names_the_measurements_that_auto_uses(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = here(monkeypatch, tmp_path, [])
    assert doctor._notes(settings) == doctor.NOTES
    setup.tuning_here(settings, CUDA).keep(SLOW_OWN)
    (note,) = doctor._notes(settings)
    assert note.startswith(f"On this GPU auto uses the measurements of kernels bench: {tmp_path}")


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    said = tmp_path / "version"
    monkeypatch.setattr(bench_command, "_DRIVER", said)
    assert bench_command._driver() is None
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 12.2.0 (Debian)\n"
    )
    assert bench_command._driver() == "580.95.05"
