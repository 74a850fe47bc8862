"""``python -m scripts.reference`` writes the pages below docs/reference; with --check it only compares them."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from llmctl.cli.reference.schemas import SCHEMAS, schema_text
from scripts.reference.commands import commands_page, exit_codes_page
from scripts.reference.config_keys import config_page, profile_page
from scripts.reference.markdown import MissingText
from scripts.reference.megatron_flags import flags_page
from scripts.reference.metrics_rows import metrics_page

FOLDER = Path(__file__).parents[2] / "docs/reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_page,
    "profiles.md": profile_page,
    "commands.md": commands_page,
    "megatron-flags.md": flags_page,
    "metrics.md": metrics_page,
    "exit-codes.md": exit_codes_page,
    **{f"schemas/{name}.json": partial(schema_text, name) for name in SCHEMAS},
}
_AGAIN = "run `python -m scripts.reference`"


def outdated() -> list[str]:
    """Names of the pages that are not as the code would write them."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    """Write or compare the pages; 1 if one is not current, or if something that a page needs has no text."""
    try:
        if arguments == ["--check"]:
            wrong = outdated()
            if wrong:
                print(f"docs/reference: {', '.join(wrong)}: not as the code is now; {_AGAIN}", file=sys.stderr)
            return int(bool(wrong))
        for name, page in PAGES.items():
            (FOLDER / name).parent.mkdir(exist_ok=True)
            (FOLDER / name).write_text(page(), encoding="utf-8")
    except MissingText as error:
        print(f"docs/reference: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
