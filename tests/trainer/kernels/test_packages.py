"""Optional packages told apart and tried: stand-ins that have the files of the real ones, and fail as they do."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from trainer.kernels.packages import Surroundings, examine_packages, unrelated_apex

HOPPER = Surroundings("2.13.0+cu130", "13.0", True, (9, 0), (13, 0))
VERSION = f"{sys.version_info[0]}{sys.version_info[1]}"

# Folders of apex 0.9.10dev as the index has it, and of NVIDIA's apex as its repository has it.
WEB_TOOLKIT = ("ext", "lib", "locale", "models", "templates", "views")
NVIDIA = ("contrib", "multi_tensor_apply", "normalization", "optimizers", "transformer")


@pytest.fixture
def install(tmp_path):
    def make(folders):
        for folder in folders:
            (tmp_path / "apex" / folder).mkdir(parents=True)
        # Whoever executes it, fails.
        (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('apex was imported')\n")
        return [str(tmp_path)]

    return make


def test_the_web_toolkit_is_recognised_with_its_cure(install):
    sentence = unrelated_apex(install(WEB_TOOLKIT))
    assert sentence is not None and "\n" not in sentence
    assert "pip uninstall apex" in sentence and "source" in sentence


def test_nvidias_apex_and_none_at_all_are_left_alone(install, tmp_path):
    assert unrelated_apex([str(tmp_path / "nothing")]) is None
    assert unrelated_apex(install(NVIDIA)) is None


def test_a_run_says_it_once_and_trains_all_the_same(install, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\n"
        "training: {train_iters: 1, seq_length: 8, eval_iters: 0, device: cpu}\n"
        "optimizer: {lr: 0.001}\n"
        "data: {mock_data: true}\n"
    )
    packages = install(WEB_TOOLKIT)[0]
    code = f"import sys; sys.path.append({packages!r}); from trainer.__main__ import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "pretrain", "--config", str(tmp_path / "config.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("pip uninstall apex") == 1
    assert "completed at iteration 1" in ended.stdout


@pytest.fixture
def site(tmp_path):
    """A folder of packages with a torch that has no GPU, to put others into."""
    folder = tmp_path / "site"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    return folder


def metadata(site, name, version):
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def module(site, path, text=""):
    target = site / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def extension(site, name, source):
    """A compiled module, of C that is given."""
    target = site / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    build = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    subprocess.run(build, input=source, text=True, check=True)


def state_of(name, site, surroundings=HOPPER, limit_s=60):
    states = {state.name: state for state in examine_packages(surroundings, [str(site), *sys.path], limit_s)}
    assert all("\n" not in state.sentence for state in states.values())
    # A bare import would have left it here.
    assert not {"apex", "flash_attn", "flash_attn_2_cuda", "transformer_engine"} & set(sys.modules)
    return states[name]


def test_nothing_installed_is_no_error(tmp_path):
    states = examine_packages(HOPPER, [str(tmp_path)])
    assert [state.name for state in states] == ["apex", "flash-attn", "flash-attn 3", "transformer-engine"]
    assert {(state.verdict, state.sentence) for state in states} == {("absent", "not installed; nothing here needs it")}


def test_apex_of_the_index_is_to_be_removed(site):
    metadata(site, "apex", "0.9.10.dev0")
    module(site, "apex/__init__.py", "raise RuntimeError('apex was imported')")
    state = state_of("apex", site)
    assert state.verdict == "broken"
    assert "web toolkit" in state.sentence and "python -m pip uninstall apex" in state.sentence
    assert "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python -m pip install --no-build-isolation ." in state.sentence
    without = state_of("apex", site, Surroundings("2.13.0+cpu", None))
    assert without.sentence.endswith("to mend it: python -m pip uninstall apex")


def install_apex(site):
    metadata(site, "apex", "0.1")
    for folder in NVIDIA:
        module(site, f"apex/{folder}/__init__.py")
    module(site, "apex/__init__.py")


def test_apex_without_extensions(site):
    install_apex(site)
    state = state_of("apex", site)
    assert state.verdict == "broken"
    assert "without its compiled parts amp_C, fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda" in state.sentence
    assert "APEX_CUDA_EXT=1" in state.sentence and "nvcc" not in state.sentence
    assert "refuses nvcc 12.8: set CUDA_HOME to a CUDA 13.0" in (
        state_of("apex", site, Surroundings("2.13.0", "13.0", nvcc=(12, 8))).sentence
    )
    assert "the nvcc of CUDA 13.0, which was not found" in (
        state_of("apex", site, Surroundings("2.13.0", "13.0")).sentence
    )


def test_apex_with_extensions(site):
    install_apex(site)
    for name in ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"):
        module(site, f"{name}.py")
    state = state_of("apex", site)
    assert (state.verdict, state.sentence) == ("ok", "apex 0.1 works with torch 2.13.0+cu130; nothing here needs it")


def install_flash_attention(site, version="2.8.3"):
    module(site, "flash_attn/__init__.py", "from flash_attn_2_cuda import fwd as flash_attn_func\n")
    return metadata(site, "flash_attn", version)


def test_flash_attention_of_another_torch_has_an_undefined_symbol(site):
    install_flash_attention(site)
    extension(
        site,
        "flash_attn_2_cuda",
        "void *_ZN3c105ErrorC2Ev(void); void *PyInit_flash_attn_2_cuda(void) { return _ZN3c105ErrorC2Ev(); }",
    )
    state = state_of("flash-attn", site)
    assert state.verdict == "broken"
    assert "it was built for another torch than 2.13.0+cu130 (ImportError: " in state.sentence
    assert "undefined symbol: _ZN3c105ErrorC2Ev" in state.sentence
    assert "--no-build-isolation flash-attn" in state.sentence
    assert f"cu13torch2.13cxx11abiTRUE-cp{VERSION}-cp{VERSION}" in state.sentence


def test_flash_attention_that_works(site):
    install_flash_attention(site, "2.8.3+cu13torch2.13cxx11abiTRUE")
    module(site, "flash_attn_2_cuda.py", "fwd = print\n")
    assert state_of("flash-attn", site).verdict == "ok"
    old = state_of("flash-attn", site, Surroundings("2.13.0", "12.6", True, (7, 0)))
    assert old.verdict == "broken"
    assert "it is for GPUs of compute capability 8.0 and up, and one here has 7.0" in old.sentence
    assert "python -m pip uninstall flash-attn; torch's own" in old.sentence
    cpu = state_of("flash-attn", site, Surroundings("2.13.0+cpu", None))
    assert cpu.verdict == "broken" and "torch 2.13.0+cpu is for CPUs alone" in cpu.sentence


def test_a_package_that_ends_the_process_does_not_work_whatever_it_leaves_with(site):
    install_flash_attention(site)
    module(site, "flash_attn_2_cuda.py", "import os\nos._exit(0)\n")
    state = state_of("flash-attn", site)
    assert state.verdict == "broken" and "using it ended with exit code 0" in state.sentence


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("cu13torch2.10cxx11abiTRUE", "it was built for torch 2.10, and this is 2.13.0+cu130"),
        ("cu12torch2.13cxx11abiTRUE", "it was built for CUDA 12, and this torch for CUDA 13.0"),
        ("cu13torch2.13cxx11abiFALSE", "it was built with another C++ ABI than this torch"),
    ],
)
def test_the_name_of_a_wheel_says_what_it_was_built_for(site, tag, problem):
    folder = install_flash_attention(site)
    (folder / "direct_url.json").write_text(f'{{"url": "https://example.org/flash_attn-2.8.3%2B{tag}-cp312.whl"}}')
    module(site, "flash_attn_2_cuda.py", "raise RuntimeError('it was tried')\n")
    assert problem in state_of("flash-attn", site).sentence


def garbage(folder):
    (folder / "METADATA").write_bytes(bytes(range(128, 256)) * 8)


def no_metadata(folder):
    (folder / "METADATA").unlink()


def no_file_to_wait_for(folder):
    (folder / "METADATA").unlink()
    os.mkfifo(folder / "METADATA")


def a_folder(folder):
    (folder / "METADATA").unlink()
    (folder / "METADATA").mkdir()


def absurd(folder):
    long = "9" * 100_000
    (folder / "METADATA").write_text(f"Name: flash-attn\nVersion: \x1b[31m{long}cu{long}torch{long}.{long}\n")


def huge(folder):
    with (folder / "METADATA").open("ab") as file:
        file.truncate(1 << 36)


@pytest.mark.parametrize("harm", [garbage, no_metadata, no_file_to_wait_for, a_folder, absurd, huge])
def test_any_metadata_give_one_line(site, harm):
    harm(install_flash_attention(site))
    module(site, "flash_attn_2_cuda.py", "fwd = print\n")
    state = state_of("flash-attn", site)
    assert state.verdict == "ok" and state.sentence.isprintable() and len(state.sentence) < 250
    assert state.sentence.lower().replace("_", "-").startswith("flash-attn ")


@pytest.mark.parametrize("origin", [b"\xff{", b'"a word"', b"[" * 100_000, b'{"url": ["cu13torch2.10cxx11abiTRUE"]}'])
def test_any_origin_is_read(site, origin):
    (install_flash_attention(site) / "direct_url.json").write_bytes(origin)
    module(site, "flash_attn_2_cuda.py", "fwd = print\n")
    assert state_of("flash-attn", site).verdict == ("broken" if b"cu13" in origin else "ok")


def test_paths_with_ends_of_lines_and_long_last_words(tmp_path):
    site = tmp_path / "site\n\x1b[31mof somebody"
    (site / "torch").mkdir(parents=True)
    module(site, "torch/__init__.py", "class cuda:\n    is_available = staticmethod(lambda: False)\n")
    metadata(site, "apex", "0.9.10.dev0")
    module(site, "apex/__init__.py", "raise RuntimeError('apex was imported')")
    install_flash_attention(site)
    module(site, "flash_attn_2_cuda.py", "raise ValueError('no ' * 1_000_000 + '\\x1b[31m')\n")
    assert state_of("apex", site).sentence.isprintable()
    assert (unrelated_apex([str(site)]) or "\n").isprintable()
    failed = state_of("flash-attn", site)
    assert failed.sentence.isprintable() and len(failed.sentence) < 2000


def test_an_egg_is_known_by_its_own_metadata(site):
    egg = site / "flash_attn-2.5.8-py3.10-linux-x86_64.egg"
    module(egg, "flash_attn/__init__.py", "from flash_attn_2_cuda import fwd as flash_attn_func\n")
    module(egg, "flash_attn_2_cuda.py", "fwd = print\n")
    module(egg, "EGG-INFO/PKG-INFO", "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.5.8\n")
    states = examine_packages(HOPPER, [str(egg), str(site), *sys.path], 60)
    assert states[1].sentence.startswith("flash-attn 2.5.8 works with torch")


def test_an_extension_of_another_python(site):
    install_flash_attention(site)
    module(site, "flash_attn_2_cuda.cpython-37m-x86_64-linux-gnu.so")
    assert "flash_attn_2_cuda.cpython-37m-x86_64-linux-gnu.so is for another Python" in (
        state_of("flash-attn", site).sentence
    )


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file: No such file')", "libcudart.so.12 is not"),
        ("raise RuntimeError('no kernel image is available')", "not compiled for the GPUs here"),
        ('raise OSError("/lib/libc.so.6: version `GLIBC_2.99\' not found")', "built on a newer Linux"),
        ("raise OSError('cudnn.h: No such file or directory')", "cuDNN is not found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "using it ended in SIGSEGV"),
        ("raise ValueError('strange')", "using it fails: ValueError: strange"),
    ],
)
def test_failures_are_explained(site, line, meaning):
    install_flash_attention(site)
    module(site, "flash_attn_2_cuda.py", line)
    state = state_of("flash-attn", site)
    assert state.verdict == "broken" and meaning in state.sentence


def test_transformer_engine_without_its_half_for_torch(site):
    metadata(site, "transformer_engine", "2.9.0")
    metadata(site, "transformer_engine_cu13", "2.9.0")
    module(site, "transformer_engine/__init__.py")
    module(site, "transformer_engine/pytorch/__init__.py", "next(iter(()))\n")
    state = state_of("transformer-engine", site)
    assert state.verdict == "broken"
    assert state.sentence.startswith("transformer_engine 2.9.0, transformer_engine_cu13 2.9.0: its half for torch")
    assert "transformer-engine transformer-engine-cu13 transformer-engine-torch" in state.sentence
    # With the file there, the trial says the rest.
    module(site, "transformer_engine_torch.so")
    assert "its half for torch does not fit (StopIteration)" in state_of("transformer-engine", site).sentence
    metadata(site, "transformer_engine_torch", "2.8.0")
    assert "different versions" in state_of("transformer-engine", site).sentence


def test_a_package_that_hangs_is_ended_with_what_it_started(site, tmp_path):
    install_flash_attention(site)
    note = tmp_path / "child"
    module(
        site,
        "flash_attn_2_cuda.py",
        f"import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({str(note)!r}, 'w').write(str(child.pid))"
        "\nchild.wait()\n",
    )
    began = time.monotonic()
    state = state_of("flash-attn", site, limit_s=5)
    assert time.monotonic() - began < 60
    assert "using it took longer than 5 s" in state.sentence
    child = int(note.read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
