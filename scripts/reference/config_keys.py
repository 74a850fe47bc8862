"""Pages of the keys of a config and of a cluster profile."""

import inspect
from collections.abc import Iterable, Iterator
from itertools import groupby

from llmctl.cli.reference.keys import JOB, PROFILE, Key, all_keys, default_of, flags_of, meaning_of, values_of
from scripts.reference.markdown import code, page, prose, required_text

_GENERATED = "`python -m scripts.reference` makes this page from the fields"
_CONFIG = f"""# Config keys

Every key of a training config. `llmctl explain KEY` prints the same in the terminal; [config.md](../guide/config.md) is
about writing a config. {_GENERATED} in `trainer/config/sections/`."""
_PROFILE = f"""# Profile keys

Every key of a cluster profile, `clusters/NAME.yaml`, and of your own file of that name below
`~/.config/llmctl/clusters/`. [clusters.md](../guide/clusters.md) is about using a cluster. `llmctl explain KEY` prints
the same in the terminal. NAME is a name of your own or of the site. {_GENERATED} in `llmctl/site/profile.py`."""


def config_page() -> str:
    """The page of a config's keys."""
    keys = [key for key in all_keys().values() if not key.name.startswith(PROFILE)]
    return page(_CONFIG, *_sections(keys))


def profile_page() -> str:
    """The page of a profile's keys."""
    keys = [key for key in all_keys().values() if key.name.startswith(PROFILE)]
    at_top = [key for key in keys if key.name.count(".") == 1]
    return page(_PROFILE, *_sections([*at_top, *(key for key in keys if key not in at_top)]))


def _sections(keys: Iterable[Key]) -> Iterator[str]:
    for section, members in groupby(keys, key=lambda key: (_shown(key).rpartition(".")[0], key.section)):
        prefix, kind = section
        yield f"## {prefix or 'Top level'}"
        yield prose(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("``", "`").replace("\n", " "))
        yield from map(key_block, members)


def key_block(key: Key) -> str:
    """Heading, meaning, values, default and flags of a key.

    Raises:
        MissingText: no text is below the field.
    """
    name = _shown(key)
    meaning = required_text(name, meaning_of(key), f"below the field, in {key.section.__module__}")
    facts = f"Values: {code(values_of(key))}, {default_of(key)}."
    flags = ", ".join(map(code, flags_of(key)))
    of_submit = " of `llmctl submit`" if key.name.startswith(JOB) else ""
    return f"### {name}\n\n{meaning}\n\n{facts}" + (f" Flag{of_submit}: {flags}." if flags else "")


def _shown(key: Key) -> str:
    return key.name.removeprefix(PROFILE)
