"""A module system with one module, and wheels for an environment."""

from pathlib import Path

from tests.llmctl.operate.environment.made_wheels import write_llmctl, write_setuptools, write_torch

# The module brings what the extension asks for. It notes on which machine it is loaded.
_MODULES = """
module() {
    [[ "$1 $2" == "load gcc/12" ]] || { echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 1; }
    export CC_MODULE=$2
    uname -n >>FOLDER/loaded
}
"""


def write_modules(home: Path) -> Path:
    """Write the file that defines ``module``; it notes machines in ``home/loaded``."""
    init = home / "modules.sh"
    init.write_text(_MODULES.replace("FOLDER", str(home)))
    return init


def write_wheels(folder: Path) -> Path:
    """Write wheels of torch, llmctl and setuptools; returns the folder."""
    write_torch(folder, "2.11.0")
    write_llmctl(folder)
    write_setuptools(folder)
    return folder
