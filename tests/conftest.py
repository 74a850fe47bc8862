"""Fixtures of all tests: an empty home, no leftover processes, and reported skips."""

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.rank_server import stop_rank_server

# No test asserts a time: other processes may slow the machine down.
settings.register_profile("llmctl", deadline=None)
settings.load_profile("llmctl")
SESSION_MARK = "LLMCTL_PYTEST_SESSION"
# Ends of the paths of the files that take longest, in this order.
LONGEST = (
    "parity/test_parity.py",
    "test_cuda_ops.py",
    "test_fully_sharded.py",
    "test_mutations.py",
    "test_instruction_levels.py",
    "checkpoint/test_resume.py",
    "test_gpu_plugin.py",
    "test_cuda_compile.py",
    "test_pretraining.py",
    "test_examples.py",
    "test_distributed_optimizer.py",
    "checkpoint/test_training.py",
    "test_executor.py",
    "test_full_width.py",
    "test_plain_pytorch.py",
    "test_failure.py",
    "tools/test_command.py",
    "test_adamw.py",
    "test_softmax.py",
    "test_activation.py",
    "ops/test_cross_entropy.py",
    "test_render.py",
    "test_packaging.py",
    "test_recompute_ranks.py",
    "test_schedule.py",
    "checkpoint/test_layouts.py",
)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set HOME and the XDG folders to an empty folder, and unset the user's LLMCTL_* variables.

    Package caches keep their place, so that the test of the wheel need not download everything again. So does the
    cache of kernels, whose build takes a minute.
    """
    before = dict(os.environ)
    home = tmp_path_factory.mktemp("home")
    cache = Path(before.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for name in before:
        if name.startswith(("LLMCTL_", "XDG_", "SLURM_", "OMPI_", "PMI_")):
            del os.environ[name]
    os.environ.setdefault("PIP_CACHE_DIR", str(cache / "pip"))
    os.environ["LLMCTL_CACHE_DIR"] = before.get("LLMCTL_CACHE_DIR") or str(cache / "llmctl")
    os.environ.update({"HOME": str(home), SESSION_MARK: uuid.uuid4().hex})
    yield
    stop_rank_server()
    left = _processes_of(os.environ[SESSION_MARK])
    os.environ.clear()
    os.environ.update(before)
    assert not left, "processes left behind by the tests:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Let programs under test receive SIGINT even if a shell runs the tests in the background.

    By POSIX such a shell starts programs with SIGINT ignored, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _processes_of(mark: str, patience_s: float = 10.0) -> list[str]:
    """Processes that outlive this session, one line each; waits for processes that are about to end."""
    wanted = f"{SESSION_MARK}={mark}".encode()
    end = time.monotonic() + patience_s
    while True:
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                carries_mark = wanted in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            # multiprocessing keeps one helper per session, which ends together with pytest itself.
            if carries_mark and int(folder.name) != os.getpid() and "resource_tracker" not in command and command:
                left.append(f"{folder.name}: {command}")
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--require-real``: root can start the real schedulers, so none may be skipped. ``--proofs``: the long tests."""
    parser.addoption(
        "--require-real", action="store_true", help="as root, fail when a test of a real scheduler was skipped"
    )
    parser.addoption("--proofs", action="store_true", help="run the tests marked ``proof`` too (make proofs)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail with --require-real if a tier was skipped: a skip must not look like a pass."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # A worker of pytest-xdist has no reporter: the main process checks the results of all workers.
    if reporter is None or not session.config.getoption("--require-real") or os.geteuid() != 0:
        return
    # `make proofs` runs proofs, also those of real schedulers.
    left_out = set() if session.config.getoption("--proofs") else {"proof"}
    skipped = [
        report.nodeid
        for report in reporter.stats.get("skipped", [])
        if "real" in report.keywords and not left_out & set(report.keywords)
    ]
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.ensure_newline()
        reporter.write_line("skipped although this is root: " + ", ".join(skipped))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, so that workers end together; skip what the machine cannot run, and proofs."""
    items.sort(key=lambda item: _turn(item.path))
    _skip_without_gpu(items)
    if not (config.getoption("--require-real") and os.geteuid() == 0):
        _skip_without_programs(items)
    if not config.getoption("--proofs"):
        for item in items:
            if item.get_closest_marker("proof"):
                item.add_marker(pytest.mark.skip(reason="make proofs runs this"))


def _turn(path: Path) -> int:
    """Sort key that puts the longest files first. The sort is stable: other files keep their order."""
    place = f"/{path.as_posix()}"
    return next((rank for rank, end in enumerate(LONGEST) if place.endswith(f"/{end}")), len(LONGEST))


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a GPU; torch is imported only if such tests exist."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    lack = lack_of_gpu() if on_gpu else None
    for item in on_gpu:
        if lack is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {lack}"))


def _skip_without_programs(items: list[pytest.Item]) -> None:
    """Skip tests whose programs are missing; with --require-real they run, so that they fail."""
    for item in items:
        wanted = [name for mark in item.iter_markers("programs") for name in mark.args]
        missing = [name for name in wanted if shutil.which(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def lack_of_gpu() -> str | None:
    """Reason to skip GPU tests; None with a GPU, even if torch cannot use it."""
    import torch

    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if not torch.cuda.is_available() and not any(Path("/dev").glob("nvidia[0-9]*")):
        return "there is none"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests and the reasons, so that no skip goes unnoticed."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(
            f"not run: {count} test{'s' if count > 1 else ''} ({reason.removeprefix('Skipped: ')})"
        )
