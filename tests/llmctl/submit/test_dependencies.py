"""``--after`` on Grid Engine, which cannot tell how a job ended, with fake programs."""

import yaml

from llmctl.cli.main import main

PROGRAMS = {"qsub": "echo 'Your job 7 (\"x\") has been submitted'", "qstat": "true"}


def test_after_on_grid_engine_waits_for_any_end_and_warns(tmp_path, monkeypatch, capsys):
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("LLMCTL_RUNS_ROOT", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    clusters = tmp_path / "config/llmctl/clusters"
    clusters.mkdir(parents=True)
    (clusters / "bed.yaml").write_text(yaml.safe_dump({"scheduler": "sge", "runs_root": f"{tmp_path}/runs"}))
    assert main(["submit", "--cluster", "bed", "--run-id", "first", "--", "true"]) == 0
    capsys.readouterr()
    has_warned = {}
    for after in ("first", "any:first"):
        assert main(["submit", "--cluster", "bed", "--dry-run", "--after", after, "--", "true"]) == 0
        output = capsys.readouterr()
        assert "#$ -hold_jid 7\n" in output.out
        has_warned[after] = (
            "--after first: bed cannot tell how a job ended: the new job starts after any end" in output.err
        )
    assert has_warned == {"first": True, "any:first": False}
