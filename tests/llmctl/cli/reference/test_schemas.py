"""JSON schemas of config and profile: valid, agreeing with what llmctl accepts, and printed by ``llmctl schema``."""

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from llmctl.cli.main import main
from llmctl.cli.reference.keys import PROFILE, all_keys
from llmctl.cli.reference.schemas import SCHEMAS, config_schema, profile_schema, schema_of_section, sections_of
from llmctl.site.profile import ClusterProfile
from tests.docs.shown_commands import ROOT
from trainer.config.train_config import TrainConfig

CONFIG: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
    "training": {"train_iters": 1, "seq_length": 8},
    "optimizer": {"lr": 0.1},
    "data": {"mock_data": True},
}
CLUSTER = {"name": "x", "scheduler": "slurm"}
# What a YAML file may hold. pydantic also takes "1", 1 and true for one another, which an editor may well point out, as
# it may a time without its unit.
VALUES = ("text", "auto", ["text"], ["text", 2], [1, 0], [True], "[0]*2", {}, {"A": "b"}, None, -1, 0.5, 7, "0:30:00")


def laid_over(base: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(dict(base))
    part = whole
    *sections, name = dotted.split(".")
    for section in sections:
        part = part.setdefault(section, {})
    part[name] = value
    return whole


def is_accepted(kind: type[BaseModel], values: Mapping[str, Any]) -> bool:
    try:
        kind(**values)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("schema", "kind", "prefix", "base"),
    [(config_schema, TrainConfig, "", CONFIG), (profile_schema, ClusterProfile, PROFILE, CLUSTER)],
    ids=["config", "profile"],
)
def test_the_schema_accepts_each_value_that_llmctl_accepts(schema, kind, prefix, base):
    validator = Draft202012Validator(schema())
    keys = [key for key in all_keys() if key.startswith(PROFILE) == bool(prefix) and ".NAME" not in key]
    wrong, refused = [], 0
    for key in keys:
        for value in VALUES:
            whole = laid_over(base, key.removeprefix(prefix), value)
            found = validator.is_valid({name: part for name, part in whole.items() if name != "name"})
            refused += not found
            if not found and is_accepted(kind, whole) and not (key.endswith("time") and isinstance(value, int)):
                wrong.append((key, value))
    assert wrong == []
    assert refused > 2 * len(keys), "each key has values of a wrong type"


def test_a_key_that_no_section_has_is_refused():
    config, profile = Draft202012Validator(config_schema()), Draft202012Validator(profile_schema())
    assert config.is_valid(CONFIG) and profile.is_valid({"scheduler": "slurm"})
    assert not config.is_valid({**CONFIG, "modell": {}}) and not profile.is_valid({"shceduler": "slurm"})
    for section in ("job", "parallel", *CONFIG):
        assert not config.is_valid(laid_over(CONFIG, f"{section}.no_such_key", 1)), section


def test_a_model_needs_its_shape_unless_it_starts_from_a_checkpoint():
    validator = Draft202012Validator(config_schema())
    rest = {name: part for name, part in CONFIG.items() if name != "model"}
    assert not validator.is_valid(rest) and not validator.is_valid({**rest, "model": {"num_layers": 2}})
    assert validator.is_valid({**rest, "model": {"from": "folder", "hidden_dropout": 0.0}})
    assert validator.is_valid({**rest, "checkpoint": {"load": "folder"}})


def test_every_key_is_explained_to_an_editor():
    for name in ("config", "profile"):
        found = SCHEMAS[name][1]()
        for part in found["$defs"].values():
            missing = [key for key, field in part.get("properties", {}).items() if not field.get("description")]
            assert missing == [], name


@pytest.mark.parametrize("name", ["config", "profile"])
def test_a_section_has_the_schema_that_it_has_in_the_whole(name):
    whole = SCHEMAS[name][1]()
    for section in sections_of(whole):
        found = schema_of_section(name, section)
        Draft202012Validator.check_schema(found)
        assert found["description"] and len(json.dumps(found)) < len(json.dumps(whole)) / 2
        for value in ({}, {"no_such_key": 1}, {"lr": 0.1}, {"lr": "x"}, {"port_rule": {"base": "x"}}, {"a": {"b": 1}}):
            in_whole = Draft202012Validator({"$defs": whole["$defs"], **whole["properties"][section]})
            assert Draft202012Validator(found).is_valid(value) == in_whole.is_valid(value)


def check_jsonschema(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_another_program_finds_schemas_bundled_configs_and_profiles_valid(tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in SCHEMAS}
    for name, path in files.items():
        path.write_text(json.dumps(SCHEMAS[name][1]()))
    done = check_jsonschema("--check-metaschema", *files.values())
    assert done.returncode == 0, done.stdout
    for name, folder in (("config", "examples"), ("profile", "clusters")):
        done = check_jsonschema("--schemafile", files[name], *sorted((ROOT / folder).glob("*.yaml")))
        assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / "examples/gpt_small.yaml").read_text().replace("num_layers:", "layers:"))
    done = check_jsonschema("--schemafile", files["config"], wrong)
    assert done.returncode == 1 and "'num_layers' is a required property" in done.stdout, done.stdout


def test_the_command_lists_prints_and_writes_schemas(own_folders, capsys):
    assert main(["schema"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "config           training config, such as llmctl.yaml"
    assert main(["schema", "config"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()
    assert main(["schema", "profile", "-o", "p.json"]) == 0
    assert json.loads(Path("p.json").read_text()) == profile_schema() and own_folders.is_dir()
    assert main(["schema", "profile", "-o", "p.json"]) == 2
    assert "p.json: exists already; name another file" in capsys.readouterr().err
    assert main(["schema", "config", "--section", "optimizer"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of_section("config", "optimizer")
    assert main(["schema", "config", "--section", "optim"]) == 2
    assert "section 'optim': config has no such section; the sections are job, model, " in capsys.readouterr().err
    assert main(["schema", "status", "--section", "runs"]) == 2
    assert "only config and profile have sections; leave the section out for status" in capsys.readouterr().err
    assert main(["schema", "--section", "model"]) == 2
    assert "--section model: is a section of one schema; name the schema: config, " in capsys.readouterr().err
    assert main(["schema", "profil"]) == 2
    assert "there is no schema 'profil'; the schemas are config, profile, " in capsys.readouterr().err
    assert main(["schema", "-o", "p.json"]) == 2
    assert "name the schema: config, profile, " in capsys.readouterr().err
