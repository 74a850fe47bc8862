"""Cluster profiles: valid content, precedence, and error messages."""

import pytest

from llmctl.cli.main import main
from llmctl.errors import ProfileError, UsageError
from llmctl.paths import BUNDLED, UserFolders
from llmctl.site.profile import SCHEDULERS, load_profile
from llmctl.site.profile_names import cluster_names


@pytest.fixture
def folders(own_folders):
    (own_folders / "config/llmctl/clusters").mkdir(parents=True)
    return UserFolders(own_folders, own_folders / "config/llmctl", own_folders / "state/llmctl")


@pytest.mark.parametrize("path", sorted((BUNDLED / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_profile_loads(folders, path):
    assert load_profile(folders, path.stem).description


def test_an_overlay_replaces_what_it_names_and_nothing_else(folders):
    (folders.clusters / "local.yaml").write_text("runs_root: /big\nenvironment: {modules: [cuda]}\n")
    profile = load_profile(folders, "local")
    assert (profile.runs_root, profile.environment.modules, profile.scheduler) == ("/big", ("cuda",), "local")
    assert profile.rendezvous.ports == (20000, 29999)


WRONG = [
    ("runs_roots: /big", ["runs_roots", "did you mean runs_root?"]),
    ("environment: {module: [a]}", ["environment.module", "did you mean environment.modules?"]),
    ("environment: {kind: venv}", ["environment", "kind and path go together"]),
    ("scheduler: cron", ["scheduler", "'cron'", f"the schedulers are {', '.join(SCHEDULERS)}"]),
    ("rendezvous: {ports: [5, 1]}", ["rendezvous.ports", "from 1 to 65535"]),
    ("stop_grace_s: 0", ["stop_grace_s", "greater than 0"]),
    ("env: {1A: x}", ["env", "'1A'"]),
    ("name: other", ["name", "remove the key"]),
    ("runs_root: [", ["is not valid YAML"]),
    ("runs_root: a\nruns_root: b", ["key 'runs_root' occurs twice"]),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_an_error_names_file_and_key(folders, text, message):
    path = folders.clusters / "local.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load_profile(folders, "local")
    assert caught.value.message.startswith(f"{path}: ")
    assert [words for words in message if words not in caught.value.message] == []
    assert len(caught.value.message.splitlines()) <= 2


def test_an_unknown_cluster_is_refused_with_the_nearest_name(folders):
    (folders.clusters / "lab.yaml").write_text("scheduler: local\nruns_root: /runs\n")
    with pytest.raises(UsageError, match="no cluster is called '../x'; `llmctl clusters list` shows all"):
        load_profile(folders, "../x")
    with pytest.raises(UsageError, match="no cluster is called 'labs'; did you mean lab?"):
        load_profile(folders, "labs", "--cluster")
    with pytest.raises(ProfileError, match="LLMCTL_CLUSTER: no cluster is called 'no'"):
        load_profile(folders, "no", "LLMCTL_CLUSTER")
    assert cluster_names(folders) == sorted({"lab", *(path.stem for path in (BUNDLED / "clusters").glob("*.yaml"))})


def test_the_default_cluster_comes_from_flag_environment_and_config_file(folders, monkeypatch, capsys):
    monkeypatch.delenv("LLMCTL_CLUSTER", raising=False)
    folders.config_file.write_text("cluster: from-file\n")
    assert main(["submit", "--", "true"]) == 3
    assert f"{folders.config_file}: cluster: no cluster is called 'from-file'" in capsys.readouterr().err
    monkeypatch.setenv("LLMCTL_CLUSTER", "from-environment")
    assert main(["submit", "--", "true"]) == 3
    assert "LLMCTL_CLUSTER: no cluster is called 'from-environment'" in capsys.readouterr().err
    assert main(["submit", "--cluster", "from-flag", "--", "true"]) == 2
    assert "--cluster: no cluster is called 'from-flag'" in capsys.readouterr().err
    monkeypatch.delenv("LLMCTL_CLUSTER")
    folders.config_file.write_text("clusters: x\n")
    assert main(["submit", "--", "true"]) == 3
    assert f"{folders.config_file}: clusters: unknown key" in capsys.readouterr().err


def test_new_writes_a_valid_profile_and_overwrites_none(folders, capsys):
    arguments = ["--scheduler", "local", "--runs-root", "/big/a 'b'", "--venv", "/v: #x", "--module", "cuda/12"]
    assert main(["clusters", "new", "lab", *arguments, "--group", "g", "--description", 'say "hi": #1']) == 0
    path = folders.clusters / "lab.yaml"
    assert capsys.readouterr().out == f"{path}\n"
    profile = load_profile(folders, "lab")
    assert (profile.runs_root, profile.group, profile.description) == ("/big/a 'b'", "g", 'say "hi": #1')
    assert (profile.environment.kind, profile.environment.path) == ("venv", "/v: #x")
    assert profile.environment.modules == ("cuda/12",)
    before = path.read_text()
    assert main(["clusters", "new", "lab", *arguments]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["clusters", "new", "bare", "--scheduler", "local"]) == 0
    uncommented = (folders.clusters / "bare.yaml").read_text().replace("# ", "").splitlines()
    keys = [line.partition(":")[0].strip() for line in uncommented if ":" in line]
    assert {"environment", "modules", "kind", "path", "python", "setup", "rendezvous", "env", "stop_grace_s"} <= set(
        keys
    )


@pytest.mark.parametrize(
    ("arguments", "message"), [(["../x"], "NAME ../x"), (["a", "--scheduler", "no"], "--scheduler no")]
)
def test_new_refuses_invalid_values(folders, capsys, arguments, message):
    assert main(["clusters", "new", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(folders.clusters.iterdir()) == []


def test_list_show_and_validate(folders, capsys, tmp_path):
    (folders.clusters / "bad.yaml").write_text("scheduler: local\nrun_root: x\n")
    (folders.clusters / "local.yaml").write_text(f"runs_root: {tmp_path}/runs\n")
    assert main(["clusters", "list"]) == 0
    assert {"bad", "local", "slurm"} <= {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()}
    assert main(["clusters", "show", "nowhere"]) == 2
    assert main(["clusters", "show", "local"]) == 0
    shown = capsys.readouterr().out
    assert f"# {folders.clusters}/local.yaml  (yours)" in shown
    assert f"runs_root: {tmp_path}/runs  # yours" in shown
    assert "scheduler: local  # bundled" in shown
    assert main(["clusters", "validate"]) == 3
    output = capsys.readouterr()
    assert "local: valid" in output.out.splitlines()
    assert "bad: valid" not in output.out
    assert f"{folders.clusters}/bad.yaml: run_root: unknown key; did you mean runs_root?" in output.err


def test_completion_offers_clusters_and_runs(folders, capsys, monkeypatch):
    (folders.clusters / "lab.yaml").write_text("scheduler: local\nruns_root: /runs\n")
    monkeypatch.setenv("_LLMCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "llmctl submit --cluster l")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["lab", "leonardo", "local", "lsf", "lumi"]
    monkeypatch.setenv("COMP_WORDS", "llmctl sta")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["status"]
