"""``llmctl explain``: one key of a config or profile, or one flag of Megatron-LM, in a few lines."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_WIDTH = 100
_MOST_NAMES = 8
_FROM = "Checkpoint, Hugging Face folder or GGUF file whose shape the model takes, without its weights."
"""No field of a section has this key: it is replaced by the shape before the config is checked."""


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    words: Annotated[
        list[str], typer.Argument(metavar="KEY|--FLAG...", help="Keys of a config or a profile; flags of Megatron-LM.")
    ],
) -> int:
    """Explain a key of a config or profile, or a flag of Megatron-LM: meaning, values, default."""
    texts = [_explained(word) for word in words]
    print("\n\n".join(texts))
    return 0


def _explained(word: str) -> str:
    if word.startswith("-"):
        return _flag(word.lstrip("-").replace("_", "-").partition("=")[0])
    known = dict(_keys())
    found = [key for key in known if key in (word, f"profile.{word}")]
    found = found or [key for key in known if key.rpartition(".")[2] == word]
    if word == "model.from":
        return f"{word}: path; default unset\n  {_FROM}"
    if found:
        return "\n\n".join(_key(key, *known[key]) for key in found)
    from trainer.planning.build_config import unknown_key_problem

    if "." in word:
        raise UsageError(f"KEY: {word}: {unknown_key_problem(word)}")
    from trainer.config.other_names import OTHER_NAMES

    other = OTHER_NAMES.get(word.lower().replace("-", "_"))
    near = [other] if other else [key for key in known if word in key][:_MOST_NAMES]
    near = near or difflib.get_close_matches(word, [*known, *(key.rpartition(".")[2] for key in known)], n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UsageError(f"KEY: no key is called {word!r}{hint}")


def _keys() -> Iterator[tuple[str, tuple["type[BaseModel]", str]]]:
    """Every key of a config, and those of a profile below ``profile``, each with its class and name."""
    from pydantic import BaseModel

    from llmctl.site.profile import ClusterProfile
    from trainer.config.train_config import TrainConfig

    for prefix, top in (("", TrainConfig), ("profile.", ClusterProfile)):
        for name, field in top.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                for inner in kind.model_fields:
                    yield f"{prefix}{name}.{inner}", (kind, inner)
            elif name != "name":
                yield f"{prefix}{name}", (top, name)


def _key(key: str, kind: "type[BaseModel]", name: str) -> str:
    """Key, values, default and meaning, on a few lines."""
    from trainer.config.megatron_flags import ALIASES

    flags = [] if key.startswith(("profile.", "job.")) else [f"--{name.replace('_', '-')}"]
    flags += [f"--{flag}" for flag, alias in ALIASES.items() if alias.key == key]
    lines = [f"{key}: {_values(kind, name)}"]
    if flags:
        lines.append(f"  flag: {', '.join(flags)}")
    meaning = _docstrings(kind).get(name)
    if meaning:
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _values(kind: "type[BaseModel]", name: str) -> str:
    """Valid values and default in words, from the key's JSON schema."""
    field = kind.model_fields[name]
    schema = kind.model_json_schema()
    given = schema["properties"][field.alias or name]
    default = "required" if field.is_required() else f"default {_plain(given.get('default'))}"
    return f"{_words(given, schema.get('$defs', {}))}; {default}"


def _words(given: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    if "$ref" in given:
        return _words(parts[given["$ref"].rpartition("/")[2]], parts)
    if "enum" in given:
        return " or ".join(map(_plain, given["enum"]))
    if "const" in given:
        return _plain(given["const"])
    options = [each for each in given.get("anyOf", ()) if each.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_words(each, parts) for each in options))
    kind = given.get("type")
    if kind == "array":
        items = given.get("items", {})
        return f"list of {_words(items, parts)}s" if items else "list"
    if kind == "object":
        return "mapping"
    names = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
    bounds = [
        f"{sign} {_plain(given[key])}"
        for key, sign in (
            ("exclusiveMinimum", "above"),
            ("minimum", "at least"),
            ("exclusiveMaximum", "below"),
            ("maximum", "at most"),
        )
        if key in given
    ]
    named = names.get(str(kind), "any value")
    return f"{named} {', '.join(bounds)}" if bounds else named


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else "empty" if value in ([], {}, "") else str(value)


def _docstrings(kind: "type[BaseModel]") -> dict[str, str]:
    """Key -> the text below it in the source, of a class and its bases; the nearest wins."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.split(".")[0] not in ("llmctl", "trainer"):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                found.pop(before.target.id, None)
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[before.target.id] = " ".join(str(after.value.value).replace("``", "`").split())
    return found


def _flag(flag: str) -> str:
    """The answer to a flag of Megatron-LM: the key that it sets, no effect, or a refusal."""
    from trainer.config.counted_flags import COUNTED
    from trainer.config.megatron_flags import ALIASES, REFUSED, WITHOUT_EFFECT
    from trainer.planning.command_line import flag_keys

    keys = flag_keys()
    key = keys.get(flag) or (ALIASES[flag].key if flag in ALIASES else COUNTED.get(flag))
    if key is not None:
        value = ALIASES[flag].value if flag in ALIASES else None
        sets = f" to {_plain(value)}" if isinstance(value, (bool, int, float, str)) else ""
        how = ", converted to iterations" if flag in COUNTED else ""
        known = dict(_keys())
        return f"--{flag}: sets {key}{sets}{how}\n{_key(key, *known[key])}"
    if flag in WITHOUT_EFFECT:
        return f"--{flag}: has no effect: {WITHOUT_EFFECT[flag].reason}"
    if flag in REFUSED:
        return f"--{flag}: is refused: {REFUSED[flag]}"
    every = [*keys, *ALIASES, *COUNTED, *WITHOUT_EFFECT, *REFUSED]
    near = difflib.get_close_matches(flag, every, n=3)
    hint = f"; did you mean {', '.join(f'--{each}' for each in near)}?" if near else ""
    raise UsageError(f"--{flag}: Megatron-LM has no flag of this name{hint}")
