"""Stand-in for server, scheduler and MOM of PBS, for one batch job; see pbs_state.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pbs_state

KILL_DELAY_S = 10


class Head:
    """Top process of a job.

    MOM starts a login shell and writes the script's name to its input (start_exec.c). A signal
    goes to all processes of the session, that shell included. When the shell has ended, MOM kills the others.
    """

    def __init__(self, job):
        self.job = job
        script = pbs_state.STATE / f"{job['number']}.SC"
        script.write_text(job["script"], errors="surrogateescape")
        script.chmod(0o700)
        environment = pbs_state.job_environment(job)
        output = Path(job["output"] if job["is_seen_live"] else pbs_state.STATE / f"{job['number']}.OU")
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                ["-bash"],
                executable=job["shell"],
                env=environment,
                cwd=environment["HOME"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.process.stdin.write(f"{script}\n".encode())
        self.process.stdin.close()
        self.output = output

    def send(self, number):
        pbs_state.signal_processes(number, session=self.process.pid)

    def end(self):
        status = self.process.wait()
        pbs_state.kill_job(self.job)
        if not self.job["is_seen_live"]:
            self.output.replace(self.job["output"])
        return status if status >= 0 else 256 - status


def run(job):
    """Run a job to its end; return the changes of its record."""
    head = Head(job)
    signalled, ending = None, {}
    while head.process.poll() is None:
        now = pbs_state.load(job["number"])
        if now.get("rerun"):
            head.send(signal.SIGKILL)
            head.end()
            return {"state": "Q", "substate": 10, "rerun": False, "hosts": []}
        if signalled is None and (now.get("deleted") or time.time() > job["started"] + job["walltime"]):
            ending = {"substate": 91} if now.get("deleted") else {"exit_status": -29, "substate": 93}
            head.send(signal.SIGTERM)
            signalled = time.time()
        if signalled is not None and time.time() > signalled + KILL_DELAY_S:
            head.send(signal.SIGKILL)
        time.sleep(0.05)
    status = head.end()
    return {"state": "F", "exit_status": status, "substate": 93 if status else 92, **ending}


def main():
    number = int(sys.argv[1])
    while True:
        job = pbs_state.take_nodes(number)
        if job["state"] == "R":
            job = pbs_state.change(number, **run(job), used=int(time.time() - job["started"]))
        if job["state"] == "F":
            return
        time.sleep(0.1)


os.umask(0o077)
main()
