"""JSON schemas of the documents that commands print with ``--json``.

The name of a schema is the command's words with hyphens between them. The types of the documents are the source.
"""

from collections.abc import Callable, Mapping
from typing import Any

from llmctl.cli.reference.type_schema import object_schema, schema_of

Schema = dict[str, Any]


def _status() -> Schema:
    from llmctl.cli.status import RunPlace
    from llmctl.runs.view import RunView

    return _runs(object_schema(RunView, RunPlace))


def _list() -> Schema:
    from llmctl.operate.history import PastRunFacts
    from llmctl.runs.view import RunView

    return _runs(object_schema(RunView, PastRunFacts))


def _runs(run: Schema) -> Schema:
    properties = {
        "runs": {"type": "array", "items": run, "description": "The runs, the newest first."},
        "more": {"type": "integer", "description": "Number of runs that were left out."},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _submission() -> Schema:
    from llmctl.operate.submission import SubmitDocument

    schema = object_schema(SubmitDocument)
    del schema["properties"]["resumes_from"]
    # Both are in the document of a dry run only.
    return schema | {"dependentRequired": {"script": ["commands"], "commands": ["script"]}}


def _resume() -> Schema:
    from llmctl.operate.submission import SubmitDocument

    schema = _submission()
    schema["properties"]["resumes_from"] = object_schema(SubmitDocument)["properties"]["resumes_from"]
    return schema | {"required": [*schema["required"], "resumes_from"]}


def _plan() -> Schema:
    from llmctl.submit.preview.calibration import Calibration
    from llmctl.submit.preview.predict import Prediction
    from llmctl.submit.preview.search import SearchedLayouts

    return {"anyOf": [object_schema(each) for each in (Prediction, SearchedLayouts, Calibration)]}


def _scale() -> Schema:
    from llmctl.operate.scale.table import ScaleDocument

    return object_schema(ScaleDocument)


def _tune() -> Schema:
    from llmctl.operate.tuning.results import TuneDocument

    return object_schema(TuneDocument)


def _nodes() -> Schema:
    from llmctl.cli.nodes import NodesDocument
    from llmctl.operate.bad_nodes import ExcludedDocument

    return {"anyOf": [object_schema(NodesDocument), object_schema(ExcludedDocument)]}


def _doctor() -> Schema:
    from llmctl.cli.doctor import DoctorDocument

    return object_schema(DoctorDocument)


def _clusters_list() -> Schema:
    from llmctl.cli.clusters import ClusterRow

    return schema_of(list[ClusterRow])


def _clusters_show() -> Schema:
    from llmctl.cli.clusters import ClusterPlaces
    from llmctl.site.profile import ClusterProfile

    return object_schema(ClusterProfile, ClusterPlaces)


def _env_bench() -> Schema:
    from llmctl.operate.submission import SubmitDocument
    from trainer.config.records.measured_hardware import HardwareDocument

    return {"anyOf": [object_schema(HardwareDocument), object_schema(SubmitDocument)]}


def _of_trainer(*names: str) -> Callable[[], Schema]:
    """The schema of a document of one of these types, see trainer_documents.py."""

    def schema() -> Schema:
        from llmctl.cli.reference import trainer_documents

        forms = [object_schema(getattr(trainer_documents, name)) for name in names]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    return schema


DOCUMENTS: Mapping[str, Callable[[], Schema]] = {
    "submit": _submission,
    "import-script": _submission,
    "plan": _plan,
    "scale": _scale,
    "tune": _tune,
    "resume": _resume,
    "status": _status,
    "list": _list,
    "data-prepare": _submission,
    "data-inspect": _of_trainer("DatasetDocument"),
    "checkpoint-show": _of_trainer("ModelDocument"),
    "generate": _of_trainer("ContinuationDocument"),
    "evaluate": _of_trainer("TextEvaluationDocument", "TaskEvaluationDocument"),
    "clusters-list": _clusters_list,
    "clusters-show": _clusters_show,
    "nodes": _nodes,
    "env-kernels": _of_trainer("KernelsDocument"),
    "env-bench": _env_bench,
    "doctor": _doctor,
}
"""Name -> the schema of a command's document."""
