"""``clusters setup`` and ``clusters new``: written files, unchanged user content, and refused values."""

import string

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.backends import load_queue_backend
from llmctl.cli import cluster_files
from llmctl.cli.main import main
from llmctl.errors import ProfileError
from llmctl.operate.cluster_setup import below_home
from llmctl.paths import UserFolders
from llmctl.site.overlay_file import changed_text, edited
from llmctl.site.profile import SCHEDULERS, ClusterProfile, load_profile
from llmctl.site.unset_values import work_area
from llmctl.transport.ssh.ssh_config import user_on

HAND_MADE = """\
# mine, since 2026
runs_root: /old   # the big disk
login: {host: gate}  # by the jump host

environment:
  modules:
    - cuda/12.6
    - gcc
  kind: venv
  path: ~/v  # made by hand

# the end
"""


@pytest.fixture
def folders(own_folders, monkeypatch):
    monkeypatch.setenv("HOME", str(own_folders / "home"))
    monkeypatch.setenv("LOGNAME", "ada")
    return UserFolders(own_folders / "home", own_folders / "config/llmctl", own_folders / "state/llmctl")


def overlay_of(folders, name="abci3"):
    return folders.clusters / f"{name}.yaml"


def test_setup_writes_the_values_of_flags_and_the_sites_work_area(folders, capsys):
    assert main(["clusters", "setup", "abci3", "--group", "gaa50000", "--venv", f"{folders.home}/venvs/llm"]) == 0
    output = capsys.readouterr()
    assert output.out == f"{overlay_of(folders)}\n"
    assert "runs_root: /groups/gaa50000/ada/llmctl-runs, the work area of abci3" in output.err
    profile = load_profile(folders, "abci3")
    assert (profile.group, profile.runs_root) == ("gaa50000", "/groups/gaa50000/ada/llmctl-runs")
    assert (profile.environment.kind, profile.environment.path) == ("venv", "~/venvs/llm")
    assert profile.environment.module_init == "/etc/profile.d/modules.sh"
    assert main(["clusters", "setup", "abci3", "--module", "a/1", "--module", "b", "--login", "bob@abci"]) == 0
    profile = load_profile(folders, "abci3")
    assert profile.environment.modules == ("a/1", "b")
    assert (profile.login.host, profile.group, profile.environment.path) == ("bob@abci", "gaa50000", "~/venvs/llm")


def test_setup_keeps_the_users_content(folders):
    folders.clusters.mkdir(parents=True)
    overlay_of(folders).write_text(HAND_MADE)
    flags = ["--runs-root", "/new", "--login", "other", "--module", "cuda/13", "--group", "g", "--python", "/p"]
    assert main(["clusters", "setup", "abci3", *flags]) == 0
    text = overlay_of(folders).read_text()
    for kept in ("# mine, since 2026", "# the big disk", "# by the jump host", "~/v  # made by hand", "# the end"):
        assert kept in text
    assert yaml.safe_load(text) == {
        "runs_root": "/new",
        "login": {"host": "other"},
        "environment": {"modules": ["cuda/13"], "kind": "venv", "path": "~/v", "python": "/p"},
        "group": "g",
    }


def test_an_empty_login_means_this_machine(folders):
    folders.clusters.mkdir(parents=True)
    overlay_of(folders).write_text("login: {host: gate}\n")
    assert main(["clusters", "setup", "abci3", "--login", "", "--runs-root", "/r"]) == 0
    assert load_profile(folders, "abci3").login.host is None


def test_unchanged_values_are_not_written_again(folders, capsys):
    modules = [word for name in load_profile(folders, "frontier").environment.modules for word in ("--module", name)]
    assert main(["clusters", "setup", "frontier", "--group", "g", *modules]) == 0
    assert set(yaml.safe_load(overlay_of(folders, "frontier").read_text())) == {"group", "runs_root"}
    before = overlay_of(folders, "frontier").read_text()
    capsys.readouterr()
    assert main(["clusters", "setup", "frontier", "--group", "g"]) == 0
    assert "nothing written" in capsys.readouterr().err
    assert overlay_of(folders, "frontier").read_text() == before


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "give values, as in --group G"),
        (["--venv", "/a", "--conda", "/b"], 2, "--conda: excludes --venv"),
        (["--interface", "a b", "--runs-root", "/r"], 3, "rendezvous.interface: 'a b' is not valid"),
    ],
)
def test_setup_refuses_before_it_writes(folders, capsys, flags, code, message):
    assert main(["clusters", "setup", "abci3", *flags]) == code
    assert message in capsys.readouterr().err
    assert not overlay_of(folders).exists()


def test_a_file_that_cannot_be_changed_stays_and_the_values_are_printed(folders, capsys):
    folders.clusters.mkdir(parents=True)
    before = "environment:\n  modules:\n    - cuda  # for torch 2.9\n    - gcc\n"
    overlay_of(folders).write_text(before)
    assert main(["clusters", "setup", "abci3", "--module", "cuda/13", "--runs-root", "/r"]) == 3
    error = capsys.readouterr().err
    assert "nothing was written" in error and "- cuda/13" in error and "runs_root: /r" in error
    assert overlay_of(folders).read_text() == before


def test_setup_asks_on_a_terminal(folders, monkeypatch, capsys):
    monkeypatch.setattr(cluster_files, "is_for_people", lambda: True)
    asked = []
    answers = iter(["", "gaa50000", "sauna", "venv", "/v", "cuda/12 gcc", "/runs"])

    def prompt(question, default="", **_):
        asked.append((question, default))
        return next(answers) or default

    monkeypatch.setattr(cluster_files.typer, "prompt", prompt)
    assert main(["clusters", "setup", "abci3"]) == 0
    assert "give one of venv, conda, container, none" in capsys.readouterr().err
    assert asked[-1] == ("Folder of the run directories, shared by all nodes", "/groups/gaa50000/ada/llmctl-runs")
    profile = load_profile(folders, "abci3")
    assert (profile.group, profile.runs_root, profile.login.host) == ("gaa50000", "/runs", None)
    assert (profile.environment.kind, profile.environment.path) == ("venv", "/v")
    assert profile.environment.modules == ("cuda/12", "gcc")


def test_setup_names_the_machines_of_a_cluster_behind_ssh(folders):
    assert main(["clusters", "setup", "mdx", "--host", "ada@gpu-1", "--host", "gpu-2"]) == 0
    profile = load_profile(folders, "mdx")
    assert profile.hosts == ("ada@gpu-1", "gpu-2")
    assert profile.runs_root == "/large/ada/llmctl-runs"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_new_writes_a_profile_for_every_scheduler(folders, capsys, scheduler):
    flags = ["--scheduler", scheduler, "--host", "a", "--host", "b", "--resource-type", "big", "--gpus-per-node", "4"]
    assert main(["clusters", "new", "lab", *flags, "--interface", "ib0", "--login", "gate", "--conda", "/c"]) == 0
    capsys.readouterr()
    profile = load_profile(folders, "lab")
    assert profile.scheduler == scheduler
    assert (profile.environment.kind, profile.environment.path) == ("conda", "/c")
    has_nodes = scheduler != "local"
    assert (profile.defaults.resource_type == "big") is has_nodes
    assert not has_nodes or profile.resource_types["big"].gpus == 4
    assert profile.rendezvous.interface == "ib0"
    assert profile.hosts == (("a", "b") if scheduler == "ssh" else ())
    assert profile.login.host == ("gate" if load_queue_backend(scheduler) is not None else None)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_commented_key_of_a_new_profile_is_valid(folders, scheduler):
    assert main(["clusters", "new", "bare", "--scheduler", scheduler]) == 0
    offers = []
    for line in overlay_of(folders, "bare").read_text().splitlines():
        text = line.removeprefix("# ")
        if line.startswith("#   "):
            offers[-1] += f"{text}\n"
        elif line.startswith("# ") and text.partition(":")[0] in ClusterProfile.model_fields:
            offers.append(f"{text}\n")
    keys = set()
    for offer in offers:
        values = yaml.safe_load(offer)
        assert ClusterProfile(name="bare", **{"scheduler": scheduler, **values})
        keys |= set(values)
    assert {"environment", "rendezvous", "env", "stop_grace_s"} <= keys


def test_new_asks_for_the_values_that_the_scheduler_needs(folders, monkeypatch):
    monkeypatch.setattr(cluster_files, "is_for_people", lambda: True)
    asked = []

    def prompt(question, default="", **_):
        asked.append(question)
        return {"Name of the cluster": "lab", "Machines, head node first, as ssh knows them": "a b"}.get(
            question, "ssh" if question.startswith("Scheduler") else default
        )

    monkeypatch.setattr(cluster_files.typer, "prompt", prompt)
    assert main(["clusters", "new"]) == 0
    assert load_profile(folders, "lab").hosts == ("a", "b")
    assert not [question for question in asked if "bill" in question or "Login node" in question]


def test_the_work_area_is_filled_in_or_not_offered():
    profile = ClusterProfile(name="a", scheduler="slurm", work_area="/p/{user[0]}/{user}/{group}")

    assert work_area(profile, group="g", user="eve") == "/p/e/eve/g"
    assert work_area(profile, group=None, user="eve") is None
    wrong = profile.model_copy(update={"work_area": "/p/{project}"})
    with pytest.raises(ProfileError, match="work_area"):
        work_area(wrong, group="g", user="eve")


def test_the_user_name_comes_from_the_ssh_configuration(tmp_path):
    config = tmp_path / "ssh.conf"
    config.write_text("Host gate\n  User bob\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
    ssh.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOGNAME": "eve"}
    assert user_on("gate", environment) == "bob"
    assert user_on("ann@gate", environment) == "ann"
    assert user_on("", environment) == user_on(None, environment) == "eve"
    assert user_on("gate", {"PATH": str(tmp_path / "nothing"), "LOGNAME": "eve"}) == "eve"


def test_a_path_below_home_is_written_with_a_tilde(tmp_path):
    folders = UserFolders(tmp_path, tmp_path, tmp_path)
    assert below_home(f"{tmp_path}/venvs/a", folders) == "~/venvs/a"
    assert below_home(str(tmp_path), folders) == "~"
    assert below_home(f"{tmp_path}x/a", folders) == f"{tmp_path}x/a"


UNUSUAL = [
    "{runs_root: /a}\n",
    "runs_root: &x /a\ngroup: *x\n",
    "- a\n- b\n",
    "a: 1\n---\nb: 2\n",
    "runs_root: |\n  text # no comment\n  more\n",
    "runs_root: [\n",
]


@pytest.mark.parametrize("text", UNUSUAL)
def test_an_unusual_file_is_changed_correctly_or_not_at_all(text):
    changes = {("runs_root",): "/new", ("group",): "g"}
    new = changed_text(text, changes)
    assert new is None or yaml.safe_load(new) == {**yaml.safe_load(text), "runs_root": "/new", "group": "g"}
    if new is None:
        with pytest.raises(ProfileError, match="Add these values by hand"):
            edited("file", text, changes)


words = st.text(alphabet=string.printable + "äß漢", max_size=12)
keys = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | words | st.lists(words, max_size=3),
    lambda inner: st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    values=st.dictionaries(keys, trees, max_size=3),
    path=st.lists(keys, min_size=1, max_size=3),
    value=words | st.lists(words, max_size=2) | st.none(),
    flow=st.sampled_from([None, False]),
)
def test_only_the_given_value_changes_in_any_file(values, path, value, flow):
    text = yaml.safe_dump(values, default_flow_style=flow, allow_unicode=True) if values else "# nothing yet\n"
    new = changed_text(text, {tuple(path): value})
    if new is None:
        return
    wanted = yaml.safe_load(text) or {}
    place = wanted
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[path[-1]] = value
    assert yaml.safe_load(new) == wanted
