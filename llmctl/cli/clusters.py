"""``llmctl clusters list|show|validate|new|setup``: cluster profiles with the user's overlays applied."""

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from llmctl.cli.cluster_files import new, setup
from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import DEFAULT_CLUSTER, Context, say
from llmctl.errors import LlmctlError
from llmctl.paths import profile_files
from llmctl.site.profile_names import ARGUMENT, cluster_names

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_CLUSTER = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster.", autocompletion=complete_cluster)]


class ClusterRow(TypedDict):
    """A cluster that has a profile."""

    name: str
    """Name of the cluster."""
    scheduler: str
    """Its scheduler; empty if the profile is not valid."""
    description: str
    """The profile's description; or its fault, after ``not valid:``."""
    files: list[str]
    """Files of the profile; each lies over those before it."""


class ClusterPlaces(TypedDict):
    """The sources of a profile's values."""

    files: list[str]
    """Files of the profile; each lies over those before it."""
    origins: dict[str, str]
    """Dotted key -> the file that sets it; other keys have llmctl's defaults."""


@app.callback()
def clusters() -> None:
    """List, show, check and write cluster profiles."""


@app.command("list")
def list_clusters(ctx: typer.Context, as_json: _JSON = False) -> None:
    """List all clusters that have a profile."""
    context: Context = ctx.obj
    rows = [cluster_row(context, name) for name in cluster_names(context.folders)]
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
    """Print a cluster's values and the file of each value. Other keys have llmctl's defaults."""
    from llmctl.site.profile_origins import annotated_lines, origins

    context: Context = ctx.obj
    folders = context.folders
    profile = context.profile(name, ARGUMENT)
    files = profile_files(folders, name)
    found = origins(folders, name)
    values = profile.model_dump(mode="json")
    if as_json:
        print_json(cluster_document(context, name))
        return
    words = {path: "yours" if path.is_relative_to(folders.clusters) else "bundled" for path in files}
    marks = {key: words[path] for key, path in found.items()}
    if context.environment.get("LLMCTL_RUNS_ROOT"):
        marks["runs_root"] = "LLMCTL_RUNS_ROOT"
    for path in files:
        print(f"# {path}  ({words[path]})")
    print("\n".join(annotated_lines(values, marks)))


@app.command()
def validate(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Default: all; yours and local in full.", autocompletion=complete_cluster),
    ] = None,
) -> int:
    """Check profiles: keys and values; on the cluster, that runs_root is writable and the jobs' Python starts."""
    from llmctl.context import resolve_profile_paths
    from llmctl.submit.check_job import check_runs_root
    from llmctl.submit.checks.torch_check import check_job_python

    context: Context = ctx.obj
    worst = 0
    for name in names or cluster_names(context.folders):
        try:
            profile = context.profile(name, ARGUMENT)
            if names or _is_in_use(context, name):
                profile = resolve_profile_paths(profile, context)
                check_runs_root(profile, context)
                check_job_python(profile, context)
        except LlmctlError as error:
            say(f"llmctl: {error.message}")
            worst = max(worst, error.exit_code)
        else:
            print(f"{name}: valid")
    return worst


def cluster_document(context: Context, name: str) -> dict[str, Any]:
    """The document of ``clusters show --json``.

    Raises:
        ProfileError: there is no such cluster, or its profile is not valid.
    """
    from llmctl.site.profile_origins import origins

    values = context.profile(name, ARGUMENT).model_dump(mode="json")
    places: ClusterPlaces = {
        "files": [str(path) for path in profile_files(context.folders, name)],
        "origins": {key: str(path) for key, path in origins(context.folders, name).items()},
    }
    return {**values, **places}


def _is_in_use(context: Context, name: str) -> bool:
    """True if the user has set a cluster up. Users may have no account at a bundled profile's site."""
    return name == DEFAULT_CLUSTER or (context.folders.clusters / f"{name}.yaml").is_file()


def cluster_row(context: Context, name: str) -> ClusterRow:
    """A cluster in the list: its scheduler, description and files; for a profile that is not valid, the reason."""
    files = [str(path) for path in profile_files(context.folders, name)]
    try:
        profile: ClusterProfile = context.profile(name, ARGUMENT)
    except LlmctlError as error:
        return {"name": name, "scheduler": "", "description": f"not valid: {error.message}", "files": files}
    return {"name": name, "scheduler": profile.scheduler, "description": profile.description, "files": files}


app.command()(new)
app.command()(setup)
