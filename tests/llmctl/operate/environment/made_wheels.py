"""Small wheels of the packages of an environment, made on the spot: no test needs a network."""

import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest

TORCH = "__version__ = '{}'\nclass version:\n    cuda = '12.8'\n"
_C = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_ext", "", -1, methods};
PyMODINIT_FUNC PyInit_tiny_ext(void) { return PyModule_Create(&module); }
"""


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = (), extra: str = ""
) -> Path:
    """Write a wheel for every Python; ``requires`` belong to ``extra``, if that is given."""
    folder.mkdir(parents=True, exist_ok=True)
    escaped = name.replace("-", "_")
    about = f"{escaped}-{version}.dist-info"
    mark = f' ; extra == "{extra}"' if extra else ""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Provides-Extra: {extra}\n" * bool(extra)
    )
    metadata += "".join(f"Requires-Dist: {required}{mark}\n" for required in requires)
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = {**files, f"{about}/METADATA": metadata, f"{about}/WHEEL": kind}
    path = folder / f"{escaped}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in whole.items():
            archive.writestr(place, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{place},,\n" for place in [*whole, f"{about}/RECORD"]))
    return path


def write_torch(folder: Path, version: str) -> Path:
    """Write a wheel of a torch that knows its versions only."""
    return write_wheel(folder, "torch", version, {"torch/__init__.py": TORCH.format(version)})


def write_llmctl(folder: Path) -> Path:
    """Write a wheel with the names of this llmctl and of its extra for training."""
    return write_wheel(folder, "llmctl-pretrain", "0.7.0", {"llmctl/__init__.py": ""}, ["torch>=2.10"], "train")


def write_setuptools(folder: Path) -> Path:
    """Pack the setuptools of this Python into a wheel again."""
    found = metadata.distribution("setuptools")
    files = {str(path): Path(str(path.locate())) for path in found.files or () if ".." not in path.parts}
    kept = {name: path for name, path in files.items() if path.suffix not in (".pyc",) and path.is_file()}
    path = folder / f"setuptools-{found.version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, place in kept.items():
            archive.write(place, name)
    return path


def write_sdist(folder: Path, answer: int | str) -> Path:
    """Write the source of a package whose module ``tiny_ext`` is C, whose function returns ``answer``, an expression.

    Its build waits for a module of the site, as one that brings a compiler: the variable CC_MODULE.
    """
    top = folder / "tiny_ext-1.0"
    top.mkdir(parents=True, exist_ok=True)
    (top / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "tiny-ext"\nversion = "1.0"\n'
    )
    (top / "setup.py").write_text(
        "import os, platform\nfrom setuptools import Extension, setup\n"
        "if 'CC_MODULE' not in os.environ:\n    raise SystemExit('nvcc: command not found')\n"
        "print('built on', platform.node(), 'with', os.environ['MAX_JOBS'])\n"
        "setup(ext_modules=[Extension('tiny_ext', ['tiny.c'])])\n"
    )
    (top / "tiny.c").write_text(_C.replace("ANSWER", str(answer)))
    path = folder / "tiny_ext-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(top, top.name)
    return path


def without_own_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of this machine's pip, which may name folders of wheels."""
    for name in ("PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
