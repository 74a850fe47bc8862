"""Checks of the machines of a job that llmctl starts on hosts of the profile, without a scheduler."""

from collections.abc import Iterator

from llmctl.errors import SchedulerError
from llmctl.runs.record import RunRecord
from llmctl.submit.job import Job, Problem
from llmctl.transport.host_group import HostGroup
from llmctl.transport.host_members import bare, joined


def host_problems(job: Job) -> Iterator[Problem]:
    """Fewer hosts than nodes, a host listed twice, an unknown host to leave out, or restarts without files. Pure."""
    hosts, nodes, name = job.profile.hosts, job.spec.nodes, job.profile.name
    if not hosts:
        yield Problem("hosts", "is empty; list the machines, the head node first: hosts: [gpu1, gpu2]", of="profile")
        return
    doubled = next((host for host in hosts if hosts.count(host) > 1), None)
    if doubled is not None:
        yield Problem("hosts", f"{doubled} is listed twice; each machine is one node", of="profile")
    if job.spec.max_restarts and job.request.launcher != "mpirun" and nodes > 1 and not job.profile.shared:
        text = (
            f"is not possible on {nodes} machines that share no files (shared: false in {name}), by which they tell "
            "each other of the next attempt; leave it out, or use --nodes 1"
        )
        yield Problem("job.max_restarts", text)
    unknown = [host for host in job.spec.exclude if host not in hosts]
    if unknown:
        yield Problem("job.exclude", f"{', '.join(unknown)}: {name} has no such host; there are {', '.join(hosts)}")
    elif nodes > len(hosts):
        yield Problem("job.nodes", f"{nodes} is above {len(hosts)}, the hosts of {name}; lower it")
    elif nodes > (left := len(hosts) - len(set(job.spec.exclude))):
        text = f"leaves {left} of the {len(hosts)} hosts of {name} for {nodes} nodes; exclude fewer, or lower nodes"
        yield Problem("job.exclude", text, also=("job.exclude", "job.nodes"))


def resume_problems(record: RunRecord, job: Job) -> Iterator[Problem]:
    """Hosts that share no files, and lack those of the run. Pure.

    Args:
        record: of the run, before the resume.
        job: of the resume.
    """
    known = [host for submission in record.submissions for host in submission.hosts]
    if job.profile.shared or not known:
        return
    head = record.submissions[-1].hosts[:1] or (known[0],)
    missing = [host for host in job.request.hosts if host not in known] or [
        host for host in job.request.hosts[:1] if host not in head
    ]
    if missing:
        yield Problem(
            "job.exclude",
            f"the hosts of {job.profile.name} share no files (shared: false), and {record.run_id} is on "
            f"{', '.join(dict.fromkeys(known))}, its record on {head[0]}: it cannot resume on "
            f"{', '.join(job.request.hosts)}; submit a new run with checkpoint.load",
            also=("job.exclude", "job.nodes"),
        )


def check_hosts_answer(job: Job, group: HostGroup) -> None:
    """Connect to every host of a job.

    Args:
        job: with its hosts.
        group: all hosts of the profile.

    Raises:
        SchedulerError: a host cannot be reached; names the host, and the flag that leaves it out.
    """
    problems = group.only(job.request.hosts).unreachable()
    if not problems:
        return
    error = joined(problems)
    spare = [host for host in job.profile.hosts if host not in (*job.spec.exclude, *job.request.hosts)]
    # Only hosts that answer are a cure: a dead jump host takes all of them away.
    silent = {*problems, *(group.only(spare).unreachable() if spare else ())}
    left = [host for host in (*job.request.hosts, *spare) if host not in silent]
    if not left:
        raise error
    flags = f"--exclude {','.join([*job.spec.exclude, *(host for host in job.profile.hosts if host in silent)])}"
    if len(left) < job.spec.nodes:
        flags += f" --nodes {len(left)}"
    them = "it" if len(silent) == 1 else "them"
    raise SchedulerError(f"{bare(error)}\nleave {them} out: {flags}", transient=error.transient)
