"""Build an environment on a cluster's machine: one step after the other, each recorded when it is done."""

import json
import time
from collections.abc import Mapping
from typing import Any

from llmctl.durations import duration_text
from llmctl.errors import FollowedRunFailed, ProfileError
from llmctl.operate.environment.causes import cause_of
from llmctl.operate.environment.compile_job import follow_job, submit_step
from llmctl.operate.environment.compile_steps import PROGRAM
from llmctl.operate.environment.plan import Plan, Site, states
from llmctl.operate.environment.steps import RECORD, Step, keys_of
from llmctl.submit.render import environment_script
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite

# $1: the log; $2: the script that loads the profile's modules; $3: the step.
_RUN = """\
set -o pipefail
mkdir -p -- "$(dirname -- "$1")" || exit 1
bash -c "$2" bash bash -c "$3" </dev/null 2>&1 | tee -- "$1" >&2
"""
_LOOK_TIMEOUT_S = 300.0
"""The first import of torch from a busy parallel file system takes minutes."""
_TAIL_BYTES = 20_000
_TAIL_LINES, _TAIL_COLUMNS = 12, 240


def build_environment(plan: Plan) -> int:
    """Carry out the steps that are not done, with their output on standard error; returns the exit code.

    The code is 0, or that of Ctrl-C during a job, which goes on.

    Raises:
        ProfileError: a step failed; names the step, command, last lines and cause. Or the path holds something else.
        SchedulerError: the machine does not answer.
        RecordError: another llmctl builds an environment there.
    """
    if plan.found.records is None and not plan.found.is_free:
        raise ProfileError(
            f"{plan.wanted.path}: holds files that llmctl env build has not made; nothing is changed there\n"
            "choose a new folder with --path"
        )
    folder = f"{plan.site.own}/env-build"
    plan.site.transport.write_files([FileWrite(f"{folder}/{PROGRAM.name}", PROGRAM.read_bytes())])
    with plan.site.transport.lock(f"{folder}/lock"):
        return _carry_out_all(plan)


def _carry_out_all(plan: Plan) -> int:
    site, steps, kept = plan.site, plan.steps, dict[str, Any]()
    for number, (step, key, state) in enumerate(zip(steps, keys_of(steps), states(plan), strict=True), 1):
        head = f"[{number}/{len(steps)}] {step.name}"
        if state == "done":
            kept[step.name] = (plan.found.records or {})[step.name]
            site.context.tell(f"{head}: done before")
            continue
        site.context.tell(f"{head}: {'again, since its inputs have changed' if state == 'changed' else 'begins'}")
        began = time.monotonic()
        # Before the step: of the steps from here on, none is done while it runs.
        _save(plan, kept)
        if step.present and _is_present(step, site):
            site.context.tell(f"{head}: the wheel was compiled before")
        elif step.in_job and site.has_queue:
            code = _carry_out_in_job(plan, step, key, kept)
            if code:
                return code
        else:
            _carry_out(step, site)
        kept[step.name] = {"key": key, "inputs": dict(step.inputs), "finished": site.transport.now()}
        _save(plan, kept)
        site.context.tell(f"{head}: done in {duration_text(round(time.monotonic() - began))}")
    return 0


def _save(plan: Plan, kept: Mapping[str, Any]) -> None:
    path, transport = plan.wanted.path, plan.site.transport
    text = json.dumps({"steps": kept}, indent=1) + "\n"
    try:
        transport.make_folder(path)
        transport.write_files([FileWrite(f"{path}/{RECORD}", text.encode())])
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror}\nchoose another --path") from None


def _loading(site: Site) -> str:
    """Script that runs its arguments with the profile's modules."""
    return environment_script(site.bare_profile, site.context.folders)


def _carry_out(step: Step, site: Site) -> None:
    argv = ["bash", "-c", _RUN, "bash", site.log(step), _loading(site), site.script(step.lines)]
    status = site.transport.run_interactive(argv)
    if status:
        raise step_failure(step, site, f"exit status {status}")


def _is_present(step: Step, site: Site) -> bool:
    argv = ["bash", "-c", _loading(site), "bash", "bash", "-c", site.script(step.present)]
    return site.transport.run(argv, timeout_s=_LOOK_TIMEOUT_S, only_reads=True).exit_status == 0


def _carry_out_in_job(plan: Plan, step: Step, key: str, kept: Mapping[str, Any]) -> int:
    """Carry out a step in a job, or wait for the job of an interrupted build; returns the exit code of Ctrl-C, or 0."""
    site, before = plan.site, (plan.found.records or {}).get(step.name, {})
    run_id = before.get("run_id") if before.get("key") == key else None
    try:
        code = follow_job(site, run_id) if run_id is not None else None
        if code is None:
            run_id = submit_step(step, plan.wanted.path, site)
            _save(plan, {**kept, step.name: {"key": key, "run_id": run_id}})
            code = follow_job(site, run_id) or 0
    except FollowedRunFailed as error:
        _save(plan, kept)
        raise step_failure(step, site, error.message.replace("\n", "; ")) from None
    if code == 0 and not _is_present(step, site):
        _save(plan, kept)
        raise step_failure(step, site, f"{run_id} completed without a wheel that {site.transport.host} sees")
    return code


def step_failure(step: Step, site: Site, how: str) -> ProfileError:
    """The error of a failed step, from its log."""
    (part,) = site.transport.read_parts([FileRead(site.log(step), offset=-_TAIL_BYTES, limit=_TAIL_BYTES)])
    output = part.data.decode(errors="replace") if part is not None else ""
    lines = [line.rstrip()[:_TAIL_COLUMNS] for line in output.splitlines() if line.strip()][-_TAIL_LINES:]
    cause = cause_of(output)
    parts = [
        f"step {step.name} failed ({how}); the steps before stay, and the same command goes on here",
        *(f"  $ {line}" for line in step.lines),
        *(f"  | {line}" for line in lines),
        *([cause] if cause else []),
        f"the whole output: {site.log(step)}",
    ]
    return ProfileError("\n".join(parts))
