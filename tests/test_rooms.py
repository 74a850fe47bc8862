"""The rooms: allowed arrows between them, their width, and the first words of docstrings."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import MODULES, PACKAGES, ROOT, imports_of, tree_of

MAX_FILES = 20
MAX_CRUMBS, CRUMB_LINES = 3, 30
CODE_SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h", ".j2"}
QUESTION_WORDS = {"what", "which", "how", "why", "whether", "when", "where", "that"}

# Package -> room -> the rooms that it may import, at load, inside a function or for type checking. A room is a folder
# or a file of the package. A new arrow is a decision: it must not close a cycle.
GROUND = {"errors", "distribution", "durations", "job_state", "paths", "terminal_text"}
ALLOWED: dict[str, dict[str, set[str]]] = {
    "llmctl": {
        "paths": {"errors"},
        "distribution": {"paths"},
        "site": {"errors", "paths"},
        "scripts": {"errors", "site"},
        "backends": {"durations", "errors", "job_state", "site"},
        "supervisor": set(),
        "transport": {"errors", "paths", "site", "supervisor", "terminal_text"},
        # The supervisor decides on hangs by the same rules.
        "runs": {"backends", "durations", "errors", "job_state", "supervisor", "terminal_text", "transport"},
        "context": {
            *("backends", "errors", "job_state", "paths", "runs", "site", "supervisor", "terminal_text", "transport"),
        },
        "submit": {*GROUND, "backends", "context", "runs", "scripts", "site", "supervisor", "transport"},
        "doctor": {*GROUND, "backends", "context", "site", "submit", "transport"},
        "operate": {*GROUND, "backends", "context", "doctor", "runs", "site", "submit", "supervisor", "transport"},
        "api": {*GROUND, "context", "operate", "runs", "submit"},
        "mcp_server": {*GROUND, "api", "operate", "runs", "transport"},
        "watch": {*GROUND, "backends", "context", "operate", "runs", "transport"},
        "cli": {
            *(*GROUND, "backends", "context", "doctor", "operate", "runs", "scripts", "site", "submit", "transport"),
            *("api", "mcp_server", "watch"),
        },
        "__main__": {"cli"},
    },
    "trainer": {
        "families": {"config"},
        "planning": {"config", "families"},
        "process": {"config"},
        "preflight": {"config", "process"},
        "tuning": {"process"},
        "speed_test": {"config", "distributed", "process"},
        "hooks": {"config", "distributed"},
        "trackers": {"config", "hooks", "process"},
        "distributed": {"config", "planning"},
        "ops": {"config", "distributed", "planning"},
        # A GGUF file holds a tokenizer beside its model.
        "data": {"config", "distributed", "families", "hooks"},
        "model": {"config", "data", "distributed", "ops", "planning"},
        "data_parallel": {"config", "distributed", "model"},
        "parallel_model": {"config", "data_parallel", "distributed", "model", "ops", "planning"},
        "optimizer": {"config", "data_parallel", "ops", "parallel_model"},
        "pipeline": {"data", "distributed", "model", "parallel_model", "planning"},
        "hub": {"families"},
        "checkpoint": {
            *("config", "data_parallel", "distributed", "families", "hub", "model", "optimizer", "parallel_model"),
            "process",
        },
        "conversion": {
            *("checkpoint", "config", "distributed", "families", "hub", "parallel_model", "pipeline", "planning"),
            "process",
        },
        "training": {
            *(
                "checkpoint",
                "config",
                "conversion",
                "data",
                "distributed",
                "evaluation",
                "generation",
                "hooks",
                "ops",
                "optimizer",
            ),
            *("parallel_model", "pipeline", "planning", "preflight", "process", "trackers"),
        },
        "generation": {
            *("checkpoint", "config", "conversion", "data", "distributed", "hub", "model", "ops", "parallel_model"),
            *("pipeline", "planning", "process"),
        },
        "evaluation": {"config", "data", "generation", "pipeline"},
        "commands": {
            *("checkpoint", "config", "conversion", "data", "distributed", "evaluation", "families", "generation"),
            *("hub", "ops", "planning", "process", "training"),
        },
        "__main__": {"config", "process", "trackers"},
    },
    "trainer.data": {
        "tokenizers": {"errors"},
        "indexed": {"errors", "tokenizers"},
        "prepare": {"background", "errors", "indexed", "tokenizers"},
        "samples": {"errors", "indexed", "tokenizers"},
        "masked": {"errors", "indexed", "samples", "tokenizers"},
        "streaming": {"background", "errors", "prepare", "samples", "tokenizers", "watchdog"},
        "loading": {"errors", "masked", "samples", "streaming", "tokenizers", "watchdog"},
        "commands": {"errors", "indexed", "prepare", "tokenizers"},
    },
    "trainer.model": {
        "initial_values": {"shard_box"},
        "sharding": {"initial_values", "shard_box"},
        "norm": {"sharding"},
        "mlp": {"recompute", "sharding", "tensor_parallel"},
        "context": {"cache", "context_parallel", "linear_bias", "rotary", "tensor_parallel"},
        "dropout": {"context"},
        "attention": {"context", "context_parallel", "dropout", "norm", "recompute", "sharding", "tensor_parallel"},
        "moe": {"context", "context_parallel", "mlp", "recompute", "sharding", "tensor_parallel"},
        "block": {"attention", "context", "dropout", "mlp", "moe", "norm", "recompute", "sharding"},
        "embedding": {"context", "dropout", "norm", "sharding", "tensor_parallel"},
        "head": {"embedding", "norm", "sharding", "tensor_parallel"},
        "mtp": {"block", "context", "embedding", "head", "norm", "sharding", "tensor_parallel"},
        "stage": {"cache", "context"},
        "encoder_decoder": {
            *("attention", "cache", "context", "dropout", "head", "mlp", "norm", "recompute", "rotary"),
            *("sharding", "stage", "tensor_parallel"),
        },
        "decoder": {
            *("block", "cache", "context", "embedding", "head", "linear_bias", "mtp", "norm", "recompute", "rotary"),
            *("sharding", "stage"),
        },
    },
    "trainer.ops": {
        "attention": {"build"},
        "cross_entropy_reference": {"loss_terms"},
        "cross_entropy": {"autograd", "cross_entropy_reference", "loss_terms", "operation"},
        "adamw": {"master_halves", "operation"},
        "tensor_lists": {"operation"},
        **dict.fromkeys(
            ("activation", "bias_dropout_add", "layer_norm", "moe_permute", "rms_norm", "rotary", "softmax"),
            {"autograd", "operation"},
        ),
        "dispatch": {"attention", "build", "operation"},
        "tools": {"build", "dispatch"},
    },
}


def room_of(module: str, package: str) -> str:
    """The first name below ``package``; empty for the package itself."""
    return module.removeprefix(package).lstrip(".").partition(".")[0]


@functools.cache
def arrows(package: str) -> dict[str, dict[str, str]]:
    """Room -> imported room -> one place of the import."""
    found: dict[str, dict[str, str]] = {}
    for module in MODULES:
        if not module.startswith(f"{package}."):
            continue
        for one in imports_of(module, with_types=True):
            if one.target in MODULES and one.target.startswith(f"{package}."):
                source, target = room_of(module, package), room_of(one.target, package)
                if source != target:
                    found.setdefault(source, {})[target] = str(one)
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_rooms_import_only_what_the_table_allows(package: str) -> None:
    wrong = [
        place
        for source, targets in arrows(package).items()
        for target, place in targets.items()
        if target not in ALLOWED[package].get(source, set())
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ALLOWED)
def test_every_arrow_of_the_table_is_used(package: str) -> None:
    used = arrows(package)
    unused = {
        room: sorted(targets - set(used.get(room, ()))) for room, targets in ALLOWED[package].items() if room != "cli"
    }
    wide = {room: [target for target in names if target not in GROUND] for room, names in unused.items()}
    assert {room: names for room, names in wide.items() if names} == {}


@pytest.mark.parametrize("package", ALLOWED)
def test_rooms_form_layers(package: str) -> None:
    left = {room: set(targets) for room, targets in ALLOWED[package].items()}
    while free := [room for room, targets in left.items() if not targets & left.keys()]:
        for room in free:
            del left[room]
    assert left == {}


@pytest.mark.parametrize("top", ["llmctl", "trainer", "csrc", "templates", "tests"])
def test_no_folder_has_too_many_files(top: str) -> None:
    files = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / top).rglob("*")
        if path.suffix in CODE_SUFFIXES and path.name != "__init__.py"
    )
    assert {folder: count for folder, count in files.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_too_many_small_modules(package: str) -> None:
    """A few lines belong to the file that needs them. Python itself asks for __init__ and __main__."""
    small = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.stem not in ("__init__", "__main__") and path.read_text(encoding="utf-8").count("\n") < CRUMB_LINES
    )
    assert {folder: count for folder, count in small.items() if count > MAX_CRUMBS} == {}


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of the module, classes, functions and attributes."""
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        has_own = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for before, statement in zip([None, *body], body, strict=False):
            may_be_one = (before is None and has_own) or isinstance(before, (ast.Assign, ast.AnnAssign))
            if may_be_one and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def test_docstrings_do_not_begin_with_a_question_word() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.split()[0]} ..."
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings_of(path)
        if text.split() and text.split()[0].strip("*`\"'.,:").lower() in QUESTION_WORDS
    ]
    assert wrong == []
