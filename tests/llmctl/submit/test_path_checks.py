"""Folders whose names a mount or a job's environment cannot hold are refused before anything is queued."""

import pytest
import yaml

from llmctl.cli.main import main
from tests.trainer.data import token_files

MODEL = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    "training": {"train_iters": 10, "seq_length": 64, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture
def bed(own_folders, monkeypatch):
    """Writes the profile of the cluster ``bed``, with these keys changed."""
    (own_folders / "work").mkdir()
    monkeypatch.chdir(own_folders / "work")
    path = own_folders / "config/llmctl/clusters/bed.yaml"
    path.parent.mkdir(parents=True)

    def write(**changes):
        path.write_text(yaml.safe_dump({"scheduler": "slurm", "runs_root": f"{own_folders}/runs", **changes}))

    return write


def refused(capsys, *arguments, code):
    assert main(["submit", "--cluster", "bed", "--show-script", *arguments]) == code
    return capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["pyxis", "enroot", "apptainer"])
@pytest.mark.parametrize("letter", [":", ","])
def test_a_folder_whose_name_breaks_a_mount_is_refused(bed, tmp_path, capsys, monkeypatch, runtime, letter):
    bed(container={"runtime": runtime})
    odd = tmp_path / f"a{letter}b"
    (odd / "data").mkdir(parents=True)
    token_files.write(odd / "data/text", [[1] * 90])
    given = {
        f"{odd}/checkpoints": {"checkpoint": {"save": f"{odd}/checkpoints"}, "data": {"mock_data": True}},
        f"{odd}/data": {"data": {"data_path": [f"{odd}/data/text"]}},
    }
    for folder, sections in given.items():
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**MODEL, **sections}))
        message = refused(capsys, "--container", "ubuntu", str(tmp_path / "c.yaml"), code=2)
        assert f"{runtime} cannot mount {folder}: {letter!r} ends a name there" in message
        # A folder below a mount of the user gets no separate mount.
        mount = f"{tmp_path}:{tmp_path}"
        assert (
            main(
                ["submit", "--cluster", "bed", "--show-script", "--container", "ubuntu", "--mount", mount]
                + [str(tmp_path / "c.yaml")]
            )
            == 0
        )
        capsys.readouterr()
    monkeypatch.chdir(odd)
    message = refused(capsys, "--container", "ubuntu", "--", "true", code=2)
    assert f"{runtime} cannot mount {odd}: {letter!r} ends a name there" in message


@pytest.mark.parametrize("letter", ["\n", "\t", "\x01", ":"])
def test_a_runs_root_that_scripts_cannot_name_is_refused(bed, tmp_path, capsys, letter):
    bed(runs_root=f"{tmp_path}/a{letter}b")
    assert f"cannot hold {letter!r}" in refused(capsys, "--", "true", code=3)


def test_a_comma_in_runs_root_excludes_only_containers(bed, tmp_path, capsys):
    bed(runs_root=f"{tmp_path}/a,b", container={"runtime": "apptainer"})
    assert "apptainer cannot mount" in refused(capsys, "--container", "ubuntu", "--", "true", code=2)
    refused(capsys, "--", "true", code=0)
