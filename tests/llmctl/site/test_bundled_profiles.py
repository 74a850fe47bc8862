"""The bundled profiles load, are consistent, and name the source of each number."""

import re

import pytest

from llmctl.backends import load_backend
from llmctl.cli.main import main
from llmctl.errors import ProfileError
from llmctl.operate.interactive import check_ssh
from llmctl.paths import BUNDLED, UserFolders
from llmctl.site.profile import load_profile, read_layer
from llmctl.site.profile_origins import annotated_lines, origins
from llmctl.site.unset_values import work_area
from llmctl.submit.render import interactive_script, job_environment

PATHS = sorted((BUNDLED / "clusters").glob("*.yaml"))
NAMES = [path.stem for path in PATHS]
WANTED = {
    *("abci", "abci3", "aws-p5", "azure-nd", "coreweave", "frontier", "gcp-a3", "juwels-booster", "leonardo", "local"),
    *("lsf", "lumi", "mdx", "miyabi", "perlmutter", "slurm", "slurm-pyxis", "ssh", "tsubame4"),
}
SITES = [name for name in NAMES if name not in ("local", "lsf", "slurm", "slurm-pyxis", "ssh")]
NUMBER = re.compile(r"(?<![\w./:-])\d+(?:\.\d+)?(?![\w./])|\d+:\d\d:\d\d")
TAG = re.compile(r"\[[A-Z0-9][A-Za-z0-9]*[,: \]]")


@pytest.fixture
def folders(tmp_path):
    return UserFolders(tmp_path, tmp_path / "config/llmctl", tmp_path / "state/llmctl")


def test_every_site_of_the_documents_has_a_profile():
    assert WANTED - set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_consistent(folders, name):
    profile = load_profile(folders, name)
    assert profile.description
    chosen = profile.defaults.resource_type
    assert profile.scheduler == "local" or chosen in profile.resource_types
    assert profile.launch.launcher is None or profile.launch.launcher in load_backend(profile.scheduler).launchers
    limits = profile.limits
    queues = {kind.queue for kind in profile.resource_types.values()}
    assert set(limits.queues) <= queues
    for kind in profile.resource_types.values():
        own = limits.queues.get(kind.queue or "")
        most = (own and own.max_nodes) or limits.max_nodes
        assert not (kind.max_nodes and most) or kind.max_nodes <= most
        longest = (own and own.max_time) or limits.max_time
        assert not (kind.max_time and longest) or kind.max_time <= longest
        assert not kind.fraction or kind.max_nodes in (None, 1)
        assert (kind.gpu is None) == (kind.gpu_memory_gib is None)
        assert kind.gpus or kind.gpu is None
    default = profile.resource_types.get(chosen or "")
    longest = (default and default.max_time) or limits.max_time
    assert not (profile.defaults.time and longest) or profile.defaults.time <= longest
    steps = [nodes for nodes, _ in limits.time_by_nodes]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", SITES)
def test_runs_root_is_never_in_the_home_directory(folders, name):
    profile = load_profile(folders, name)
    assert profile.work_area or (profile.runs_root and not profile.runs_root.startswith("~"))
    group = "grp01" if "{group}" in (profile.work_area or "") else None
    if profile.work_area:
        suggested = work_area(profile, group=group, user="ada")
        assert suggested is not None and suggested.startswith("/") and "{" not in suggested
        assert "ada" in suggested


def legend(text):
    """Tags explained in the head of a profile."""
    return set(re.findall(r"^#\s+(?:Sources:\s*)?\[([A-Za-z0-9]+)\]\s", text, re.MULTILINE))


def unsourced(text):
    """YAML lines with a number whose own comment, or the comment above, names no source."""
    above, wrong = "", []
    for line in text.splitlines():
        code, mark, comment = line.partition("#")
        if not code.strip():
            # Adjacent comment lines form one comment; an empty line ends the comment.
            above = f"{above} {comment}" if mark and above.endswith("\n") else comment
            above = f"{above}\n" if mark else ""
            continue
        above = above.rstrip("\n")
        has_number = NUMBER.search(re.sub(r"^\s*[\w-]+:|(?<=\{)[\w-]+:", "", code)) is not None
        if has_number and not TAG.search(f"{comment} ") and not TAG.search(above):
            wrong.append(line)
    return wrong


def test_a_number_without_a_source_is_found():
    text = "# Cores [SYS].\na: 1\nb: {gpus: 8}\n\nc: 5\nd: 6  # [JOB]\ne: '1:00:00'\n# no source\nf: 7\ng: rt_F\n"
    assert unsourced(text) == ["c: 5", "e: '1:00:00'", "f: 7"]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_every_number_has_its_source(path):
    text = path.read_text(encoding="utf-8")
    if path.stem == "local":
        assert (
            "Rendezvous: the job takes a free port" in text
        )  # its numbers are llmctl's own, explained beside each number
        return
    assert unsourced(text) == []
    assert set(re.findall(r"\[([A-Z][A-Z0-9]{1,3})[]:,]", text)) <= legend(text)


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_profile_is_ascii_and_has_no_empty_value(path):
    path.read_text(encoding="ascii")
    assert [key for key, value in read_layer(path).items() if value is None] == []


def test_show_names_the_origin_of_every_value_and_stays_yaml(folders):
    import yaml

    folders.clusters.mkdir(parents=True)
    (folders.clusters / "gcp-a3.yaml").write_text('group: g\nenv: {NCCL_ALGO: "Tree, Ring"}\nlogin: {host: a}\n')
    found = origins(folders, "gcp-a3")
    assert found["env.NCCL_ALGO"] == folders.clusters / "gcp-a3.yaml"
    assert found["env.NCCL_PROTO"] == BUNDLED / "clusters" / "gcp-a3.yaml"
    assert "env" not in found and "cost.unit" not in found
    values = load_profile(folders, "gcp-a3").model_dump(mode="json")
    text = "\n".join(annotated_lines(values, {key: path.parent.name for key, path in found.items()}))
    assert yaml.safe_load(text) == values
    assert "group: g  # clusters" in text


FRONTIER = [
    ("--nodes 8 --time 2:00:00", ""),
    ("--nodes 8 --time 2:00:01", "above 2:00:00, the longest time of frontier for 8 nodes"),
    ("--nodes 183 --time 6:00:00", ""),
    ("--nodes 184 --time 12:00:00", ""),
    ("--nodes 183 --time 6:01:00", "above 6:00:00"),
    ("--nodes 64 --time 24:00:00 --resource-type extended", ""),
    ("--nodes 65 --time 1:00:00 --resource-type extended", "65 nodes are above 64"),
    ("--nodes 200 --time 3:00:00 --resource-type debug", "above 2:00:00"),
]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("flags", "refused"), FRONTIER, ids=[flags for flags, _ in FRONTIER])
def test_the_time_limit_of_frontier_depends_on_nodes_except_in_extended(capsys, flags, refused):
    code = main(["submit", "--cluster", "frontier", "--group", "abc", *flags.split(), "--show-script"])
    assert (code, refused in capsys.readouterr().err) == (2 if refused else 0, True)


LEONARDO = [
    ("--resource-type debug --time 0:30:00", ""),
    ("--resource-type debug --time 1:00:00", "above 0:30:00, the longest time of debug on leonardo"),
    ("--resource-type long --time 96:00:00", ""),
    ("--time 24:00:01", "above 24:00:00, the longest time of booster on leonardo"),
]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("flags", "refused"), LEONARDO, ids=[flags for flags, _ in LEONARDO])
def test_each_qos_of_leonardo_has_its_time_limit(capsys, flags, refused):
    code = main(["submit", "--cluster", "leonardo", "--group", "abc", *flags.split(), "--show-script"])
    assert (code, refused in capsys.readouterr().err) == (2 if refused else 0, True)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_named_only_where_its_plugin_is_loaded(folders, name):
    profile = load_profile(folders, name)
    assert "NCCL_NET" not in profile.env or profile.environment.modules or profile.environment.setup


def test_variables_depend_on_the_resource_type(folders):
    profile = load_profile(folders, "azure-nd")
    old, new = (job_environment(profile, kind, on_cpu=False) for kind in ("nd-a100-v4", "nd-h100-v5"))
    assert old["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv4-topo.xml" and "NCCL_MIN_NCHANNELS" not in old
    assert new["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml" and new["NCCL_MIN_NCHANNELS"] == "32"
    script = interactive_script(profile, folders, "python3", on_cpu=False, resource_type="nd-a100-v4")
    assert "ndv4-topo.xml" in script and "ndv5-topo.xml" not in script and "NCCL_SOCKET_IFNAME" in script


def test_variables_of_a_resource_type_have_valid_shell_names(folders):
    folders.clusters.mkdir(parents=True)
    (folders.clusters / "azure-nd.yaml").write_text("resource_types: {nd-a100-v4: {env: {A-B: x}}}\n")
    with pytest.raises(ProfileError, match="'A-B' cannot be the name of a variable"):
        load_profile(folders, "azure-nd")


WAYS = [
    (
        "interactive --cluster abci3 --nodes 2 --time 7:00:00",
        "14 node-hours, above 12, the limit of interactive jobs on abci3",
    ),
    ("interactive --cluster abci3 --time 12:00:01", "above 12:00:00, the longest time of interactive jobs"),
    ("interactive --cluster abci --nodes 33 --time 0:10:00", "33 nodes are above 32, the limit of interactive jobs"),
    ("submit --cluster abci3 --nodes 2 --time 13:00:00 --dry-run", ""),
    ("submit --cluster tsubame4 --time 0:10:01 --dry-run", "above 0:10:00, the longest time of jobs without a group"),
    ("submit --cluster tsubame4 --nodes 3 --time 0:10:00 --dry-run", "3 nodes are above 2, the limit of jobs without"),
    ("submit --cluster tsubame4 --group g --time 1:00:00 --dry-run", ""),
]


@pytest.mark.parametrize(("words", "refused"), WAYS, ids=[words for words, _ in WAYS])
def test_interactive_jobs_and_jobs_without_a_group_have_separate_limits(home, monkeypatch, capsys, words, refused):
    if "abci" in words:
        monkeypatch.setenv("LLMCTL_GROUP", "g")
    folder = home / "config/llmctl/clusters"
    folder.mkdir(parents=True)
    (folder / "tsubame4.yaml").write_text("group_required: false\n")
    code = main(words.split())
    assert (code, refused in capsys.readouterr().err) == (2 if refused else 0, True)


def test_attach_is_refused_for_nodes_without_ssh(folders):
    profile = load_profile(folders, "abci3")
    check_ssh({"resource_type": None}, profile)
    with pytest.raises(ProfileError, match="abci3 offers no ssh to nodes of rt_HG"):
        check_ssh({"resource_type": "rt_HG"}, profile)
