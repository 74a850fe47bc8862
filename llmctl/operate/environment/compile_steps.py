"""The steps of a package that is compiled: fetch, compile on a node, install. Pure.

A wheel is compiled once for each source, Python, torch, CUDA, machine and list of GPU architectures. Later builds take
it from the folder of wheels.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from llmctl.operate.environment.packages import Package
from llmctl.operate.environment.steps import Step, Wanted

_TAG = (
    "import platform, sys, torch; "
    "print(sys.implementation.cache_tag, platform.machine(), torch.__version__, torch.version.cuda, sep='-')"
)
"""Prints Python, machine, torch and its CUDA, as part of a folder's name."""
_SETUPTOOLS = "setuptools>=70.1"
"""The first that makes wheels by itself (https://setuptools.pypa.io/en/stable/history.html#v70-1-0)."""
PROGRAM = Path(__file__).with_name("node.py")
"""Program of these steps, which the build writes beside its logs."""


def compile_steps(wanted: Wanted, packages: Sequence[Package]) -> list[Step]:
    """The steps of the packages, after those of the environment."""
    compiled = [package for package in packages if not package.is_wheel]
    tools = sorted({_SETUPTOOLS, *(tool for package in compiled for tool in package.recipe.tools)})
    steps = [Step("build tools", [wanted.pip("install", *tools)], {"tools": tools})] if compiled else []
    return [*steps, *(step for package in packages for step in _steps_of(wanted, package))]


def _steps_of(wanted: Wanted, package: Package) -> list[Step]:
    inputs = {"ref": package.ref, "url": package.recipe.url, "file": package.digest}
    if package.is_wheel:
        return [Step(f"install {package.name}", _install(wanted, shlex.quote(str(package.path))), inputs)]
    source = package.path or f"{wanted.own}/sources/{package.name}-{(package.ref or 'default').replace('/', '-')}"
    wheels = _wheels_line(wanted, package, source)
    variables = [*package.recipe.variables, *_architectures(wanted, package)]
    steps = [] if package.path is not None else [Step(f"fetch {package.name}", _fetch(package, source), inputs)]
    return [
        *steps,
        Step(
            f"compile {package.name}",
            [*wheels, *_compile(wanted, package, source, variables)],
            {**inputs, "variables": variables},
            in_job=True,
            present=[*wheels, 'ls "$wheels"/*.whl'],
        ),
        Step(f"install {package.name}", [*wheels, *_install(wanted, '"$wheels"/*.whl')]),
    ]


def _fetch(package: Package, source: str) -> list[str]:
    """Clone the repository with its submodules, whole or not at all; a clone of before stays."""
    place = shlex.quote(source)
    checkout = [f'git -C "$part" checkout --quiet {shlex.quote(package.ref)}'] if package.ref else []
    return [
        f"[[ ! -d {place} ]] || exit 0",
        f"mkdir -p -- {shlex.quote(source.rpartition('/')[0])}",
        f'part={place}.part; rm -rf -- "$part"',
        f'git clone --quiet {shlex.quote(package.recipe.url)} "$part"',
        *checkout,
        'git -C "$part" submodule --quiet update --init --recursive',
        f'mv -T -- "$part" {place}',
    ]


def _wheels_line(wanted: Wanted, package: Package, source: str) -> list[str]:
    """Lines that set ``wheels``, the folder of the package's wheel for this Python, torch and these GPUs."""
    content = package.digest[:16] if package.path is not None else f'"$(git -C {shlex.quote(source)} rev-parse HEAD)"'
    levels = "-".join(["sm", *wanted.architectures]) if wanted.architectures else "sm-any"
    folder = shlex.quote(f"{wanted.own}/wheels/{package.name}")
    return [f'wheels={folder}/{content}/{levels}-"$({shlex.join([wanted.own_python, "-c", _TAG])})"']


def _compile(wanted: Wanted, package: Package, source: str, variables: Sequence[str]) -> list[str]:
    place, bin_folder = shlex.quote(source), shlex.quote(f"{wanted.path}/bin")
    copy = [] if package.path is not None else [f'cp -R -- {place} "$part/source"']
    built = place if package.path is not None else '"$part/source"'
    program = shlex.join([wanted.own_python, f"{wanted.own}/env-build/{PROGRAM.name}"])
    sizes = " ".join(f"{size:g}" for size in (*wanted.node_size, package.recipe.gib_per_job))
    return [
        " ".join([f'export PATH={bin_folder}:"$PATH"', *(shlex.quote(variable) for variable in variables)]),
        f'MAX_JOBS="$({program} {sizes})"',
        'export MAX_JOBS; echo "on $(uname -n), with $MAX_JOBS compilers"',
        'mkdir -p -- "$(dirname -- "$wheels")"',
        # Beside the wheels, so that a finished one is moved at once. A build leaves objects in its source.
        'part="$(mktemp -d "$wheels.XXXXXX")"; trap \'rm -rf -- "$part"\' EXIT',
        *copy,
        f"{shlex.quote(wanted.own_python)} -m pip wheel --no-deps --no-build-isolation --no-index "
        f'--wheel-dir "$part/wheels" {built}',
        '[[ -d $wheels ]] || mv -T -- "$part/wheels" "$wheels"',
    ]


def _install(wanted: Wanted, wheel: str) -> list[str]:
    """Another wheel of the same version replaces the one of before; the second line brings what it depends on."""
    return [f"{wanted.pip('install', '--force-reinstall', '--no-deps')} {wheel}", f"{wanted.pip('install')} {wheel}"]


def _architectures(wanted: Wanted, package: Package) -> list[str]:
    """Variables with the architectures of the nodes' GPUs; none if they are unknown."""
    levels = [level for level in wanted.architectures if _numbers(level) >= package.recipe.oldest]
    if not levels:
        return []
    own = package.recipe.architectures
    # flash-attn has code for the first architecture of each generation: 8.6 runs that of 8.0.
    firsts = sorted({level.split(".")[0] + "0" for level in levels}, key=int)
    names = firsts if own == "FLASH_ATTN_CUDA_ARCHS" else [level.replace(".", "") for level in levels]
    return [f"TORCH_CUDA_ARCH_LIST={';'.join(levels)}", *([f"{own}={';'.join(names)}"] if own else [])]


def _numbers(level: str) -> tuple[int, ...]:
    return tuple(int(part) for part in level.split("."))
