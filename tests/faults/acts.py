"""Faults from outside. Each acts on processes of the run under test only, by their process ids."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.save_faults.attached import Strace
from tests.schedulers.running import ranks_of, supervisor_of, words_of
from tests.testbeds.slurm_conf import LOGIN
from tests.waiting import HANG_S, wait_for

POINTER = "latest_checkpointed_iteration.txt"
_IS_RANK_1 = {"NODE_RANK=1", "OMPI_COMM_WORLD_RANK=1"}
CANCELS = {"slurm": "scancel", "sge": "qdel"}


def nothing(trial):
    """Leave the run alone."""


def no_words(trial):  # noqa: ARG001
    """No further words."""
    return ()


def rank_1(trial):
    """Process id of rank 1, as this machine numbers it."""
    (pid,) = (pid for pid in ranks_of(trial.path) if _IS_RANK_1.intersection(words_of(pid, "environ")))
    return pid


def parent_of(pid):
    """Process id of the parent, as this machine numbers it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def kill_rank(trial):
    """SIGKILL of rank 1."""
    os.kill(rank_1(trial), signal.SIGKILL)


def kill_agent(trial):
    """SIGKILL of rank 1's launcher."""
    os.kill(parent_of(rank_1(trial)), signal.SIGKILL)


def freeze_rank(trial):
    """SIGSTOP of rank 1."""
    os.kill(rank_1(trial), signal.SIGSTOP)


def kill_supervisor(trial):
    """SIGKILL of the supervisor on the head node."""
    os.kill(supervisor_of(trial.path), signal.SIGKILL)


def ask_to_stop(trial):
    """SIGTERM of the supervisor, as a scheduler warns a job that it is about to end."""
    os.kill(supervisor_of(trial.path), signal.SIGTERM)


# --- Checkpoints. The rank dies first: it would save another, and the next attempt has to read them.


def newest(trial):
    """Folder of the newest complete checkpoint, and the pointer."""
    root = trial.path / "checkpoints"
    return max(path for path in root.glob("iter_*") if (path / "metadata.json").exists()), root / POINTER


def truncate(trial):
    """Cut off the end of a tensor file of the newest checkpoint."""
    kill_rank(trial)
    path = largest(newest(trial)[0])
    os.truncate(path, path.stat().st_size // 2)


def flip(trial):
    """Flip a bit in a tensor file of the newest checkpoint."""
    kill_rank(trial)
    path = largest(newest(trial)[0])
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def delete(trial):
    """Delete a tensor file of the newest checkpoint."""
    kill_rank(trial)
    largest(newest(trial)[0]).unlink()


def damage_pointer(trial):
    """Fill the pointer to the newest checkpoint with bytes that do not make a number."""
    kill_rank(trial)
    newest(trial)[1].write_bytes(b"\0\0\0\0")


def largest(folder):
    """Largest file of a folder."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


# --- Disks and memory


def disk_of(trial):
    """Mount point of a small disk for the checkpoints of a run."""
    return trial.bed.site.home / f"disk-{trial.run_id}"


def own_disk(trial):
    """Mount a small disk; words that have the run save there."""
    disk = disk_of(trial)
    disk.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=4m", "faults", disk)
    trial.undo.append(lambda: call("umount", "--lazy", disk))
    return "--set", f"checkpoint.save={disk}"


def fill_disk(trial):
    """Write until the disk is full."""
    with suppress(OSError), (disk_of(trial) / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_room(trial):
    """Remove what fills the disk."""
    (disk_of(trial) / "full").unlink()


def set_read_only(trial):
    """Mount the disk without the right to write, as kernels do after an error."""
    call("mount", "-o", "remount,ro", disk_of(trial))


def set_writable(trial):
    """Undo ``set_read_only``."""
    call("mount", "-o", "remount,rw", disk_of(trial))


def use_up_quota(trial):
    """Have every fsync of the ranks fail by EDQUOT, as file servers do, which reserve no room earlier."""
    for pid in ranks_of(trial.path):
        options = ["-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EDQUOT"]
        strace = Strace(pid, "/dev/null", options)
        trial.undo.append(strace.__exit__)


def limit_memory(trial):
    """Put rank 1 in a control group without memory, and have the rank ask for some."""
    group = Path("/sys/fs/cgroup/memory") / f"llmctl-{trial.bed.name}-{trial.run_id}-{os.getpid()}"
    group.mkdir()
    trial.undo.append(group.rmdir)
    (group / "memory.limit_in_bytes").write_text(str(2**26))
    (group / "cgroup.procs").write_text(str(rank_1(trial)))
    (trial.path / "allocate").touch()
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the end of rank 1")
    (trial.path / "allocate").unlink()


def call(*argv):
    """Run a command that must succeed."""
    subprocess.run([*map(str, argv)], check=True, timeout=HANG_S)


# --- Schedulers


def requeue(trial):
    """Have Slurm requeue the job at once."""
    job = trial.job_id()
    trial.bed.site.cluster.run("scontrol", "requeue", job)
    start_again(trial, job)


def cancel_by_hand(trial):
    """End the job by the scheduler's own command."""
    trial.bed.site.cluster.run(CANCELS[trial.bed.name], trial.job_id())


def stop_controller(trial):
    """Stop slurmctld, ask llmctl what becomes of the run, and try to resume the run, which still trains."""
    cluster, site = trial.bed.site.cluster, trial.bed.site
    cluster.on_node(LOGIN, "kill", (cluster.state / "run/slurmctld.pid").read_text().strip())
    wait_for(lambda: cluster.call("scontrol", "ping").returncode != 0, "the end of slurmctld")
    try:
        for words in (("status", trial.run_id, "--json"), ("resume", trial.run_id)):
            done = site.call(*words)
            said = " ".join((done.stdout + done.stderr).split())[:300]
            # A run that has ended meanwhile tells its end by itself.
            if words[0] != "status" and done.returncode == 0 and not trial.exit_of(1):
                trial.note(f"{words[0]} succeeds without a scheduler: {said}")
            elif words[0] == "status" and '"state": "failed"' in done.stdout:
                trial.note(f"status tells a failure: {said}")
    finally:
        cluster.daemon("slurmctld", "slurmctld")
        wait_for(lambda: cluster.call("scontrol", "ping").returncode == 0, "slurmctld")


def start_again(trial, job):
    """Have Slurm start a requeued job at once: otherwise two minutes pass."""
    trial.bed.site.wait_until(trial.run_id, lambda run: run["state"] == "pending")
    trial.bed.site.cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")


def preempt(trial):
    """Submit an urgent job that needs all nodes, and wait for its end."""
    site, job = trial.bed.site, trial.job_id()
    (site.home / "urgent.sh").write_text("#!/bin/sh\ntrue\n")
    size = (f"--nodes={len(site.cluster.nodes)}", "--exclusive", "--partition=urgent", "--output=/dev/null")
    site.cluster.run("sbatch", "--wait", *size, str(site.home / "urgent.sh"))
    start_again(trial, job)


def shorten(trial):
    """Set the job's time limit to its first minute."""
    trial.bed.site.cluster.run("scontrol", "update", f"jobid={trial.job_id()}", "timelimit=1")


def lose_answer(trial):
    """Put a sbatch first in PATH that submits, and fails as if the answer had not come."""
    folder = trial.bed.site.home / "lost"
    folder.mkdir(exist_ok=True)
    path = trial.bed.site.environ()["PATH"]
    real = shutil.which("sbatch", path=path)
    error = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    (folder / "sbatch").write_text(f'#!/bin/sh\n{real} "$@" >/dev/null\necho "{error}" >&2\nexit 1\n')
    (folder / "sbatch").chmod(0o755)
    trial.env["PATH"] = f"{folder}:{path}"
    return ()


def count_jobs(trial):
    """Note more than one job of the run."""
    jobs = trial.bed.site.cluster.run("squeue", "-h", "-o", "%i", "--name", trial.run_id).split()
    if len(jobs) != 1 or jobs != trial.bed.site.status(trial.run_id)["job_ids"]:
        trial.note(f"jobs {jobs} run")


def break_node(trial):
    """Hide the Python of the jobs on the second node; the words with which the run takes the first two."""
    python, cluster = os.path.realpath(sys.executable), trial.bed.site.cluster
    cluster.on_node("n2", "mount", "--bind", "/dev/null", python)
    trial.undo.append(lambda: cluster.on_node("n2", "umount", python))
    return "--exclude", "n3,n4"


def cancel(trial):
    """A person cancels the run."""
    trial.bed.site.llmctl("cancel", trial.run_id)


def stop_slurmd(trial):
    """Kill the scheduler's daemon on the node of rank 1, and start it again."""
    cluster = trial.bed.site.cluster
    cluster.on_node(trial.host, "sh", "-c", f"kill -9 $(cat {cluster.state}/spool/{trial.host}/slurmd.pid)")
    cluster.start_slurmd(trial.host)


def cut_power(trial):
    """Cut the power of the node of rank 1; an operator declares the node dead."""
    cluster, job = trial.bed.site.cluster, trial.job_id()
    cluster.cut_power(trial.host)
    cluster.run("scontrol", "update", f"nodename={trial.host}", "state=down", "reason=power")
    start_again(trial, job)


def restore_power(trial):
    """Start the node again."""
    trial.bed.site.cluster.restore_power(trial.host)


def cut_network(*chains):
    """An act that drops all packets of the node of rank 1 in chains of iptables."""

    def act(trial):
        for chain in chains:
            way = "-i" if chain == "INPUT" else "-o"
            trial.bed.on_host(trial.host, "iptables", "-I", chain, "!", way, "lo", "-j", "DROP")

    return act


def heal_network(trial):
    """Undo ``cut_network``."""
    trial.bed.on_host(trial.host, "iptables", "-F")


def heal_after_the_end(trial):
    """Undo ``cut_network`` once the first attempt has ended."""
    wait_for(lambda: trial.exit_of(1), lambda: f"the end of the first attempt\n{trial.log()}")
    heal_network(trial)


def resume_twice(trial):
    """Two people resume an ended run at the same time."""
    both = [trial.bed.site.start("resume", trial.run_id) for _ in range(2)]
    said = [process.communicate(timeout=HANG_S)[0] for process in both]
    if [process.returncode for process in both].count(0) != 1:
        trial.note(f"{[process.returncode for process in both]} of two resumes: {said}")


def resume(trial):
    """A person resumes the run."""
    trial.bed.site.llmctl("resume", trial.run_id)
