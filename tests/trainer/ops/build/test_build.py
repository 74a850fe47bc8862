"""Compilers: search, parallel runs, cleanup; and the key of a library."""

import os
import platform
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.trainer.ops.build.slow_builder import TIMEOUT_S
from tests.waiting import wait_for
from trainer.ops.build import compile_jobs
from trainer.ops.build.build import Compiler, compile_library, find_compiler, library_name, sources_key
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.build.compile_jobs import CompileJob, jobs_that_fit, run_compilers
from trainer.ops.dispatch.library import load_built, load_on_demand


@pytest.fixture
def compiler(tmp_path):
    """Make a compiler from a shell script that answers --version."""

    def make(body):
        path = tmp_path / "c++ of a test"
        path.write_text(f'#!/bin/bash\nif [[ $* == *--version* ]]; then echo "test 1.0"; exit; fi\n{body}\n')
        path.chmod(0o755)
        return find_compiler([("no-such-compiler",), (str(path),)])

    return make


def test_compilers_are_tried_in_order(compiler, monkeypatch):
    found = compiler("exit 0")
    assert found.version == "test 1.0" and found.command[0].endswith("c++ of a test")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(g\+\+, clang\+\+\) was found; install g\+\+"):
        find_compiler([("g++",), ("clang++",)])


def test_the_environment_names_cache_and_compiler(tmp_path):
    settings = BuildSettings.from_variables({"HOME": "/home/someone", "CXX": "ccache g++-12"})
    assert settings.cache == Path("/home/someone/.cache/llmctl")
    assert settings.compilers == (("ccache", "g++-12"), ("g++",), ("c++",), ("clang++",))
    assert BuildSettings.from_variables({"HOME": "/h", "XDG_CACHE_HOME": "/x"}).cache == Path("/x/llmctl")
    assert BuildSettings.from_variables({"HOME": "/h", "XDG_CACHE_HOME": "relative"}).cache == Path("/h/.cache/llmctl")
    named = {"HOME": "/h", "XDG_CACHE_HOME": "/x", "LLMCTL_CACHE_DIR": str(tmp_path)}
    assert BuildSettings.from_variables(named).cache == tmp_path


@pytest.mark.parametrize("load", [load_built, partial(load_on_demand, report=LineReport())], ids=["found", "built"])
def test_an_unsupported_torch_is_named_before_anything_is_compiled(load, monkeypatch, tmp_path):
    said = "the library is not built|no C"
    for version, message in (
        ("2.9.1+cu128", r"needs torch 2\.10 or newer, and this is torch 2\.9\.1\+cu128; install a newer torch"),
        ("1.13", r"needs torch 2\.10 or newer, and this is torch 1\.13; "),
        ("2.10.0a0+git5", said),
        ("3.0", said),
        ("of nobody", said),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(BuildError, match=message):
            load(BuildSettings(tmp_path, compilers=(("no-such-compiler",),)))


def test_options_make_another_compiler_and_any_output_encoding_is_read(compiler):
    found = compiler("exit 0")
    path = found.command[0]
    other = find_compiler([(path, "-march=native")])
    assert library_name(found) != library_name(other)
    # The output of a compiler may have any encoding.
    Path(path).write_text("#!/bin/bash\nprintf 'g++ \\xb0\\n'\n")
    assert find_compiler([(path,)]).version == "g++ \ufffd"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")
def test_kernels_that_no_run_uses_are_compiled_quickly(compiler, tmp_path):
    logged, folder = tmp_path / "commands", tmp_path / "kernels/key/build"
    folder.mkdir(parents=True)
    logging = f'echo "$@" >>"{logged}"; while (($#)); do case $1 in -o) : >"$2";; esac; shift; done'
    compile_library(folder / "library.so", compiler(logging), time.monotonic() + TIMEOUT_S)
    commands = [line for line in logged.read_text().splitlines() if "/softmax/cpu.cpp" in line]
    used = {"-O3" if "LLMCTL_ISA" in line else "-O1": re.findall(r" (-O\d) ", line)[-1] for line in commands}
    assert len(commands) == 3 and used == {"-O1": "-O1", "-O3": "-O3"}


def test_compiler_output_is_kept(compiler, tmp_path):
    failing = compiler('echo "one.cpp:3:1: error: expected a semicolon" >&2; echo "and more" >&2; exit 1')
    with pytest.raises(BuildError) as caught:
        compile_library(tmp_path / "library.so", failing, time.monotonic() + TIMEOUT_S)
    assert caught.value.reason.endswith("failed (1): one.cpp:3:1: error: expected a semicolon")
    assert "and more" in caught.value.log and "c++ of a test" in caught.value.log
    assert not (tmp_path / "library.so").exists()


def a_nap(thousands):
    """A sleep time in seconds that no concurrent test session uses."""
    return f"{thousands}000.{os.getpid()}"


def sleeping(mark):
    done = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, text=True, check=False)
    return done.stdout.split()


def are_gone(mark):
    """True if the processes end. Waits, because a killed process may take a moment."""
    wait_for(lambda: not sleeping(mark), "the end of the compilers")
    return True


def test_a_compiler_that_hangs_is_killed_with_its_children(tmp_path):
    nap = a_nap(4)
    job = CompileJob(("bash", "-c", f"sleep {nap} & sleep {nap}"), tmp_path / "log")
    other, limit_s, said = CompileJob(("touch", str(tmp_path / "done")), tmp_path / "other"), 0.5, ""
    # On a busy machine even the first compiler may need longer.
    while "1 of 3" not in said:
        limit_s *= 2
        with pytest.raises(BuildError, match="did not finish in time: [01] of 3") as caught:
            run_compilers([other, job, job], 2, time.monotonic() + limit_s)
        said = caught.value.reason
        assert limit_s < 1000, said
    assert are_gone(nap)


def test_a_compiler_that_does_not_report_its_version_is_killed_with_its_children(tmp_path, monkeypatch):
    nap = a_nap(6)
    silent = tmp_path / "silent-c++"
    silent.write_text(f"#!/bin/bash\nsleep {nap} & sleep {nap}\n")
    silent.chmod(0o755)
    monkeypatch.setattr(compile_jobs, "_ASK_TIMEOUT_S", 1.0)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        find_compiler([(str(silent),)])
    assert are_gone(nap)


def test_a_signal_within_a_wait_takes_effect_between_two_waits(tmp_path, monkeypatch):
    """Its handler raises. Within the wait that would leave a lock taken, for which a worker waits without an end."""
    real, returned = compile_jobs.wait, []

    def interrupted(pending, patience_s, when):
        signal.raise_signal(signal.SIGINT)
        found = real(pending, patience_s, when)
        # A second signal does not stop the killing of the compilers either.
        signal.raise_signal(signal.SIGINT)
        returned.append(found)
        return found

    monkeypatch.setattr(compile_jobs, "wait", interrupted)
    nap, handler = a_nap(7), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_compilers([CompileJob(("sleep", nap), tmp_path / "log")], 1, time.monotonic() + TIMEOUT_S)
    assert len(returned) == 1 and not returned[0].done
    assert are_gone(nap) and signal.getsignal(signal.SIGINT) is handler


def test_a_signal_of_the_last_wait_is_not_lost(tmp_path, monkeypatch):
    real = compile_jobs.wait

    def interrupted(*arguments):
        found = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(compile_jobs, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_compilers([CompileJob(("true",), tmp_path / "log")], 1, time.monotonic() + TIMEOUT_S)


def test_jobs_fit_cores_and_memory(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("trainer.ops.build.compile_jobs._free_memory", lambda: 7 << 30)
    assert jobs_that_fit() == 3
    monkeypatch.setattr("trainer.ops.build.compile_jobs._free_memory", lambda: 1 << 20)
    assert jobs_that_fit() == 1


def test_the_key_follows_sources_and_compiler(monkeypatch, tmp_path):
    one, other = (Compiler(("g++",), version) for version in ("g++ 12", "g++ 13"))
    assert library_name(one).split("/")[0] == sources_key() == library_name(other).split("/")[0]
    assert library_name(one) != library_name(other)
    assert library_name(None) == f"{sources_key()}/*.so"
    before = sources_key()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/a.cpp").write_text("int a;")
    monkeypatch.setattr("trainer.ops.build.build.source_folder", lambda: tmp_path)
    monkeypatch.setattr("trainer.ops.build.build.source_files", lambda: [tmp_path / "cpu/a.cpp"])
    changed = sources_key()
    (tmp_path / "cpu/a.cpp").write_text("int b;")
    assert len({before, changed, sources_key()}) == 3


@pytest.mark.parametrize(
    ("root", "limit", "use", "line"),
    [
        ("", "memory.max", "memory.current", "0::/job/step"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "4:cpuset:/elsewhere\n9:hugetlb,memory:/job/step"),
    ],
    ids=["cgroups 2", "cgroups 1"],
)
def test_the_limit_of_a_job_counts_though_its_step_has_none(root, limit, use, line, monkeypatch, tmp_path):
    job = tmp_path / root / "job"
    (job / "step").mkdir(parents=True)
    (job / "step" / limit).write_text("max\n" if root == "" else "9223372036854771712\n")
    (job / "step" / use).write_text("0\n")
    (job / limit).write_text(f"{3 << 20}\n")
    (job / use).write_text(f"{1 << 20}\n")
    own = tmp_path / "cgroup"
    own.write_text(f"{line}\n")
    monkeypatch.setattr(compile_jobs, "_CGROUP", tmp_path)
    monkeypatch.setattr(compile_jobs, "_OWN_GROUP", own)
    assert compile_jobs._free_memory() == 2 << 20
