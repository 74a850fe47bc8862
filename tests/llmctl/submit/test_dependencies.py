"""``--after`` on Grid Engine, which cannot tell how a job ended, with fake programs."""

import yaml

from llmctl.cli.main import main

PROGRAMS = {"qsub": "echo 'Your job 7 (\"x\") has been submitted'", "qstat": "true"}


def test_after_on_grid_engine_waits_for_any_end_and_warns(own_folders, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{own_folders}/bin:/usr/bin:/bin")
    (own_folders / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (own_folders / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (own_folders / "bin" / name).chmod(0o755)
    clusters = own_folders / "config/llmctl/clusters"
    clusters.mkdir(parents=True)
    (clusters / "bed.yaml").write_text(yaml.safe_dump({"scheduler": "sge", "runs_root": f"{own_folders}/runs"}))
    assert main(["submit", "--cluster", "bed", "--run-id", "first", "--", "true"]) == 0
    capsys.readouterr()
    has_warned = {}
    for after in ("first", "any:first"):
        assert main(["submit", "--cluster", "bed", "--show-script", "--after", after, "--", "true"]) == 0
        output = capsys.readouterr()
        assert "#$ -hold_jid 7\n" in output.out
        has_warned[after] = (
            "--after first: bed cannot tell how a job ended: the new job starts after any end" in output.err
        )
    assert has_warned == {"first": True, "any:first": False}
