"""Entry point: ``python3 -IB <run_dir>/code/supervisor ARGUMENTS``. Standard library only, Python 3.6."""

import importlib
import os
import sys

if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    # Started as a folder, this file has no package; its own name is found in the folder above.
    sys.path[0] = os.path.dirname(folder)
    program = importlib.import_module(f"{os.path.basename(folder)}.program")
    sys.exit(program.main(sys.argv[1:], dict(os.environ)))
