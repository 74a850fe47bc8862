"""Checks that what commands print with ``--json`` is as ``llmctl schema`` says."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator

from llmctl.cli.reference.documents import DOCUMENTS
from llmctl.cli.reference.schemas import SCHEMAS


def name_of(words: Sequence[str]) -> str:
    """Name of the schema of a command line."""
    words = [word for word in words if not word.startswith("-")]
    two = "-".join(words[:2])
    return two if two in DOCUMENTS else words[0]


def problems_of(name: str, document: Any) -> list[str]:
    """Deviations of a document from its schema, each with its place."""
    text = json.dumps(document, allow_nan=False)
    errors = _validator(name).iter_errors(json.loads(text))
    return [f"{name}: {error.json_path}: {error.message}" for error in errors]


def checked(words: Sequence[str], output: str) -> str:
    """The output of a command line, whose document, if it prints one, is as the command's schema says."""
    if "--json" in words and output:
        # A command that goes on has lines of its own below the document.
        document, _ = json.JSONDecoder().raw_decode(output)
        problems = problems_of(name_of(words), document)
        assert not problems, "\n".join(problems)
    return output


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    schema = SCHEMAS[name][1]()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
