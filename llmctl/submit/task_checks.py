"""Checks of the task files in evaluation.tasks, before a job is queued."""

from llmctl.site.container import on_host
from llmctl.submit.origins import Problem
from llmctl.submit.request import AskedJob
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.config.task_files import is_task_file, task_file_problem

_KEY = "evaluation.tasks"
_REMEDY = "name a task file of lm-evaluation-harness, or one of its tasks"


def task_file_problems(job: AskedJob, transport: Transport) -> list[Problem]:
    """Task files that cannot be read or are no tasks. One round trip if the config names task files, else none.

    Args:
        job: with every value decided.
        transport: to a machine that has the job's folders.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    files = [task for task in job.config.evaluation.tasks if is_task_file(task)] if job.config is not None else []
    if not files:
        return []
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    parts = transport.read_parts([FileRead(on_host(path, mounts) or path) for path in files])
    problems = []
    for path, part in zip(files, parts, strict=True):
        if part is None:
            problems.append(Problem(_KEY, f"{path} cannot be read; give yourself permission, or {_REMEDY}"))
        elif part.size <= len(part.data) and (problem := task_file_problem(part.data)) is not None:
            problems.append(Problem(_KEY, f"{path} cannot be loaded: {problem}; {_REMEDY}"))
    return problems
