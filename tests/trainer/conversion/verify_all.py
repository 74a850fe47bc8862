"""python -m tests.trainer.conversion.verify_all FOLDER: checks all exports in a folder; the last line is JSON.

The test of another version of transformers starts it in a process that finds that version first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer.conversion.errors import ConversionError
from trainer.conversion.verify import verify_export

NATIVE, EXPORT = "native", "export"
"""The checkpoint and the export in the folder of each model."""


def main(folder: str) -> None:
    """Print, for the folder of each model, [witness, whether equal], or the error."""
    found: dict[str, list[object] | str] = {}
    for model in sorted(Path(folder).iterdir()):
        checkpoint = next((model / NATIVE).glob("iter_*"))
        try:
            verified = verify_export(checkpoint, model / EXPORT)
            found[model.name] = [verified.witness, verified.is_good]
        except ConversionError as error:
            found[model.name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
