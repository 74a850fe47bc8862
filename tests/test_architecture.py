"""Architecture rules on the real import graph: allowed imports, and limits of files and functions."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
PACKAGES = ("llmctl", "trainer")
# The rooms of the trainer that llmctl may import: they check a job before the queue.
OPEN_TO_LLMCTL = ("trainer.config", "trainer.planning")
# The last three run on other machines: llmctl's agent on a login node, and a job's supervisor on a compute node.
ENTRY_POINTS = (
    "llmctl/cli/main.py",
    "llmctl/api/call.py",
    "trainer/__main__.py",
    "llmctl/transport/ssh/agent_program.py",
    "llmctl/transport/ssh/session_program.py",
    "llmctl/supervisor/__main__.py",
)
NETWORK_CLIENTS = {
    "aiohttp",
    "ftplib",
    "http",
    "httpx",
    "huggingface_hub",
    "mlflow",
    "requests",
    "smtplib",
    "urllib",
    "urllib3",
    "wandb",
}
TRACKERS = {"trainer.trackers.mlflow_run": "mlflow", "trainer.trackers.wandb_run": "wandb"}
"""Adapters of dashboards, each with its own package. They are imported only if a config asks for them."""
ASKED_FOR = {("llmctl.supervisor.notices", "urllib"), ("llmctl.site.notify", "urllib.parse")}
"""Clients of what a user has named: an address that is told how a run goes. The second only reads an address."""
REFUSED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted name, and the place of the import."""

    source: str
    target: str
    line: int
    at_load: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file, which many rules read."""
    return ast.parse(path.read_text(encoding="utf-8"))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files(*PACKAGES)}


@functools.cache
def imports_of(module: str, *, with_types: bool = False) -> tuple[Import, ...]:
    """Every import of a module, also inside functions; with ``with_types`` also imports for type checking."""
    return tuple(_imports_of(module, with_types))


def _imports_of(module: str, with_types: bool) -> Iterator[Import]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[tuple[ast.AST, bool]] = [(tree_of(path), True)]
    while pending:
        node, at_load = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not with_types:
            pending += [(child, at_load) for child in node.orelse]
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(module, inner if inner in MODULES else base, node.lineno, at_load)
        inside = at_load and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


ALL_IMPORTS = [found for module in MODULES for found in imports_of(module)]


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_llmctl_never_imports_torch() -> None:
    assert [str(i) for i in ALL_IMPORTS if is_within(i.source, "llmctl") and is_within(i.target, "torch")] == []


def test_llmctl_imports_only_torch_free_rooms_of_the_trainer() -> None:
    wrong = [
        str(i)
        for i in ALL_IMPORTS
        if is_within(i.source, "llmctl")
        and is_within(i.target, "trainer")
        and not any(is_within(i.target, room) for room in OPEN_TO_LLMCTL)
    ]
    assert wrong == []


def test_the_supervisor_imports_nothing_else() -> None:
    """It is copied to machines that have neither llmctl nor the trainer."""
    room = "llmctl.supervisor"
    wrong = [i for i in ALL_IMPORTS if is_within(i.source, room) and is_within(i.target, "trainer")]
    wrong += [
        i
        for i in ALL_IMPORTS
        if is_within(i.source, room) and is_within(i.target, "llmctl") and not is_within(i.target, room)
    ]
    assert [str(i) for i in wrong] == []


def test_trainer_never_imports_llmctl() -> None:
    assert [str(i) for i in ALL_IMPORTS if is_within(i.source, "trainer") and is_within(i.target, "llmctl")] == []


def test_nothing_is_downloaded_and_no_usage_is_reported() -> None:
    """Connections are those of ssh, of the ranks, of what fetches a named image, and to places that the user names."""
    assert [str(each) for each in ALL_IMPORTS if each.target in TRACKERS and each.at_load] == []
    found = [each for module in MODULES for each in imports_of(module) if each.target.split(".")[0] in NETWORK_CLIENTS]
    found = [each for each in found if TRACKERS.get(each.source) != each.target.split(".")[0]]
    assert [each for each in found if (each.source, each.target) not in ASKED_FOR] == []


def loaded_by(modules: list[str]) -> set[str]:
    """Modules loaded by a fresh Python after importing the given modules."""
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("rooms", [("llmctl",), OPEN_TO_LLMCTL], ids=["llmctl", "torch-free rooms of the trainer"])
def test_importing_does_not_load_torch(rooms: tuple[str, ...]) -> None:
    modules = [m for m in MODULES if any(is_within(m, room) for room in rooms) and not m.endswith("__main__")]
    assert set(rooms) <= set(modules)
    loaded = loaded_by(modules)
    assert [m for m in loaded if is_within(m, "torch") or is_within(m, "numpy")] == []


def loaded_with(found: Import) -> set[str]:
    """Our modules that an import loads: the target and its packages, without the importer's own."""
    parts = found.target.split(".")
    names = {".".join(parts[: n + 1]) for n in range(len(parts))}
    return {name for name in names if name in MODULES and not is_within(found.source, name)}


def test_no_import_cycles() -> None:
    """Between files, with imports inside functions and for type checking: whoever reads a file may need them."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in (one for module in MODULES for one in imports_of(module, with_types=True)):
        # An import inside a function runs when its packages are loaded already.
        graph[found.source] |= loaded_with(found) if found.at_load else {found.target} & MODULES.keys()
    # Repeatedly remove the modules that import no remaining module: the modules left at the end form the cycles.
    while free := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in free:
            del graph[module]
    assert {module: sorted(targets & graph.keys()) for module, targets in graph.items()} == {}


def test_the_environment_is_read_in_the_entry_points_only() -> None:
    wrong = []
    for path in MODULES.values():
        place = path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree_of(path)):
            names = {f"os.{alias.name}" for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = {f"{node.value.id}.{node.attr}"}
            if names & {"os.environ", "os.environb", "os.getenv", "os.putenv"} and place not in ENTRY_POINTS:
                wrong.append(f"{place}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def test_every_scheduler_of_a_profile_has_a_backend() -> None:
    from llmctl.backends import MODULES as backends
    from llmctl.site.profile import SCHEDULERS

    assert tuple(backends) == SCHEDULERS


def decisions_by_scheduler_name(tree: ast.AST) -> Iterator[ast.AST]:
    """Comparisons, cases, subscripts and dicts that contain a scheduler's name as text."""
    from llmctl.site.profile import SCHEDULERS

    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [part for side in sides for part in ([side, *getattr(side, "elts", [])])]
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        if any(isinstance(part, ast.Constant) and part.value in SCHEDULERS for part in parts):
            yield node


@pytest.mark.parametrize(
    "text",
    [
        "a.scheduler == 'ssh'",
        "'pbs' != b",
        "b in ('slurm', 'sge')",
        "{'local': 1}",
        "table['sge']",
        "match b:\n    case 'pbs': pass",
    ],
)
def test_decisions_by_scheduler_name_are_found(text: str) -> None:
    assert len(list(decisions_by_scheduler_name(ast.parse(text)))) == 1


def test_only_backends_decide_by_a_scheduler_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '')} {ast.unparse(node)}"
        for module, path in MODULES.items()
        if is_within(module, "llmctl") and not is_within(module, "llmctl.backends")
        for node in decisions_by_scheduler_name(tree_of(path))
    ]
    assert wrong == [], "ask the backend's capabilities instead (llmctl/backends/base.py)"


def test_file_names_are_not_generic() -> None:
    paths = [*MODULES.values(), *python_files("tests", "benchmarks")]
    assert [str(p) for p in paths if REFUSED_NAMES & set(p.relative_to(ROOT).with_suffix("").parts)] == []


def beyond_its_limits(path: Path) -> Iterator[str]:
    """Parts of a file that are too long. Only what the rules read is parsed: the tests have most of the lines."""
    place = path.relative_to(ROOT)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES and "lines because" not in " ".join((ast.get_docstring(tree_of(path)) or "").split()):
        remedy = f"divide it, or say in its first docstring that it is over {MAX_FILE_LINES} lines because ..."
        yield f"{place} has {lines} lines; {remedy}"
    if module_name(path) in MODULES:
        functions = (n for n in ast.walk(tree_of(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for function in functions:
            # Without the signature, whose length depends on the number of flags of a command.
            length = (function.end_lineno or 0) - function.body[0].lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{place}:{function.lineno} {function.name} has {length} lines"


def test_files_and_functions_are_within_their_limits() -> None:
    files = python_files(*PACKAGES, "tests", "benchmarks", "examples")
    assert [wrong for path in files for wrong in beyond_its_limits(path)] == []


def test_no_todo_is_left() -> None:
    # Written in two halves, so that the search does not match this file.
    pattern = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X{3})\b")
    folders = (*PACKAGES, "tests", "benchmarks", "templates", "clusters", "examples", "csrc", "scripts")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if pattern.search(line)
    ]
    assert wrong == []


def test_command_surface_is_frozen() -> None:
    """After adding a command or flag, run tests.command_surface and review the difference; never rename one."""
    from tests.command_surface import surface

    assert surface() == (ROOT / "tests/command_surface.txt").read_text(encoding="utf-8")
