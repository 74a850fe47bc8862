"""Check that the machine of the scheduler's commands has the runtime of a job's container."""

from llmctl.backends import capabilities_of
from llmctl.backends.base import JobRequest
from llmctl.context import Context
from llmctl.paths import profile_files
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import Problem
from llmctl.submit.origins import profile_error
from llmctl.submit.render import environment_script
from llmctl.transport.protocol import CommandResult, Transport

_LOOK_TIMEOUT_S = 60.0


def check_container_runtime(
    profile: ClusterProfile, context: Context, transport: Transport, request: JobRequest
) -> str:
    """Refuse a container without its runtime: a Slurm without pyxis, or modules that cannot be loaded.

    Returns:
        A warning if only the compute nodes may have the runtime; else empty.

    Raises:
        ProfileError: names the alternatives.
        SchedulerError: the machine does not answer.
    """
    if request.container is None:
        return ""
    runtime = request.container.runtime
    if runtime == "pyxis":
        argv = ["srun", "--help"]
    else:
        look = f"command -v {runtime} >/dev/null || echo missing"
        argv = ["bash", "-c", environment_script(profile, context.folders), "bash", "bash", "-c", look]
    answer = transport.run(argv, timeout_s=_LOOK_TIMEOUT_S, only_reads=True)
    problem = judge_runtime(runtime, answer, transport.host)
    if problem is None:
        return ""
    if problem.key == "container.runtime" and runtime != "pyxis" and capabilities_of(profile.scheduler).has_queue:
        file = profile_files(context.folders, profile.name)[-1]
        missing = f"{transport.host} has no {runtime}; unless the compute nodes have it without a module"
        return f"{missing}, add its module to environment.modules in {file}"
    raise profile_error(context, profile, [problem])


def judge_runtime(runtime: str, answer: CommandResult, host: str) -> Problem | None:
    """Parse a host's answer to the probe of the container runtime; None without a problem. Pure.

    Args:
        runtime: of the containers.
        answer: of ``srun --help`` for pyxis; else of ``command -v`` in the jobs' environment.
        host: name for the message.
    """
    key = "container.runtime"
    if runtime == "pyxis":
        if "--container-image" in answer.stdout + answer.stderr:
            return None
        advice = "leave the image out, or set container.runtime to enroot or apptainer if the site has either"
        return Problem(key, f"is pyxis; srun on {host} has no --container-image\n{advice}", of="profile")
    if answer.exit_status != 0:
        return Problem("environment", f"cannot be set up on {host}: {last_words(answer)}", of="profile")
    if answer.stdout.split()[-1:] != ["missing"]:
        return None
    advice = "add its module to environment.modules, or install it"
    return Problem(key, f"{host} has no {runtime}, which runs the image; {advice}", of="profile")


def last_words(answer: CommandResult) -> str:
    """The end of what a failed command said, or its exit status."""
    return " ".join(answer.stderr.split())[-300:] or f"exit status {answer.exit_status}"
