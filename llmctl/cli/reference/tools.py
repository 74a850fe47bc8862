"""Tools for coding agents of what ``explain``, ``schema`` and ``clusters`` print."""

from typing import Any, Literal

from pydantic import Field

from llmctl.api.call import calling
from llmctl.cli.clusters import cluster_document, cluster_row
from llmctl.cli.reference.explain import explained
from llmctl.cli.reference.schemas import SCHEMAS, schema_of_section
from llmctl.mcp_server.tool import Answer, Arguments, Tool
from llmctl.site.profile_names import cluster_names


class ExplainArguments(Arguments):
    """Words of ``llmctl explain``."""

    words: list[str] = Field(
        min_length=1, max_length=20, description="Keys of a config or profile; flags of Megatron-LM with --."
    )


def explain(asked: ExplainArguments) -> Answer:
    """The text of ``llmctl explain`` for each word."""
    texts = {word: explained(word) for word in asked.words}
    return Answer("\n\n".join(texts.values()), {"explained": texts})


class SchemaArguments(Arguments):
    """Name of a schema, and of a section."""

    name: Literal[tuple(SCHEMAS)] = Field(  # type: ignore[valid-type]
        description="; ".join(f"{name}: {words}" for name, (words, _) in SCHEMAS.items())
    )
    section: str | None = Field(
        None, description="Only this section of config or profile, such as optimizer: much shorter."
    )


def schema(asked: SchemaArguments) -> Answer:
    """The document of ``llmctl schema``, without the copies of descriptions that editors show as Markdown."""
    found = _without_markdown(schema_of_section(asked.name, asked.section))
    part = f"section {asked.section} of the " if asked.section is not None else ""
    document = {"name": asked.name, "section": asked.section, "schema": found}
    return Answer(f"JSON schema of the {part}{SCHEMAS[asked.name][0]}", document)


def _without_markdown(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_markdown(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_markdown(inner) for key, inner in value.items() if key != "markdownDescription"}


class ClustersArguments(Arguments):
    """A cluster, or none."""

    name: str | None = Field(None, description="All values of this cluster's profile. Unset: list all clusters.")


def clusters(asked: ClustersArguments) -> Answer:
    """The documents of ``llmctl clusters list --json`` and ``show --json``."""
    with calling("llmctl.mcp.clusters") as call:
        if asked.name is not None:
            document: dict[str, Any] = cluster_document(call.context, asked.name)
            return Answer(f"{asked.name}: scheduler {document['scheduler']}", document)
        rows = [cluster_row(call.context, name) for name in cluster_names(call.context.folders)]
    return Answer(", ".join(f"{row['name']} ({row['scheduler']})" for row in rows), {"clusters": rows})


TOOLS = (
    Tool(
        "explain",
        "Explain keys of a config or cluster profile, or flags of Megatron-LM: meaning, values, default.",
        ExplainArguments,
        explain,
    ),
    Tool(
        "schema",
        "JSON schema of a config, a profile, or a document of --json. Name a section of config and profile, which are "
        "long; explain answers for single keys.",
        SchemaArguments,
        schema,
    ),
    Tool("clusters", "List clusters with their schedulers, or show the profile of one.", ClustersArguments, clusters),
)
