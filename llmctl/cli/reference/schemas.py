"""JSON schemas of the files that users write, training config and cluster profile, and of the documents of ``--json``.

Editors check a file, complete its keys and explain them by its schema (JSON Schema 2020-12).
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llmctl.cli.reference.documents import DOCUMENTS
from llmctl.cli.reference.keys import FROM_MEANING, PROFILE, Key, all_keys, flags_of, meaning_of
from llmctl.errors import UsageError
from llmctl.runs.metrics import OTHER_ROWS

_DEFS = "#/$defs/"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


def config_schema() -> Schema:
    """The schema of ``llmctl.yaml`` and every other training config.

    A model that starts from a checkpoint or folder takes its shape from there. Without one, the keys that every model
    needs are required.
    """
    from trainer.config.train_config import TrainConfig

    keys = [key for key in all_keys().values() if not key.name.startswith(PROFILE)]
    schema = _explained(_as_files_have_it(TrainConfig.model_json_schema()), keys)
    model = schema["$defs"]["ModelConfig"]
    model["properties"] = {"from": {"type": "string", "description": FROM_MEANING}, **model["properties"]}
    shape = {"required": ["model"], "properties": {"model": {"required": model.pop("required")}}}
    schema["required"].remove("model")
    starts = [_has("checkpoint", "load"), _has("model", "from")]
    schema |= {"if": {"not": {"anyOf": starts}}, "then": shape}
    return _described(schema, "Training config of llmctl.")


def profile_schema() -> Schema:
    """The schema of a cluster profile.

    No key is required: a file that has the name of a bundled profile holds some of its keys.
    """
    from llmctl.site.profile import ClusterProfile

    keys = [key for key in all_keys().values() if key.name.startswith(PROFILE)]
    schema = _explained(ClusterProfile.model_json_schema(), keys)
    del schema["properties"]["name"]
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
    return _described(schema, "Cluster profile of llmctl.")


def metrics_schema() -> Schema:
    """The schema of a row of metrics.jsonl: of training, an evaluation, tasks, a save, a missed save or a spike."""
    from llmctl.cli.reference.type_schema import schema_of
    from trainer.config.records.row_fields import FIELDS

    fields = {
        name: {**schema_of(field.kind), "description": _row_meaning(field.unit, field.when, field.meaning)}
        for name, field in FIELDS.items()
    }
    loss = "A further loss, of training or of an evaluation."
    schema: Schema = {
        "type": "object",
        "properties": fields,
        "patternProperties": {"^(valid_)?\\w+_loss$": {"type": ["number", "null"], "description": loss}},
        "required": ["attempt", "iteration", "time"],
        "anyOf": [{"required": [name]} for name in ("lm_loss", "valid_loss", *OTHER_ROWS)],
        "additionalProperties": False,
    }
    return _described(schema, "A row of metrics.jsonl, in the directory of a run.")


def _row_meaning(unit: str, when: str, meaning: str) -> str:
    return f"{meaning} Rows: {when}.{f' Unit: {unit}.' if unit else ''}"


def _command(name: str) -> str:
    return name if name == "import-script" else name.replace("-", " ")


def _of_document(name: str) -> Schema:
    return _described(DOCUMENTS[name](), f"What llmctl {_command(name)} --json prints.")


SCHEMAS: Mapping[str, tuple[str, Callable[[], Schema]]] = {
    "config": ("training config, such as llmctl.yaml", config_schema),
    "profile": ("cluster profile, clusters/NAME.yaml", profile_schema),
    "metrics": ("row of metrics.jsonl, in the directory of a run", metrics_schema),
    **{name: (f"what llmctl {_command(name)} --json prints", partial(_of_document, name)) for name in DOCUMENTS},
}
"""Name -> the file in a few words, and its schema."""


def schema_text(name: str, section: str | None = None) -> str:
    """A schema of SCHEMAS, or a section of one, as a file has it.

    Raises:
        UsageError: the schema has no such section.
    """
    return json.dumps(schema_of_section(name, section), indent=1) + "\n"


def schema_of_section(name: str, section: str | None) -> Schema:
    """The schema of the values of one section of a config or profile, with the definitions that the section needs.

    Args:
        name: of SCHEMAS.
        section: name of the section; None: the whole schema.

    Raises:
        UsageError: the schema has no such section.
    """
    whole = SCHEMAS[name][1]()
    if section is None:
        return whole
    parts: Mapping[str, Schema] = whole.get("$defs", {})
    if not parts:
        raise UsageError(
            f"section {section!r}: only config and profile have sections; leave the section out for {name}"
        )
    fields, sections = whole["properties"], sections_of(whole)
    if section not in sections:
        raise UsageError(f"section {section!r}: {name} has no such section; the sections are {', '.join(sections)}")
    field = {key: value for key, value in fields[section].items() if key != "default"}
    schema = {**parts.get(field.pop("$ref", "").removeprefix(_DEFS), {}), **field, "$schema": _DRAFT}
    needed = _needed(schema, parts)
    return {**schema, "$defs": needed} if needed else schema


def sections_of(whole: Schema) -> list[str]:
    """Names of the sections of a config or profile, whose whole schema this is."""
    return [key for key, field in whole["properties"].items() if "$ref" in field or field.get("type") == "object"]


def _needed(schema: Schema, parts: Mapping[str, Schema]) -> dict[str, Schema]:
    """The definitions to which a schema refers, also through others."""
    needed: dict[str, Schema] = {}
    waiting = [schema]
    while waiting:
        for name in re.findall(rf'"{re.escape(_DEFS)}(\w+)"', json.dumps(waiting.pop())):
            if name not in needed:
                needed[name] = parts[name]
                waiting.append(parts[name])
    return needed


def _has(section: str, key: str) -> Schema:
    return {"properties": {section: {"required": [key]}}, "required": [section]}


def _described(schema: Schema, words: str) -> Schema:
    # No title: an editor would offer it as if it were a key.
    return {**schema, "$schema": _DRAFT, "description": words}


def _explained(schema: Schema, keys: list[Key]) -> Schema:
    """The schema with the meaning of each key, and its name as the title: editors show both."""
    parts = schema.get("$defs", {})
    for part in (schema, *parts.values()):
        part.pop("title", None)
    for key in keys:
        part = parts.get(key.section.__name__, schema)
        field = part["properties"][key.field]
        field["title"] = key.field
        # Editors show the second as Markdown, others know only the first.
        field["description"] = field["markdownDescription"] = _meaning(key)
    return schema


def _as_files_have_it(schema: Schema) -> Schema:
    from trainer.config.blends import PATH_KEYS

    for key in PATH_KEYS:  # a blend has weights between its paths
        schema["$defs"]["DataConfig"]["properties"][key]["items"] = {"type": ["string", "number"]}
    for section in schema["$defs"].values():
        properties = section.get("properties", {})
        properties |= {name: _as_written(field) for name, field in properties.items()}
    return schema


def _as_written(field: Schema) -> Schema:
    """The schema of a field with the shorter spellings that a file may have: one text for a list, or no value."""
    options = field.get("anyOf", [field])
    lists = [each for each in options if each.get("type") == "array"]
    others: list[Schema] = [{"type": "null"}] if lists or field.get("type") == "object" else []
    if any(_is_text_or_flag(each.get("items", {})) for each in lists):
        others.append({"type": "string"})
    missing = [each for each in others if each not in options]
    if not missing:
        return field
    about: Schema = {key: field[key] for key in ("default", "description") if key in field}
    plain = [_with_digits({key: each[key] for key in each if key not in ("title", *about)}) for each in options]
    return {"anyOf": [*plain, *missing], **about}


def _with_digits(option: Schema) -> Schema:
    """A list of true and false may also be one of 1 and 0."""
    is_flags = option.get("items", {}).get("type") == "boolean"
    return {**option, "items": {"enum": [True, False, 1, 0]}} if is_flags else option


def _is_text_or_flag(items: Mapping[str, Any]) -> bool:
    """Of a list that one text may stand for: names, or a pattern of layers such as ``([0]*3+[1]*1)*8``."""
    return items.get("type") in ("string", "boolean", ["string", "number"])


def _meaning(key: Key) -> str:
    flags = ", ".join(f"`{flag}`" for flag in flags_of(key))
    return f"{meaning_of(key)}\n\nFlag: {flags}" if flags else meaning_of(key)
