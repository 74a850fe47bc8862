"""``llmctl explain``: one key of a config or profile, or one flag of Megatron-LM, in a few lines."""

import difflib
import textwrap
from typing import Annotated

import typer

from llmctl.cli.reference.keys import (
    FROM_MEANING,
    JOB,
    PROFILE,
    Key,
    all_keys,
    default_of,
    flags_of,
    meaning_of,
    plain,
    values_of,
)
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_WIDTH = 100
_MOST_NAMES = 8


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    words: Annotated[
        list[str], typer.Argument(metavar="KEY|--FLAG...", help="Keys of a config or a profile; flags of Megatron-LM.")
    ],
) -> int:
    """Explain a key of a config or profile, or a flag of Megatron-LM: meaning, values, default."""
    texts = [explained(word) for word in words]
    print("\n\n".join(texts))
    return 0


def explained(word: str) -> str:
    """The lines about a key, or a flag.

    Raises:
        UsageError: there is no such key or flag.
    """
    if word.startswith("-"):
        return _flag(word.lstrip("-").replace("_", "-").partition("=")[0])
    known = all_keys()
    found = [key for key in known if key in (word, f"{PROFILE}{word}")]
    found = found or [key for key in known if key.rpartition(".")[2] == word]
    if word == "model.from":
        return f"{word}: path; default unset\n  {FROM_MEANING}"
    if found:
        return "\n\n".join(_key(known[key]) for key in found)
    from trainer.planning.build_config import unknown_key_problem

    if "." in word:
        raise UsageError(f"KEY: {word}: {unknown_key_problem(word)}")
    from trainer.config.other_names import OTHER_NAMES

    other = OTHER_NAMES.get(word.lower().replace("-", "_"))
    near = [other] if other else [key for key in known if word in key][:_MOST_NAMES]
    near = near or difflib.get_close_matches(word, [*known, *(key.rpartition(".")[2] for key in known)], n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UsageError(f"KEY: no key is called {word!r}{hint}")


def _key(key: Key) -> str:
    """Key, values, default and meaning, on a few lines."""
    lines = [f"{key.name}: {values_of(key)}; {default_of(key)}"]
    flags = flags_of(key)
    if flags:
        lines.append(f"  flag{' of submit' if key.name.startswith(JOB) else ''}: {', '.join(flags)}")
    lines += textwrap.wrap(meaning_of(key), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _flag(flag: str) -> str:
    """The answer to a flag of Megatron-LM: the key that it sets, no effect, or a refusal."""
    from trainer.config.counted_flags import COUNTED
    from trainer.config.joint.flags import JOINT_FLAGS
    from trainer.config.megatron_flags import ALIASES, REFUSED, SQUARE_ROOTS, WITHOUT_EFFECT
    from trainer.planning.command_line import flag_keys

    keys = flag_keys()
    key = keys.get(flag) or (ALIASES[flag].key if flag in ALIASES else COUNTED.get(flag))
    if key is not None:
        value = ALIASES[flag].value if flag in ALIASES else None
        sets = f" to {plain(value)}" if isinstance(value, (bool, int, float, str)) else ""
        how = ", converted to iterations" if flag in COUNTED else ""
        return f"--{flag}: sets {key}{sets}{how}\n{_key(all_keys()[key])}"
    if flag in SQUARE_ROOTS:
        key, of = SQUARE_ROOTS[flag]
        return f"--{flag}: sets {key} to the square root of {of}\n{_key(all_keys()[key])}"
    if flag in JOINT_FLAGS:
        key = JOINT_FLAGS[flag][0]
        return f"--{flag}: sets {key} together with other flags\n{_key(all_keys()[key])}"
    if flag in WITHOUT_EFFECT:
        return f"--{flag}: has no effect: {WITHOUT_EFFECT[flag].reason}"
    if flag in REFUSED:
        return f"--{flag}: is refused: {REFUSED[flag]}"
    every = [*keys, *ALIASES, *COUNTED, *SQUARE_ROOTS, *JOINT_FLAGS, *WITHOUT_EFFECT, *REFUSED]
    near = difflib.get_close_matches(flag, every, n=3)
    hint = f"; did you mean {', '.join(f'--{each}' for each in near)}?" if near else ""
    raise UsageError(f"--{flag}: Megatron-LM has no flag of this name{hint}")
