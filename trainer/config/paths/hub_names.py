"""Names of models of the Hugging Face Hub where a path is wanted. Torch-free."""

from __future__ import annotations

import re

_NAME = re.compile(r"\w[\w-]*/\w[\w.-]*")
_FILES = (".json", ".model", ".tiktoken", ".txt", ".gguf", ".yaml", ".bin", ".safetensors")


def is_hub_name(path: str) -> bool:
    """True if a path may be meant as OWNER/NAME of the Hub: a relative one of two parts that names no file."""
    return _NAME.fullmatch(path) is not None and not path.endswith(_FILES)


def hub_remedy(name: str, files: str = "") -> str:
    """The end of a sentence about a path that is not there: nothing is downloaded by itself.

    Args:
        name: OWNER/NAME.
        files: pattern of the files to download; empty for all.
    """
    only = f" --include '{files}'" if files else ""
    return f"; download a model of the Hugging Face Hub first: `hf download {name}{only} --local-dir FOLDER`"
