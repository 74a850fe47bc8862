"""The site pages: llmctl accepts every ``llmctl`` line on a page, for existing profiles."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from llmctl.cli.main import load_command, main, split_command
from llmctl.paths import BUNDLED, UserFolders
from llmctl.site.profile import load_profile

PAGES = Path(__file__).parents[3] / "docs/sites"
SITES = sorted(path.stem for path in (BUNDLED / "clusters").glob("*.yaml"))


def commands_of(site):
    """The llmctl lines of a page's code blocks, split into words."""
    text = (PAGES / f"{site}.md").read_text(encoding="utf-8")
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (llmctl .*)$", text, re.MULTILINE)]


def prepare(tmp_path, monkeypatch):
    """A user without config files."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LOGNAME", "ada")
    for name in ("LLMCTL_RUNS_ROOT", "LLMCTL_GROUP", "LLMCTL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


def test_every_profile_has_a_page_in_the_list():
    assert sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README") == SITES
    listed = re.findall(r"\]\(([\w-]+)\.md\)", (PAGES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == SITES


@pytest.mark.parametrize("site", SITES)
def test_links_between_pages_have_targets(site):
    text = (PAGES / f"{site}.md").read_text(encoding="ascii")
    assert f"clusters/{site}.yaml" in text
    for target in re.findall(r"\]\(([^)]+\.md)\)", text):
        assert (PAGES / target).is_file()


@pytest.mark.parametrize("site", SITES)
def test_every_command_of_a_page_is_accepted(site, tmp_path):
    commands = commands_of(site)
    named = {words[1] for words in commands}
    assert named >= {"submit", "interactive", "status", "logs", "cancel", "resume", "nodes", "doctor", "clusters"}
    folders = UserFolders(tmp_path, tmp_path / "config", tmp_path / "state")
    for _, *words in commands:
        own, command = split_command(words)
        assert bool(command) == ("--" in words)
        entry = load_command(own[0])
        arguments = own[1:]
        if hasattr(entry, "commands"):
            entry = entry.commands[arguments[0]]
            arguments = arguments[1:]
        # Parses flags and arguments, refuses unknown or missing ones, and runs nothing.
        context = entry.make_context(own[0], list(arguments), resilient_parsing=False)
        values = context.params
        cluster = values.get("cluster")
        if cluster is not None and cluster not in ("lab", "mycluster"):
            profile = load_profile(folders, cluster)
            assert values.get("resource_type") in (None, *profile.resource_types)


def test_a_wrong_command_is_found():
    with pytest.raises(Exception, match="--nods"):
        load_command("submit").make_context("submit", ["--nods", "3"])


@pytest.mark.parametrize("site", SITES)
def test_the_set_up_of_a_page_gives_a_profile_that_a_run_can_use(site, tmp_path, monkeypatch, capsys):
    prepare(tmp_path, monkeypatch)
    written = [words[1:] for words in commands_of(site) if words[1] == "clusters"]
    assert written
    for words in written:
        assert main(words) == 0, capsys.readouterr().err
    folders = UserFolders(tmp_path / "home", tmp_path / "config/llmctl", tmp_path / "state/llmctl")
    profile = load_profile(folders, site)
    assert profile.runs_root is not None
    assert profile.group is not None or not profile.group_required
    assert profile.environment.kind is not None
    assert profile.scheduler != "ssh" or profile.hosts


@pytest.mark.parametrize("site", SITES)
def test_eight_nodes_are_within_the_limits_of_the_profile(site, tmp_path):
    profile = load_profile(UserFolders(tmp_path, tmp_path, tmp_path), site)
    for _, *words in commands_of(site):
        if words[0] != "submit":
            continue
        values = load_command("submit").make_context("submit", list(words[1:])).params
        kind = profile.resource_types.get(values["resource_type"] or profile.defaults.resource_type or "")
        assert kind is None or kind.max_nodes is None or values["nodes"] <= kind.max_nodes
        sizes = [value for value in values["settings"] or () if "tensor_model_parallel_size" in value]
        assert not (sizes and kind) or kind.gpus % int(sizes[0].rpartition("=")[2]) == 0


def test_no_page_names_a_flag_that_no_command_has():
    known = set()
    for name in ("submit", "interactive", "status", "logs", "cancel", "resume", "nodes", "doctor", "clusters"):
        entry = load_command(name)
        for command in (entry, *getattr(entry, "commands", {}).values()):
            known |= {option for parameter in command.params for option in parameter.opts}
    foreign = {"--time", "--index-url", "--exclusive", "--mem", "--wait-all-nodes", "--auto-resume", "--network"}
    foreign |= {"--container", "--gpu-bind", "--target", "--document-name", "--parameters", "--constraint", "--qos"}
    foreign |= {"--version", "--force", "--clusters"}
    for page in PAGES.glob("*.md"):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")):
            assert flag in known | foreign, f"{page.name}: {flag}"


# Lines that only the scripts of this site have, and that a first run needs.
TELLING = {
    "abci3": ["#PBS -P GROUP", "#PBS -q rt_HF", "USE_SSH=1", ". /etc/profile.d/modules.sh"],
    "abci": ["#$ -l rt_F=8", "-g GROUP", "bond0"],
    "tsubame4": ["#$ -l node_f=8", "-g GROUP", "bond0"],
    "miyabi": ["-W group_list=GROUP", "#PBS -q regular-g", "unset OMPI_MCA_mca_base_env_list", "ibP2s2"],
    "gcp-a3": ["#SBATCH --partition=a3", "GPUDirectTCPX_v7", "enp0s12", "--container-image="],
    "aws-p5": ["#SBATCH --wait-all-nodes=1", "FI_PROVIDER=efa", "^docker,lo,veth,eth"],
    "coreweave": ["#SBATCH --distribution=block:block", "NCCL_IB_HCA=ibp", "--no-container-remap-root"],
    "azure-nd": ["/opt/microsoft/ndv5-topo.xml", "--partition=hpc"],
    "perlmutter": ["#SBATCH --constraint=gpu", "#SBATCH --qos=regular", "NCCL_NET_GDR_LEVEL=PHB"],
    "lumi": ["#SBATCH --partition=standard-g", "NCCL_SOCKET_IFNAME=hsn", "singularity exec", "--rocm"],
    "frontier": ["#SBATCH --network=disable_rdzv_get", "FI_CXI_RDZV_PROTO=alt_read", "--cpus-per-task=7"],
    "leonardo": ["#SBATCH --partition=boost_usr_prod", "ib0", "HF_HUB_OFFLINE=1"],
    "juwels-booster": ["#SBATCH --partition=booster", "GLOO_SOCKET_IFNAME=ib0"],
}
# A dry run checks paths on the cluster's machines; without these machines the check is left out.
WITHOUT_MACHINES = [site for site in SITES if site not in ("mdx", "ssh")]


@pytest.mark.parametrize("site", WITHOUT_MACHINES)
def test_every_submit_of_a_page_renders_a_script_with_the_facts_of_the_site(site, tmp_path, monkeypatch, capsys):
    prepare(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(tmp_path / "runs"))
    (tmp_path / "image.sqsh").touch()
    for words in commands_of(site):
        if words[1:3] == ["clusters", "setup"] and "--login" not in words:
            images = [word for word in words if word.endswith((".sqsh", ".sif"))]
            assert main([str(tmp_path / "image.sqsh") if word in images else word for word in words[1:]]) == 0
    scripts = []
    for words in commands_of(site):
        if words[1] == "submit":
            arguments = [word for word in words[1:] if word not in ("--show-script", "--follow")]
            capsys.readouterr()
            assert main([*arguments, "--show-script"]) == 0, capsys.readouterr().err
            scripts.append(capsys.readouterr().out)
    assert scripts
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr
    assert [fact for fact in TELLING.get(site, []) if fact not in scripts[-1]] == []
