"""``llmctl clusters new|setup``: write the user's own files; on a terminal, ask for values not given by flags."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people
from llmctl.context import Context, say
from llmctl.errors import LlmctlError, ProfileError, UsageError
from llmctl.paths import CLUSTER_NAME
from llmctl.site.profile_names import ARGUMENT

if TYPE_CHECKING:
    from llmctl.backends.base import Capabilities
    from llmctl.operate.cluster_setup import Answers
    from llmctl.site.profile import ClusterProfile

_KINDS = ("venv", "conda", "container")


def _flag(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


_Runs = Annotated[str | None, _flag("--runs-root", "DIR", "Folder of the run directories, shared by all nodes.")]
_Group = Annotated[str | None, _flag("--group", "GROUP", "Group, project or account to bill.")]
_Login = Annotated[str | None, _flag("--login", "HOST", "Login node, as ssh knows it; empty: this machine.")]
_Hosts = Annotated[list[str] | None, _flag("--host", "HOST", "ssh: one of the machines, head node first. Repeatable.")]
_Venv = Annotated[str | None, _flag("--venv", "DIR", "Virtual environment of the jobs.")]
_Conda = Annotated[str | None, _flag("--conda", "DIR", "Conda environment of the jobs.")]
_Image = Annotated[str | None, _flag("--container-image", "IMAGE", "Container image of the jobs.")]
_Python = Annotated[str | None, _flag("--python", "FILE", "Interpreter of the jobs, instead of the environment's.")]
_Modules = Annotated[list[str] | None, _flag("--module", "NAME", "Environment module to load. Repeatable.")]
_Interface = Annotated[str | None, _flag("--interface", "NAME", "Network interface for the rendezvous.")]


def new(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the new cluster.")] = None,
    scheduler: Annotated[str | None, _flag("--scheduler", "NAME", "The cluster's scheduler.")] = None,
    runs_root: _Runs = None,
    description: Annotated[str | None, _flag("--description", "TEXT", "One line about the cluster.")] = None,
    group: _Group = None,
    login: _Login = None,
    host: _Hosts = None,
    resource_type: Annotated[
        str | None, _flag("--resource-type", "TYPE", "Kind of node, under the site's name.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus-per-node", metavar="N", min=0, help="GPUs per node.")] = None,
    interface: _Interface = None,
    venv: _Venv = None,
    conda: _Conda = None,
    container_image: _Image = None,
    python: _Python = None,
    module: _Modules = None,
) -> None:
    """Write a commented profile to your config folder. On a terminal, asks for values not given by flags."""
    from llmctl.backends import capabilities_of
    from llmctl.operate.new_profile import NewProfile, profile_text

    context: Context = ctx.obj
    asks = is_for_people() and scheduler is None
    chosen = _name(name if name is not None or not asks else typer.prompt("Name of the cluster"))
    path = context.folders.clusters / f"{chosen}.yaml"
    if path.exists():
        raise UsageError(f"NAME {chosen}: {path} already exists and is never overwritten; edit the file")
    kind, place = _environment(venv, conda, container_image)
    chosen_scheduler = _scheduler(scheduler, asks)
    question = _Questions(asks, capabilities_of(chosen_scheduler))
    values = NewProfile(
        scheduler=chosen_scheduler,
        description=description or question.ask("One line about the cluster") or "",
        login=login
        if login is not None
        else question.ask("Login node, as ssh knows it (empty: this machine)", "queue"),
        hosts=tuple(host or question.words("Machines, head node first, as ssh knows them", "hosts")),
        runs_root=runs_root
        or question.ask("Folder of the run directories, shared by all nodes", default="~/llmctl-runs")
        or "",
        group=group or question.ask("Group, project or account to bill (empty: none)", "queue"),
        resource_type=resource_type or question.ask("Kind of node, under the site's name (empty: later)", "nodes"),
        gpus=gpus if gpus is not None else question.number("GPUs per node", "nodes"),
        interface=interface or question.ask("Network interface of the nodes (empty: automatic)", "nodes"),
        kind=kind,
        path=place,
        python=python,
        modules=tuple(module or ()),
    )
    _write(path, profile_text(values))
    _check_written(context, chosen, path)
    print(path)


def setup(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster.", autocompletion=complete_cluster)],
    group: _Group = None,
    runs_root: _Runs = None,
    login: _Login = None,
    host: _Hosts = None,
    venv: _Venv = None,
    conda: _Conda = None,
    container_image: _Image = None,
    python: _Python = None,
    module: _Modules = None,
    interface: _Interface = None,
) -> None:
    """Write your own values for a cluster. On a terminal, without flags, asks for the values."""
    from llmctl.operate.cluster_setup import Answers, below_home, write_overlay
    from llmctl.site.profile import load_profile

    context: Context = ctx.obj
    folders = context.folders
    profile = load_profile(folders, name, ARGUMENT)
    kind, place = _environment(venv, conda, container_image)
    flags = (group, runs_root, login, host, place, python, module, interface)
    answers = Answers(
        login=login,
        group=group,
        runs_root=runs_root and below_home(runs_root, folders),
        kind=kind,
        path=place and below_home(place, folders),
        python=python and below_home(python, folders),
        modules=None if module is None else tuple(module),
        interface=interface,
        hosts=None if host is None else tuple(host),
    )
    if all(flag is None for flag in flags):
        if not is_for_people():
            raise UsageError(f"clusters setup {name}: give values, as in --group G --runs-root DIR --venv DIR")
        answers = _asked(context, profile)
    elif runs_root is None:
        answers = _with_work_area(context, profile, answers)
    path = write_overlay(folders, name, answers)
    if path is None:
        say(f"nothing written: {name} already has all of these values")
        return
    print(path)
    say(f"llmctl doctor --cluster {name} checks the cluster")


def _asked(context: Context, profile: "ClusterProfile") -> "Answers":
    """Ask the user for each value, with the present value as the default."""
    from llmctl.backends import capabilities_of
    from llmctl.operate.cluster_setup import Answers

    capabilities = capabilities_of(profile.scheduler)
    question = _Questions(True, capabilities)
    login = hosts = None
    if capabilities.starts_on_hosts:
        hosts = question.words("Machines, head node first, as ssh knows them", default=" ".join(profile.hosts))
    elif capabilities.has_queue:
        here = "Login node, as ssh knows it (empty: this machine)"
        login = question.ask(here, default=profile.login.host or "") or ""
    group = profile.group
    if profile.group_required or capabilities.has_queue:
        group = question.ask("Group, project or account to bill", default=profile.group or "")
    runs = _suggestion(context, profile, Answers(login=login, group=group, hosts=hosts))
    kind = question.choice("Environment of the jobs", (*_KINDS, "none"), profile.environment.kind or "none")
    path = None if kind == "none" else question.ask(_what(kind), default=profile.environment.path or "")
    modules = question.ask("Modules to load, separated by spaces", default=" ".join(profile.environment.modules))
    return Answers(
        login=login,
        hosts=hosts,
        group=group,
        runs_root=question.ask("Folder of the run directories, shared by all nodes", default=runs or ""),
        kind=kind if path else None,
        path=path,
        modules=tuple((modules or "").split()) if modules or profile.environment.modules else None,
    )


def _suggestion(context: Context, profile: "ClusterProfile", answers: "Answers") -> str | None:
    """Suggested runs_root: the present one, or the site's work area."""
    from llmctl.site.unset_values import work_area
    from llmctl.transport.ssh.ssh_config import user_on

    if profile.runs_root is not None or profile.work_area is None:
        return profile.runs_root
    hosts = answers.hosts or profile.hosts
    host = profile.login.host if answers.login is None else answers.login
    user = user_on(hosts[0] if hosts else host, context.environment)
    return work_area(profile, group=answers.group or profile.group, user=user)


def _with_work_area(context: Context, profile: "ClusterProfile", answers: "Answers") -> "Answers":
    """Fill in the site's work area if neither profile nor flags name a runs_root."""
    from dataclasses import replace

    if profile.runs_root is not None:
        return answers
    runs = _suggestion(context, profile, answers)
    if runs is None:
        return answers
    say(f"runs_root: {runs}, the work area of {profile.name}; --runs-root names another folder")
    return replace(answers, runs_root=runs)


def _environment(venv: str | None, conda: str | None, image: str | None) -> tuple[str | None, str | None]:
    """Kind and path of the environment given by flags."""
    given = {"--venv": venv, "--conda": conda, "--container-image": image}
    named = [flag for flag, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{named[1]}: excludes {named[0]}; give only one of the two")
    if not named:
        return None, None
    return _KINDS[list(given).index(named[0])], given[named[0]]


def _what(kind: str) -> str:
    return "Image: a file, or a name in a registry" if kind == "container" else f"Folder of the {kind} environment"


class _Questions:
    """Questions to the user. Questions that do not apply, or without a terminal, have no answer."""

    def __init__(self, asks: bool, capabilities: "Capabilities") -> None:
        self._asks = asks
        self._topics = {
            "all": True,
            "queue": capabilities.has_queue,
            "nodes": not capabilities.starts_in_place,
            "hosts": capabilities.starts_on_hosts,
        }

    def ask(self, question: str, topic: str = "all", *, default: str = "") -> str | None:
        """Ask for one line; None for an empty line."""
        if not self._asks or not self._topics[topic]:
            return default or None
        return str(typer.prompt(question, default=default, show_default=bool(default))).strip() or None

    def words(self, question: str, topic: str = "all", *, default: str = "") -> tuple[str, ...]:
        """Ask for words separated by spaces."""
        return tuple((self.ask(question, topic, default=default) or "").replace(",", " ").split())

    def number(self, question: str, topic: str) -> int | None:
        """Ask for a number; None if the question does not apply."""
        return int(typer.prompt(question, default=0, type=int)) if self._asks and self._topics[topic] else None

    def choice(self, question: str, choices: Sequence[str], default: str) -> str:
        """Ask for one of several words."""
        while True:
            answer = str(typer.prompt(f"{question} ({', '.join(choices)})", default=default)).strip()
            if answer in choices:
                return answer
            say(f"give one of {', '.join(choices)}")


def _name(text: str | None) -> str:
    if text is None or not CLUSTER_NAME.fullmatch(text):
        raise UsageError(f"NAME {text or ''}: give letters, digits, dashes and underscores, as in `clusters new lab`")
    return text


def _scheduler(flag: str | None, asks: bool) -> str:
    from llmctl.site.profile import SCHEDULERS, check_scheduler

    question = f"Scheduler ({', '.join(SCHEDULERS)})"
    scheduler = flag or (str(typer.prompt(question, default="local")) if asks else "")
    try:
        check_scheduler(scheduler)
    except ValueError as error:
        what = f"--scheduler {scheduler}" if scheduler else "--scheduler: is unset"
        raise UsageError(f"{what}: {error}; give one of them") from None
    return scheduler


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} already exists and is never overwritten; edit the file") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror}") from None


def _check_written(context: Context, name: str, path: Path) -> None:
    from llmctl.site.profile import load_profile

    try:
        load_profile(context.folders, name, ARGUMENT)
    except LlmctlError:
        path.unlink()
        raise
