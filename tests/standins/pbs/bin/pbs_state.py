"""State of the stand-in PBS: jobs and faults in a folder.

It contains no part of PBS, which Debian does not have. It behaves as OpenPBS's source and manual pages describe a
server and its MOMs, as far as llmctl uses them. All nodes are names of this machine. PBS_STANDIN_STATE names the
folder:

    nodes          names of the nodes, one per line; a job has its nodes to itself
    jobs/N.json    one file per job
    faults/down    the server does not answer
    faults/lose    the next qsub is accepted, and its answer is lost
    faults/busy    no job is started
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

SERVER = "pbs1"
UNKNOWN_JOB = 15001 % 256
FINISHED_JOB = 15139 % 256
STATE = Path(os.environ["PBS_STANDIN_STATE"])


def fault(name):
    return (STATE / "faults" / name).exists()


def need_server(program):
    if fault("down"):
        print(f"Connection refused\n{program}: cannot connect to server {SERVER} (errno=111)", file=sys.stderr)
        sys.exit(255)


@contextlib.contextmanager
def locked():
    with (STATE / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def path_of(number):
    return STATE / "jobs" / f"{number}.json"


def load(number):
    return json.loads(path_of(number).read_text())


def save(job):
    path = path_of(job["number"])
    new = path.with_suffix(".new")
    new.write_text(json.dumps(job))
    new.replace(path)


def change(number, **values):
    with locked():
        job = {**load(number), **values}
        save(job)
    return job


def all_jobs():
    paths = (STATE / "jobs").glob("*.json")
    return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: int(path.stem))]


def find(job_id):
    """Job of ``N`` or ``N.server``; None if unknown."""
    number = job_id.partition(".")[0]
    return load(number) if number.isdecimal() and path_of(number).exists() else None


def new_job(job):
    with locked():
        (STATE / "jobs").mkdir(exist_ok=True)
        number = max([int(path.stem) for path in (STATE / "jobs").glob("*.json")], default=1000) + 1
        job = {
            **job,
            "number": number,
            "id": f"{number}.{SERVER}",
            "state": "H" if job["depend"] else "Q",
            "substate": 10,
            "comment": "",
            "run_count": 0,
            "created": time.time(),
        }
        save(job)
    return job


def is_ready(job):
    """True if the job's dependencies have ended as requested; None if they never can."""
    kind, _, ids = job["depend"].partition(":")
    for other in (find(job_id) for job_id in ids.split(":") if job_id):
        if other is None:
            continue
        if other["state"] != "F":
            return False
        if kind == "afterok" and other.get("exit_status") != 0:
            return None
    return True


def take_nodes(number):
    """Start a job if enough nodes are free; return its new state."""
    with locked():
        job = load(number)
        if job["state"] == "F":
            return job
        ready = is_ready(job)
        if ready is None:
            job.update(state="F", substate=91, comment="Job deleted as result of dependency")
        elif ready:
            used = {node for other in all_jobs() if other["state"] in "RE" for node in other["hosts"]}
            free = [node for node in (STATE / "nodes").read_text().split() if node not in used]
            if len(free) >= job["nodes"] and not fault("busy"):
                hosts = free[: job["nodes"]]
                where = "+".join(f"({host}:ncpus=1)" for host in hosts)
                job.update(state="R", substate=42, hosts=hosts, started=time.time(), run_count=job["run_count"] + 1)
                job["comment"] = f"Job run at {time.strftime('%a %b %d at %H:%M')} on {where}"
            else:
                job.update(state="Q", comment="Not Running: Not enough free nodes available")
        save(job)
        return job


def job_environment(job):
    """Environment of a job: of the submitter's variables only those that qsub(1B) names."""
    node_file = STATE / f"{job['number']}.nodefile"
    node_file.write_text("".join(f"{host}\n" * job["mpiprocs"] for host in job["hosts"]))
    variables = dict(entry.partition("=")[::2] for entry in job["variables"].split(",") if entry)
    return {
        **job["environment"],
        **variables,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PBS_EXEC": str(Path(__file__).parents[1]),
        "PBS_ENVIRONMENT": "PBS_INTERACTIVE" if job["interactive"] else "PBS_BATCH",
        "PBS_JOBID": job["id"],
        "PBS_JOBNAME": job["name"],
        "PBS_NODEFILE": str(node_file),
        "PBS_QUEUE": job["queue"],
        "PBS_O_WORKDIR": job["workdir"],
        "PBS_STANDIN_STATE": str(STATE),
    }


def signal_processes(sent, *, session=None, variables=()):
    """Send a signal to all processes of a session, or to all processes with these variables."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if session is not None and os.getsid(pid) != session:
                continue
            if variables and not {*variables} <= {*(folder / "environ").read_bytes().split(b"\0")}:
                continue
            if pid != os.getpid():
                os.kill(pid, sent)


def kill_job(job):
    # Another server on this machine, of other tests, has jobs of the same ids.
    variables = (f"PBS_JOBID={job['id']}", f"PBS_STANDIN_STATE={STATE}")
    signal_processes(signal.SIGKILL, variables=[os.fsencode(variable) for variable in variables])
