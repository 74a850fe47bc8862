"""CUDA ops through torch: the operations' tests on the emulated GPU, in other processes."""

import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.rank_server import rank_context
from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda, all_kernels, build_emulated_ops
from tests.waiting import HANG_S
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.build.compile_jobs import jobs_that_fit
from trainer.ops.build.sources import source_folder
from trainer.ops.dispatch.library import Library

_HERE = Path(__file__).parent
OPERATIONS = [path.parent.name for path in all_kernels() if path.parent.parent == source_folder()]
TESTED = (*OPERATIONS, "operations")
"""Operations with tests in test_<name>.py; the last file tests all operations together."""
_FEWEST_TESTS = 10

# Outcomes of an operation's tests: name of the test, and its message on failure.
Outcomes = dict[str, str | None]


@pytest.fixture(scope="module")
def runs(
    emulated_cuda: EmulatedCuda, kernel_library: Library, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcomes]]]:
    """Operation -> outcomes of its tests, in parallel processes with time limits."""
    del emulated_cuda, kernel_library
    build_emulated_ops(BuildSettings.from_variables(os.environ))
    folder, context = tmp_path_factory.mktemp("outcomes"), rank_context()
    with ThreadPoolExecutor(jobs_that_fit()) as pool:
        yield {operation: pool.submit(run_tests, context, operation, folder) for operation in TESTED}


def run_tests(context: ForkServerContext, operation: str, folder: Path) -> Outcomes:
    report, log = folder / f"{operation}.xml", folder / f"{operation}.log"
    plugin = "tests.trainer.ops.cuda.cuda_emulation.ops_plugin"
    words = ["-p", plugin, "--no-header", "-q", f"--junit-xml={report}", str(_HERE.parent / f"test_{operation}.py")]
    process = context.Process(target=run_pytest, args=(words, log), daemon=True)
    process.start()
    process.join(HANG_S)
    is_late = process.is_alive()
    process.kill()
    process.join()
    assert not is_late, f"not done in {HANG_S:.0f} s:\n{log.read_text()[-4000:]}"
    assert report.exists(), log.read_text()[-4000:]
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        wrong = [*case.iter("failure"), *case.iter("error")]
        said = f"{case.get('classname')}.{case.get('name')}:\n{wrong[0].text}" if wrong else None
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = said
    return outcomes


def run_pytest(words: list[str], log: Path) -> None:
    """Run pytest in this process, with output to ``log``."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(_HERE.parents[3])
    sys.exit(pytest.main(words))


@pytest.mark.parametrize("operation", TESTED)
def test_ops_pass_their_tests_on_the_emulated_gpu(operation: str, runs: dict[str, Future[Outcomes]]) -> None:
    outcomes = runs[operation].result()
    wrong = [said for said in outcomes.values() if said is not None]
    assert not wrong, "\n".join(wrong)[:6000]
    assert len(outcomes) >= _FEWEST_TESTS
