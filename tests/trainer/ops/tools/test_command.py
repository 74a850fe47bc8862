"""``python -m trainer kernels``: build, doctor, and libraries that fail to load."""

import hashlib
import json
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked_command import run_trainer
from tests.llmctl.documents import problems_of
from tests.resume_torture import free_port
from tests.waiting import HANG_S
from trainer.ops.build.build import find_compiler, library_name
from trainer.ops.build.build_cache import BuildCache, is_intact
from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.dispatch.library import LEVELS, Library, load_built
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.tools import build_command, doctor

ROOT = Path(__file__).parents[4]
TIMEOUT_S = HANG_S


def start(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "kernels", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(process):
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def kernels(*words, **environment):
    return run_trainer("kernels", *words, cwd=ROOT, environment={**os.environ, **environment})


@pytest.fixture
def place(tmp_path, kernel_library):
    """Variables for an empty cache and a fake compiler.

    The compiler copies the file CAST as every library, and logs its links.
    """
    script = tmp_path / "quick-c++"
    script.write_text(
        "#!/bin/bash\n"
        'if [[ $* == *--version* ]]; then echo "quick 1.0"; exit; fi\n'
        "while (($#)); do case $1 in -o) shift; target=$1;; -shared) shared=1;; esac; shift; done\n"
        'if [[ ${shared-} ]]; then sleep 0.5; echo link >>"$LINKS"; cp "$CAST" "$target"; else : >"$target"; fi\n'
    )
    script.chmod(0o755)
    return {
        "LLMCTL_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
        "CXX": str(script),
        "CAST": str(kernel_library.path),
        "LINKS": str(tmp_path / "links"),
    }


def links(place):
    path = Path(place["LINKS"])
    return len(path.read_text().split()) if path.exists() else 0


def test_build_reports_the_file_and_builds_once(place):
    code, out, err = kernels("build", **place)
    assert (code, err) == (0, ""), out + err
    first, second, third = out.splitlines()
    assert first == "kernels: building with quick 1.0, once for this machine"
    assert second.startswith("kernels: built in ")
    path, _, level = third.partition(": runs on ")
    assert path.startswith(place["LLMCTL_CACHE_DIR"]) and is_intact(Path(path)) and level.endswith(" here")
    assert kernels("build", **place) == (0, f"{third}\n", "")
    assert links(place) == 1


def test_a_terminal_shows_a_bar_while_files_are_compiled(place):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "kernels", "build"], cwd=ROOT, env={**os.environ, **place}, stdout=theirs
    )
    os.close(theirs)
    seen = b""
    # The other side closes with an error (EIO).
    with suppress(OSError):
        while part := os.read(ours, 1 << 16):
            seen += part
    os.close(ours)
    assert process.wait(TIMEOUT_S) == 0
    text = seen.decode()
    shares = [int(share) for share in re.findall(r"kernels: \[[#.]{40}\] (\d+)%", text)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 100 and len(shares) > 20
    # Nothing of the bar stays.
    last = text.split("\r\n")[1:]
    assert last[0].startswith("\r\x1b[Kkernels: [") and "\r\x1b[Kkernels: built in " in last[0]
    assert " runs on " in last[1]


def library_of(place):
    compiler = find_compiler([(place["CXX"],)])
    return BuildCache.below(Path(place["LLMCTL_CACHE_DIR"])).shared / library_name(compiler)


def seal(path, content):
    """Put a file into the cache like a built file."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode() + content).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content + b"llmctl sealed " + digest.encode())
    assert is_intact(path)


def test_a_library_that_does_not_load_is_built_once_more(place):
    seal(library_of(place), b"no library")
    code, out, err = kernels("build", **place)
    assert code == 0, out + err
    assert links(place) == 1


def test_a_rebuilt_library_that_does_not_load_is_reported(place, tmp_path):
    (tmp_path / "garbage").write_bytes(b"no library either")
    place["CAST"] = str(tmp_path / "garbage")
    seal(library_of(place), b"no library")
    code, _, err = kernels("build", **place)
    assert code == 3
    assert err.startswith("trainer kernels build: the kernel library cannot be loaded: ")
    assert "Traceback" not in err
    assert links(place) == 1


def test_a_library_of_other_sources_is_not_used(place, tmp_path):
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" const char *llmctl_kernels_abi(void) { return "other sources"; }')
    place["CAST"] = str(tmp_path / "other.so")
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers).command
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", place["CAST"], str(source)], check=True)
    code, _, err = kernels("build", **place)
    assert code == 3
    assert "was built from other sources (other sources, not " in err


def test_without_a_compiler(place, tmp_path):
    nothing = {**place, "PATH": str(tmp_path), "CXX": ""}
    code, _, err = kernels("build", **nothing)
    assert code == 3
    assert "no C++ compiler (g++, c++, clang++) was found; install g++, or load a module" in err
    assert kernels("build", **place)[0] == 0
    # A node without a compiler uses the build of a login node.
    code, out, err = kernels("build", **nothing)
    assert code == 0, err
    assert out.startswith(str(library_of(place)))


def failing_compiler(tmp_path):
    """A compiler that answers --version and fails otherwise."""
    failing = tmp_path / "failing-c++"
    failing.write_text(
        '#!/bin/bash\n[[ $* == *--version* ]] && echo "failing 1.0" && exit\necho "a.cpp:1: error: no"\nexit 1\n'
    )
    failing.chmod(0o755)
    return str(failing)


def test_with_a_compiler_that_fails_the_library_of_another_one_is_used(place, tmp_path):
    assert kernels("build", **place)[0] == 0
    built = library_of(place)
    failing = failing_compiler(tmp_path)
    code, out, err = kernels("build", **{**place, "CXX": failing})
    assert (code, err) == (0, ""), err
    assert f"error: no; using {built}, built by another compiler\n" in out
    settings = BuildSettings(Path(place["LLMCTL_CACHE_DIR"]), ((failing,),))
    assert load_built(settings).level in LEVELS
    with pytest.raises(BuildError, match=r"the library of rank 0 is not available here: .* has no key/other\.so"):
        load_built(settings, "key/other.so")
    built.chmod(0o666)
    with pytest.raises(BuildError, match=r"not built \(.* belongs to another user or is writable by others\); run"):
        load_built(settings)


@pytest.mark.parametrize("words", [("kernels", "doctor"), ("pretrain", "--config", "c.yaml")])
def test_a_compiler_that_is_no_command_is_refused_with_a_sentence(words, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\n"
        "training: {train_iters: 1, seq_length: 8}\noptimizer: {lr: 0.001}\ndata: {mock_data: true}\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": "ccache 'g++"}
    command = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 3
    assert done.stderr == (
        f'trainer {words[0]}: CXX: "ccache \'g++" is not a command (no closing quotation); '
        "set CXX to a command such as g++-12\n"
    )


def test_compiler_output_is_shown(place, tmp_path):
    code, _, err = kernels("build", **{**place, "CXX": failing_compiler(tmp_path)})
    assert code == 3
    assert "a.cpp:1: error: no" in err and "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ending_a_build_ends_its_compilers(place, tmp_path, number, code):
    slow = tmp_path / "slow-c++"
    slow.write_text(
        f'#!/bin/bash\n[[ $* == *--version* ]] && echo "slow 1.0" && exit\necho $$ >>{tmp_path}/started\nsleep 30000\n'
    )
    slow.chmod(0o755)
    process = start("build", **{**place, "CXX": str(slow)})
    end = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    if number == signal.SIGTERM:
        # A group's signal and that which llmctl forwards come one after the other.
        process.send_signal(number)
    found, _, err = ends(process)
    assert found == code and "Traceback" not in err
    compilers = (tmp_path / "started").read_text().split()
    # A killed process may take a moment to end.
    while any(Path(f"/proc/{pid}").exists() for pid in compilers):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert list(Path(place["LLMCTL_CACHE_DIR"]).rglob(".build-*")) == []


@pytest.fixture
def images(monkeypatch, tmp_path):
    """Fake the images: fail for the given compilers and architectures. The library exists."""

    def make(*failing):
        def obtain(_, by, architecture, __):
            if (by, architecture) in failing:
                raise BuildError(f"{by} failed: error: no", f"all that {by} said")
            return tmp_path / f"sm_{architecture}-{by}.cubin"

        monkeypatch.setattr(build_command, "obtain_image", obtain)
        monkeypatch.setattr(build_command, "load_on_demand", lambda *_: Library(tmp_path / "library.so", "x86-64-v3"))
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        return lambda *words: build_command.main(["--architecture", *words], BuildSettings(tmp_path))

    return make


def test_build_falls_back_to_nvrtc_as_training_does(images, tmp_path, capsys):
    assert images(("nvcc", 90))("9.0") == 0
    said = capsys.readouterr()
    assert "kernels: nvcc failed: error: no\n" in said.out and not said.err
    assert f"{tmp_path}/sm_90-NVRTC.cubin: for GPUs of compute capability 9.0\n" in said.out


def test_build_continues_with_other_architectures_and_reports_failures(images, tmp_path, capsys):
    assert images(("nvcc", 70), ("NVRTC", 70))("7.0", "9.0") == 3
    said = capsys.readouterr()
    assert f"{tmp_path}/sm_90-nvcc.cubin: for GPUs of compute capability 9.0\n" in said.out
    assert said.err == (
        "all that nvcc said\nall that NVRTC said\n"
        "trainer kernels build: for sm_70: nvcc failed: error: no; NVRTC failed: error: no\n"
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")
@pytest.mark.parametrize(
    ("level", "of_processor", "said"),
    [
        ("x86-64-v4 with AVX512_BF16", "x86-64-v4 with AVX512_BF16", "on x86-64-v4 with AVX512_BF16 here"),
        ("x86-64-v4", "x86-64-v4", "on x86-64-v4 here, the best that this processor has"),
        ("x86-64-v3", "x86-64-v3", "on x86-64-v3 here, the best that this processor has"),
        (
            "x86-64-v3",
            "x86-64-v4",
            "on x86-64-v3 here: its compiler does not support x86-64-v4, which this processor has",
        ),
    ],
)
def test_doctor_explains_a_lower_instruction_set(level, of_processor, said, monkeypatch):
    monkeypatch.setattr(Library, "processor_level", lambda _: of_processor)
    assert doctor._instruction_set(Library(Path("library.so"), level)) == said


def test_doctor_explains_every_operation(place):
    code, out, err = kernels("doctor", "--json", **place)
    assert code == 0, err
    before = json.loads(out)
    assert problems_of("env-kernels", before) == []
    assert {row["operation"] for row in before["operations"]} == {operation.name for operation in OPERATIONS}
    assert "native" not in {row["backend"] for row in before["operations"]}
    reasons = [row["reason"] for row in before["operations"] if row["operation"] == "rms_norm"]
    assert reasons and all("; run llmctl env kernels build" in reason for reason in reasons)
    assert {part["name"]: part["found"] for part in before["parts"]}["library"] is False
    assert kernels("build", **place)[0] == 0
    after = json.loads(kernels("doctor", "--json", **place)[1])
    (library,) = (part["detail"] for part in after["parts"] if part["name"] == "library")
    assert library.startswith(f"{library_of(place)}, on ") and " here" in library
    own = {row["operation"] for row in after["operations"] if row["backend"] == "native"}
    assert "rms_norm" in own
    assert all(row["reason"] == "" for row in after["operations"] if row["backend"] == "native")
    code, out, _ = kernels("doctor", **place)
    assert code == 0
    assert any(line.split() == ["cpu", "float32", "bfloat16", "float16"] for line in out.splitlines())
    assert any(line.split() == ["rms_norm", "native", "native", "native"] for line in out.splitlines())


def test_the_speeds_of_the_page_are_those_of_the_results():
    page = (ROOT / "docs" / "guide" / "kernels.md").read_text()
    (name,) = set(re.findall(r"results/(gpu-[0-9-]+)\.md", page))
    rows = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()]
    speeds = [f"{row['item']['tokens_per_s']:,.0f}" for row in rows if "tokens_per_s" in row.get("item", {})]
    assert speeds and [speed for speed in speeds if speed not in page] == []


def test_a_closed_pipe_causes_no_traceback(place):
    """As in ``doctor | head -1``: no traceback, and the exit code of SIGPIPE."""
    process = start("doctor", "--json", **place)
    process.stdout.close()
    code, err = process.wait(TIMEOUT_S), process.stderr.read()
    process.stderr.close()
    assert code == 128 + signal.SIGPIPE
    assert err == ""


def test_unknown_arguments_are_refused():
    code, _, err = kernels("bench")
    assert code == 2 and "build" in err and "doctor" in err
    assert kernels()[0] == 2


def test_of_the_ranks_of_a_node_one_builds_while_the_others_wait(place, tmp_path):
    config = {
        "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"},
        "training": {"train_iters": 1, "seq_length": 16, "eval_iters": 0, "kernel_backend": "native"},
        "optimizer": {"lr": 0.01},
        "data": {"mock_data": True},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("pretrain", "--config", str(tmp_path / "config.yaml"))
    shared = {**os.environ, **place, **meeting}
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(
                run_trainer, *words, cwd=ROOT, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(2)
        ]
        (code, first, err), (other_code, second, other_err) = (rank.result() for rank in ranks)
    assert (code, other_code) == (0, 0), err + other_err
    assert links(place) == 1
    assert "kernels: building with quick 1.0" in first and "kernels: native (" in first
    assert "kernels:" not in second
