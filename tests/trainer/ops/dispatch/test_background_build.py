"""A run that trains on torch's operations while the library is built beside it. Real processes, a stand-in compiler."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.trainer.training.pretraining_job import Job
from tests.waiting import wait_for, wait_for_ends
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.background_build import begin_in_background
from trainer.ops.dispatch.library import is_unbuilt
from trainer.planning.build_config import build_config
from trainer.training.kernel_build import KernelSwitch

IN_BACKGROUND = "kernels are being built in the background; the first iterations run on torch operations\n"
SWITCHED = re.compile(r"^iteration (\d+): native kernels from here$", re.MULTILINE)


class Site:
    """An empty cache, and a compiler whose link waits for the file ``gate`` and then does what the file says.

    ``pass`` copies the library of the tests as every library; ``fail`` ends with an error.
    """

    def __init__(self, folder, library):
        self.gate, self.started, self.cache = folder / "gate", folder / "started", folder / "cache"
        self.switches = folder / "switches"
        script = folder / "gated-c++"
        script.write_text(
            '#!/bin/bash\nif [[ $* == *--version* ]]; then echo "gated 1.0"; exit; fi\n'
            "[[ $* == *-fsyntax-only* ]] && exit\n"
            "while (($#)); do case $1 in -o) shift; target=$1;; -shared) shared=1;; esac; shift; done\n"
            'if [[ ! ${shared-} ]]; then : >"$target"; exit; fi\n'
            f'echo "$$ $(nice)" >>{self.started}\n'
            f"until [[ -s {self.gate} ]]; do sleep 0.02; done\n"
            f'if [[ $(<{self.gate}) == fail ]]; then echo "a.cpp:1: error: no"; exit 1; fi\n'
            f'cp {library.path} "$target"\n'
        )
        script.chmod(0o755)
        self.variables = {"LLMCTL_CACHE_DIR": str(self.cache), "TMPDIR": str(folder), "CXX": str(script)}

    def enter(self, rank):
        """Take the variables in the process of a rank, and note its switch."""
        os.environ.update(self.variables)
        make = KernelSwitch.make

        def noted(switch, iteration, writer):
            with self.switches.open("a") as file:
                file.write(f"{rank} {iteration}\n")
            return make(switch, iteration, writer)

        KernelSwitch.make = noted

    def job(self, run, world_size, number=1):
        return Job(run, world_size, {rank: partial(self.enter, rank) for rank in range(world_size)}, number=number)

    def open(self, word):
        other = self.gate.with_name("gate.new")
        other.write_text(word)
        other.rename(self.gate)

    def compilers(self):
        """Process ids and niceness of all links so far."""
        lines = self.started.read_text().splitlines() if self.started.exists() else []
        return {int(pid): int(niceness) for pid, niceness in map(str.split, lines)}


@pytest.fixture
def site(tmp_path, kernel_library):
    return Site(tmp_path, kernel_library)


def write_run(run, **training):
    values = {
        # Large enough for the native activation, which smaller tensors do not take.
        "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100, "swiglu": True},
        "training": {"train_iters": 100000, "seq_length": 128, "eval_iters": 0, "global_batch_size": 2, **training},
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "data": {"mock_data": True},
    }
    values["model"]["normalization"] = "RMSNorm"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))
    return run


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}


def said(run, attempt=1):
    return (run / f"attempts/{attempt}/rank-00000.log").read_text()


def beside(run, rank):
    """Work beside training, which ``llmctl status`` shows."""
    return json.loads((run / f"attempts/1/heartbeat/rank-{rank:05d}.json").read_text()).get("beside", "")


def stop(run, job, attempt=1):
    """End the run as a cancel does: it saves."""
    (run / f"attempts/{attempt}/stop").touch()
    assert set(job.ends(job.ranks)) == {0}, said(run, attempt)


def kernels_saved(run):
    (metadata,) = run.glob("checkpoints/iter_*/metadata.json")
    return json.loads(metadata.read_text())["kernels"]


def test_two_ranks_switch_at_one_iteration(site, tmp_path):
    run = write_run(tmp_path / "run")
    with site.job(run, 2) as job:
        job.wait_for_iteration(3)
        wait_for(site.compilers, "a compiler")
        wait_for(lambda: re.fullmatch(r"building the kernels \d+%", beside(run, 0)), "the share of the build")
        assert beside(run, 1) == ""
        site.open("pass")
        (switched,) = wait_for(lambda: SWITCHED.findall(said(run)), "the switch")
        first = int(switched)
        job.wait_for_iteration(first + 2)
        wait_for(lambda: beside(run, 0) == "", "the end of the build in the heartbeat")
        stop(run, job)
    text = said(run)
    assert text.count(IN_BACKGROUND) == 1 and "kernels: native (" in text.partition(IN_BACKGROUND)[2]
    assert "warning" not in text and "building" not in text
    assert sorted(site.switches.read_text().splitlines()) == [f"{rank} {first - 1}" for rank in range(2)]
    niceness = set(site.compilers().values())
    assert min(niceness) >= max(10, os.getpriority(os.PRIO_PROCESS, 0))
    assert "native" in kernels_saved(run)["rms_norm"]
    reference = write_run(tmp_path / "reference", kernel_backend="torch")
    with site.job(reference, 2) as job:
        job.wait_for_iteration(first + 2)
        stop(reference, job)
    own, others = losses(run), losses(reference)
    assert first > 3 and [own[step] for step in range(1, first)] == [others[step] for step in range(1, first)]
    after = range(first, first + 3)
    assert [own[step] for step in after] == pytest.approx([others[step] for step in after], rel=1e-3)


def test_a_failed_build_is_told_once_and_training_goes_on(site, tmp_path):
    run = write_run(tmp_path / "run")
    with site.job(run, 1) as job:
        job.wait_for_iteration(2)
        wait_for(site.compilers, "a compiler")
        site.open("fail")
        wait_for(lambda: "warning" in said(run), "the warning")
        job.wait_for_iteration(len(losses(run)) + 3)
        stop(run, job)
    (line,) = [line for line in said(run).splitlines() if "warning" in line]
    assert "could not be built: " in line and "a.cpp:1: error: no" in line
    assert line.endswith("; the run goes on with torch operations")
    assert not any("native" in label for label in kernels_saved(run).values())


def test_a_stop_during_the_build_ends_its_compilers(site, tmp_path):
    run = write_run(tmp_path / "run")
    with site.job(run, 1) as job:
        job.wait_for_iteration(2)
        wait_for(site.compilers, "a compiler")
        stop(run, job)
        wait_for_ends(list(site.compilers()))
    assert [*site.cache.rglob("*.so"), *site.cache.rglob(".build-*")] == []
    assert kernels_saved(run)["rms_norm"] == "reference"
    # A resumed run waits for the build, as does one that asks for reproducible bits.
    must_wait(site, run, 2)


def test_a_deterministic_run_waits_for_the_build(site, tmp_path):
    must_wait(site, write_run(tmp_path / "run", deterministic_mode=True), 1)


def must_wait(site, run, attempt):
    before = len(losses(run)) if attempt > 1 else 0
    known = len(site.compilers())
    heartbeat = run / f"attempts/{attempt}/heartbeat/rank-00000.json"
    with site.job(run, 1, attempt) as job:
        wait_for(lambda: len(site.compilers()) > known, "a compiler")
        wait_for(lambda: "building the kernels" in heartbeat.read_text(), "the phase")
        site.open("pass")
        job.wait_for_iteration(before + 1)
        stop(run, job, attempt)
    text = said(run, attempt)
    assert IN_BACKGROUND not in text and not SWITCHED.search(text) and "kernels: native (" in text


@pytest.mark.parametrize(
    "training",
    [
        {"deterministic_mode": True},
        {"kernel_backend": "native"},
        {"kernel_backend": "reference"},
        {"kernel_backends": {"rms_norm": "native"}},
    ],
    ids=str,
)
def test_a_config_that_fixes_the_kernels_is_built_before_the_run(site, training):
    settings = BuildSettings.from_variables(site.variables)
    assert is_unbuilt(settings)
    path = write_run(site.cache.with_name("run"), **training) / "config.yaml"
    config, cpu = build_config(json.loads(path.read_text())), torch.device("cpu")
    assert begin_in_background(config, settings, cpu, torch.float32, print, is_first_rank=True) is None
    assert not Path(site.started).exists()
