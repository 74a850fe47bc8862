"""A training run whose checkpoints are on a mount that goes and comes back. Real mounts, a real job."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.waiting import HANG_S, wait_for
from trainer.checkpoint.directory import complete_iterations

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 1, vocab_size: 100}
training: {train_iters: 4, seq_length: 16, eval_iters: 0, device: cpu}
optimizer: {lr: 1.0e-3}
data: {mock_data: true}
checkpoint: {save_interval: 2, wait_for_folder_s: 0}
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems"),
    pytest.mark.programs("unshare", "nsenter", "mount", "umount"),
]


class Machine:
    """A mount namespace: the mount point and what is below it, with llmctl and its jobs inside."""

    def __init__(self, place):
        self.disk, self.point, self.runs = place / "disk", place / "point", place / "runs"
        self.disk.mkdir()
        self.point.mkdir()
        argv = ["unshare", "--mount", "--propagation", "private", "cat"]
        # The namespace lasts as long as this process, which waits for the end of its input.
        self._holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holder.stdin.write(b"\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.read(1) == b"\n", "the namespace could not be made"

    def call(self, *argv):
        """Run a command inside."""
        argv = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={self.disk.parent}", *map(str, argv)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)

    def llmctl(self, *words):
        return self.call(sys.executable, "-m", "llmctl", *words)

    def train(self, attempt):
        """Run the trainer as an attempt of the run, like a job."""
        run = self.runs / "r"
        words = ("-m", "trainer", "pretrain", "--config", run / "config.yaml")
        return self.call("env", f"LLMCTL_RUN_DIR={run}", f"LLMCTL_ATTEMPT={attempt}", sys.executable, *words)

    def mount(self):
        assert self.call("mount", "--bind", self.disk, self.point).returncode == 0

    def unmount(self):
        assert self.call("umount", self.point).returncode == 0

    def outcome(self, attempt):
        """Reason of the end of an attempt."""
        path = self.runs / "r/attempts" / str(attempt) / "exit.json"
        wait_for(path.exists, f"the end of attempt {attempt}")
        return json.loads(path.read_text())["reason"]

    def error(self, attempt):
        return json.loads((self.runs / f"r/attempts/{attempt}/errors/rank-00000.json").read_text())["message"]

    def close(self):
        self._holder.stdin.close()
        self._holder.wait(HANG_S)
        self._holder.stdout.close()


@pytest.fixture
def machine(home, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    (home / "c.yaml").write_text(CONFIG)
    machine = Machine(home)
    yield machine
    machine.close()


# The mount point itself, and a folder on the mount.
@pytest.mark.parametrize("below", ["", "mine/checkpoints"])
def test_a_run_goes_on_only_when_its_mount_is_back(machine, below):
    folder = machine.point / below
    machine.mount()
    submitted = machine.llmctl("submit", "c.yaml", "--run-id", "r", "--set", f"checkpoint.save={folder}")
    assert submitted.returncode == 0, submitted.stderr
    assert machine.outcome(1) == "completed"
    assert complete_iterations(machine.disk / below) == [2, 4]
    machine.unmount()
    longer = ("resume", "r", "--set", "training.train_iters=6")
    refused = machine.llmctl(*longer)
    lack = "does not exist" if below else "is empty"
    assert refused.returncode == 5
    assert f"checkpoint folder {folder} {lack} on this machine, but the run has trained to" in refused.stderr
    assert "iteration 4 and saved until 4 (metrics.jsonl, saved.json); mount or restore the folder" in refused.stderr
    assert f"llmctl submit {machine.runs}/r/config.yaml" in refused.stderr
    assert not (machine.runs / "r/attempts/2").exists()
    # A requeue starts the trainer, and asks nobody.
    requeued = machine.train(2)
    assert requeued.returncode == 1
    assert f"checkpoint folder {folder} {lack} on " in machine.error(2)
    shutil.rmtree(machine.runs / "r/attempts/2")
    assert list(machine.point.iterdir()) == [], "something was written below the mount point"
    machine.mount()
    resumed = machine.llmctl(*longer)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes from iteration 4 of 6" in resumed.stderr
    assert machine.outcome(2) == "completed"
    assert complete_iterations(machine.disk / below) == [2, 4, 6]
    assert list(machine.point.iterdir()) == []
