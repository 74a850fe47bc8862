"""Listed nodes that a submission leaves out, on a stand-in for Slurm and on hosts behind ssh."""

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmctl.backends import load_backend
from llmctl.cli.main import main
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.bad_nodes.left_out import QueueNodes, choose, without_listed
from llmctl.submit.decide import build_request
from llmctl.submit.job import Job
from llmctl.supervisor.bad_nodes.entries import BadNode, read_entries, write_entry
from tests.llmctl.documents import problems_of

NOW = 1e9
BAD = BadNode("n3", "product speed: 0.4 of the median", "preflight", "r", 1, NOW - 3600)
NODES = tuple(f"n{number}" for number in range(1, 41))


def job_of(tmp_path, nodes=1, **more):
    profile = ClusterProfile.model_validate({"name": "bed", "scheduler": "slurm", "runs_root": str(tmp_path), **more})
    backend = load_backend(profile.scheduler)
    spec = JobSpec(name="r", nodes=nodes, command=("true",))
    request = build_request(spec, profile, backend, name="r", run_dir=str(tmp_path / "r"))
    return Job(spec=spec, request=request, backend=backend, folders=None, is_remote=False)  # type: ignore[arg-type]


def chosen(job, *names, nodes=NODES, all_names=None, **changes):
    entries = [BAD._replace(node=name, time=BAD.time + place, **changes) for place, name in enumerate(names)]
    choice = choose(entries, job, QueueNodes(tuple(nodes), frozenset(all_names or nodes)), NOW)
    return [one.node for one in choice.left_out], list(choice.remarks)


def test_the_newest_entries_up_to_a_tenth_of_the_nodes_are_left_out(tmp_path):
    names, remarks = chosen(job_of(tmp_path), "n1", "n2", "n3", "n4", "n5")
    assert names == ["n5", "n4", "n3", "n2"]
    (remark,) = remarks
    assert remark == (
        "not left out: n1 (preflight: product speed: 0.4 of the median, 60 min ago): at most one node in ten "
        "is, or one; llmctl nodes --cluster bed --readmit n1"
    )
    assert chosen(job_of(tmp_path), "n1", "n2", nodes=NODES[:4])[0] == ["n2"]
    assert chosen(job_of(tmp_path), "n1", "n2", nodes=())[0] == ["n2"]


def test_the_job_keeps_the_nodes_that_it_needs(tmp_path):
    names, remarks = chosen(job_of(tmp_path, nodes=4), "n1", nodes=NODES[:4])
    assert names == [] and "the job needs 4 of the 4 nodes that accept jobs" in remarks[0]


def test_a_node_that_the_scheduler_does_not_have_is_not_named_to_it(tmp_path):
    names, remarks = chosen(job_of(tmp_path), "elsewhere", "n2.site.example")
    assert names == ["n2"] and "bed has no such node" in remarks[0]
    assert chosen(job_of(tmp_path), "n40", nodes=NODES[:20], all_names=NODES) == ([], [])


@pytest.mark.parametrize(
    ("option", "is_asked"), [("--nodelist=n2,n3", True), ("--exclude=n3", False), ("-x n3", False)]
)
def test_a_node_that_an_option_asks_for_is_not_left_out(tmp_path, option, is_asked):
    names, remarks = chosen(job_of(tmp_path, options=[option]), "n3")
    assert names == ([] if is_asked else ["n3"])
    assert [("options of the profile ask for it" in one) for one in remarks] == [True] * is_asked


@pytest.fixture
def listed(home):
    """Function that writes entries beside the runs of the user."""
    root = home / "runs"
    folder = root / f".llmctl-{os.geteuid()}/nodes"
    folder.mkdir(parents=True)
    for path in (root, folder.parent, folder):
        path.chmod(0o700)

    def write(*names, age_s=7200.0):
        for name in names:
            write_entry(str(folder), BAD._replace(node=name, time=time.time() - age_s))
        return folder

    return write


def dry_run(capsys, cluster, *more):
    assert main(["submit", "--cluster", cluster, "--dry-run", "--json", "--run-id", "r", *more, "--", "true"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert problems_of("submit", document) == []
    return document, captured.err


def write_profile(own_folders, **values):
    folder = own_folders / "config/llmctl/clusters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bed.yaml").write_text(json.dumps(values))


def test_a_listed_node_reaches_the_directive_the_document_and_the_output(listed, own_folders, capsys):
    write_profile(own_folders, scheduler="slurm")
    listed("n3")
    document, said = dry_run(capsys, "bed")
    assert "#SBATCH --exclude=n3\n" in document["script"]
    assert [(one["node"], one["kind"]) for one in document["left_out"]] == [("n3", "preflight")]
    assert "left out: n3 (preflight: product speed: 0.4 of the median, 2 h 0 min ago); llmctl nodes --cluster" in said
    document, said = dry_run(capsys, "bed", "--exclude", "n3")
    assert "#SBATCH --exclude=n3\n" in document["script"] and document["left_out"] == []


def test_old_and_hostile_entries_never_reach_the_script(listed, own_folders, capsys):
    write_profile(own_folders, scheduler="slurm")
    folder = listed("n3", age_s=15 * 86400.0)
    (folder / "n4;touch x.json").write_text("{}")
    (folder / "n5.json").symlink_to(folder / "n3.json")
    document, said = dry_run(capsys, "bed")
    assert "exclude" not in document["script"] and document["left_out"] == []
    assert said.count("is left out of account: ") == 2


def test_a_scheduler_without_a_way_says_so(listed, capsys):
    listed("n3")
    document, said = dry_run(capsys, "local")
    assert document["left_out"] == []
    assert "not left out: n3 (preflight: product speed: 0.4 of the median, 2 h 0 min ago): local has no way" in said


def test_the_list_is_shown_and_a_node_taken_off(listed, capsys):
    folder = listed("n3", "n4")
    assert main(["nodes", "--excluded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NODE", "FAILURES", "AGE", "RUN", "CAUSE"]
    assert {line.split()[0] for line in lines[1:]} == {"n3", "n4"}
    assert main(["nodes", "--readmit", "n5"]) == 2
    assert "--readmit n5: is not on the list of bad nodes of local; there are n3, n4" in capsys.readouterr().err
    assert main(["nodes", "--readmit", "../nodes/n3"]) == 2
    assert main(["nodes", "--readmit", "n3", "--json"]) == 0
    captured = capsys.readouterr()
    assert [one["node"] for one in json.loads(captured.out)["excluded"]] == ["n4"]
    assert [one["node"] for one in read_entries(str(folder.parents[1]))["entries"]] == ["n4"]


def test_the_hosts_of_a_job_are_chosen_without_the_listed_ones(tmp_path):
    transport = SimpleNamespace(now=lambda: NOW)
    session = SimpleNamespace(transport=transport)
    job = job_of(tmp_path, nodes=1, scheduler="ssh", hosts=["g1", "g2"])
    entry = BAD._replace(node="g1", time=NOW - 60)
    warnings = []
    found = without_listed(session, job, {"entries": [entry._asdict()], "remarks": []}, warnings, dry_run=False)
    assert found.request.hosts == ("g2",) and warnings[0].startswith("left out: g1 (")
    both = replace(job, request=replace(job.request, nodes=2))
    warnings = []
    found = without_listed(session, both, {"entries": [entry._asdict()], "remarks": []}, warnings, dry_run=False)
    assert found is both and "the job needs 2 of the 2" in warnings[0]
