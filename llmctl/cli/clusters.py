"""``llmctl clusters list|show|validate|new``: the profiles, as they hold after the user's overlay."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console, say
from llmctl.errors import LlmctlError, ProfileError, UsageError
from llmctl.invocation import Invocation
from llmctl.profile_names import ARGUMENT, NAME, cluster_names, profile_files

if TYPE_CHECKING:
    from llmctl.profile import ClusterProfile

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_CLUSTER = Annotated[str, typer.Argument(metavar="NAME", help="The cluster.", autocompletion=complete_cluster)]
_Text = str | None


@app.callback()
def clusters() -> None:
    """List, show, check and write cluster profiles."""


@app.command("list")
def list_clusters(ctx: typer.Context, as_json: _JSON = False) -> None:
    """Every cluster that there is a profile for."""
    invocation: Invocation = ctx.obj
    rows = [_row(invocation, name) for name in cluster_names(invocation.folders)]
    if as_json:
        print_json(rows)
    elif is_for_people():
        from rich.table import Table

        table = Table("cluster", "scheduler", "description", "profile", box=None, header_style="bold")
        for row in rows:
            table.add_row(row["name"], row["scheduler"], row["description"], "\n".join(row["files"]))
        rich_console().print(table)
    else:
        for row in rows:
            print("\t".join((row["name"], row["scheduler"], row["description"], " ".join(row["files"]))))


@app.command()
def show(ctx: typer.Context, name: _CLUSTER, as_json: _JSON = False) -> None:
    """The values that hold for one cluster, and the files that they come from."""
    invocation: Invocation = ctx.obj
    profile = invocation.profile(name, ARGUMENT)
    files = [str(path) for path in profile_files(invocation.folders, name)]
    values = profile.model_dump(mode="json")
    if as_json:
        print_json({**values, "files": files})
        return
    import yaml

    print("".join(f"# {file}\n" for file in files), end="")
    print(yaml.safe_dump(values, sort_keys=False), end="")


@app.command()
def validate(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Default: all.", autocompletion=complete_cluster)
    ] = None,
) -> int:
    """Check profiles: keys, values, and that runs_root can hold runs and the environment's Python starts."""
    from llmctl.submit_checks import check_runs_root, check_torch

    invocation: Invocation = ctx.obj
    worst = 0
    for name in names or cluster_names(invocation.folders):
        try:
            profile = invocation.profile(name, ARGUMENT)
            check_runs_root(profile, invocation)
            check_torch(profile, invocation)
        except LlmctlError as error:
            say(f"llmctl: {error.message}")
            worst = max(worst, error.exit_code)
        else:
            print(f"{name}: valid")
    return worst


@app.command()
def new(
    ctx: typer.Context,
    name: Annotated[_Text, typer.Argument(metavar="NAME", help="What to call it.")] = None,
    scheduler: Annotated[_Text, typer.Option(metavar="NAME", help="What starts jobs there.")] = None,
    runs_root: Annotated[_Text, typer.Option("--runs-root", metavar="DIR", help="Folder for the runs.")] = None,
    description: Annotated[_Text, typer.Option(metavar="TEXT", help="One line about it.")] = None,
    group: Annotated[_Text, typer.Option(metavar="G", help="What the site bills to.")] = None,
    venv: Annotated[_Text, typer.Option(metavar="DIR", help="Virtual environment of the jobs.")] = None,
    conda: Annotated[_Text, typer.Option(metavar="DIR", help="Conda environment of the jobs.")] = None,
    module: Annotated[
        list[str] | None, typer.Option("--module", metavar="NAME", help="Environment module to load. Repeatable.")
    ] = None,
) -> None:
    """Write a commented profile to your own folder. On a terminal it asks for what no flag says."""
    from llmctl.backends import MODULES
    from llmctl.new_profile import NewProfile, profile_text

    invocation: Invocation = ctx.obj
    asks = is_for_people() and scheduler is None
    chosen = _name(name if name is not None or not asks else typer.prompt("Name of the cluster"))
    path = invocation.folders.clusters / f"{chosen}.yaml"
    if path.exists():
        raise UsageError(f"NAME {chosen}: {path} is there already and is never overwritten; edit it")
    if venv is not None and conda is not None:
        raise UsageError("--conda: excludes --venv; give one of the two")
    scheduler = scheduler or (typer.prompt(f"Scheduler ({', '.join(MODULES)})", default="local") if asks else None)
    if scheduler not in MODULES:
        raise UsageError(f"--scheduler {scheduler or ''}: give one of {', '.join(MODULES)}")
    text = profile_text(
        NewProfile(
            scheduler=scheduler,
            description=description or _ask(asks, "One line about it", ""),
            runs_root=runs_root or _ask(asks, "Folder for the runs, seen by all nodes", "~/llmctl-runs"),
            group=group or _ask(asks, "Group, project or account to bill (empty: none)", "") or None,
            kind="venv" if venv else "conda" if conda else None,
            path=venv or conda,
            modules=tuple(module or ()),
        )
    )
    _write(path, text)
    _check_written(invocation, chosen, path)
    print(path)


def _row(invocation: Invocation, name: str) -> dict[str, Any]:
    files = [str(path) for path in profile_files(invocation.folders, name)]
    try:
        profile: ClusterProfile = invocation.profile(name, ARGUMENT)
    except LlmctlError as error:
        return {"name": name, "scheduler": "", "description": f"not valid: {error.message}", "files": files}
    return {"name": name, "scheduler": profile.scheduler, "description": profile.description, "files": files}


def _name(text: str | None) -> str:
    if text is None or not NAME.fullmatch(text):
        raise UsageError(f"NAME {text or ''}: give letters, digits, dashes and underscores, as in `clusters new lab`")
    return text


def _ask(asks: bool, question: str, default: str) -> str:
    return str(typer.prompt(question, default=default)) if asks else default


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already and is never overwritten; edit it") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror}") from None


def _check_written(invocation: Invocation, name: str, path: Path) -> None:
    try:
        invocation.profile(name, ARGUMENT)
    except LlmctlError:
        path.unlink()
        raise
