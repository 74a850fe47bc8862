"""docs/dev/add-a-scheduler.md, followed for OpenLava, whose commands are those of LSF."""

import json

import pytest

from tests.recipes.copied_tree import GATES, PROOF_S, WITHOUT_USERS, CopiedTree, narrowed, proof_of

BACKENDS = "llmctl/backends"
GOLDENS = (
    "LLMCTL_REFRESH_GOLDEN=1 .venv/bin/python -m pytest tests/llmctl/scripts/test_render.py -k 'openlava or golden'"
)


def add_package(tree: CopiedTree) -> None:
    """Steps 1 to 7: the backend, its template, its rows, the profile and the site's page."""
    for name in ("__init__", "backend", "interactive", "reports", "setup"):
        copy_renamed(tree, f"{BACKENDS}/lsf/{name}.py", f"{BACKENDS}/openlava/{name}.py")
    tree.write("templates/openlava.sh.j2", tree.text("templates/lsf.sh.j2"))
    tree.add_after(
        f"{BACKENDS}/__init__.py",
        '    "lsf": "llmctl.backends.lsf.backend",',
        '    "openlava": "llmctl.backends.openlava.backend",',
    )
    tree.change("llmctl/site/profile.py", '"lsf", "ssh", "local")', '"lsf", "openlava", "ssh", "local")')
    copy_renamed(tree, "clusters/lsf.yaml", "clusters/openlava.yaml")
    copy_renamed(tree, "docs/sites/lsf.md", "docs/sites/openlava.md")
    tree.add_after(
        "docs/sites/README.md",
        "| [ssh](ssh.md) | any machines behind ssh |",
        "| [openlava](openlava.md) | any cluster with OpenLava |",
    )
    bundled = "tests/llmctl/site/test_bundled_profiles.py"
    tree.change(bundled, '"miyabi", "perlmutter",', '"miyabi", "openlava", "perlmutter",')
    tree.change(bundled, '("local", "lsf", "slurm",', '("local", "lsf", "openlava", "slurm",')


def copy_renamed(tree: CopiedTree, source: str, target: str) -> None:
    """Copy a file of LSF with the name of the scheduler changed where it is a name of llmctl."""
    text = tree.text(source).replace("profile.lsf", "profile.LSF").replace("cshrc.lsf", "cshrc.LSF")
    for old, new in (
        ("backends.lsf", "backends.openlava"),
        ("recorded/lsf", "recorded/openlava"),
        ('"lsf', '"openlava'),
        ("LsfBackend", "OpenLavaBackend"),
        ("clusters/lsf", "clusters/openlava"),
        ("setup lsf", "setup openlava"),
        ("sites/lsf", "sites/openlava"),
        ("scheduler: lsf", "scheduler: openlava"),
        ("--scheduler lsf", "--scheduler openlava"),
        ("--cluster lsf", "--cluster openlava"),
    ):
        text = text.replace(old, new)
    tree.write(target, text.replace("profile.LSF", "profile.lsf").replace("cshrc.LSF", "cshrc.lsf"))


def add_tests(tree: CopiedTree) -> None:
    """Step 8."""
    for path in (tree.root / "tests/recorded/lsf").iterdir():
        tree.write(f"tests/recorded/openlava/{path.name}", path.read_text(encoding="utf-8"))
    copy_renamed(tree, f"tests/{BACKENDS}/test_lsf.py", f"tests/{BACKENDS}/test_openlava.py")
    render, run = "tests/llmctl/scripts/test_render.py", "tests/llmctl/scripts/test_run.py"
    tree.add_after(render, '    "lsf__torchrun": ("lsf__mpirun",),', '    "openlava__torchrun": ("openlava__mpirun",),')
    tree.change(run, '"lsf": "blaunch"}', '"lsf": "blaunch", "openlava": "blaunch"}')
    tree.change(run, '"pbs": "4242.pbs1", "lsf": "4242"}', '"pbs": "4242.pbs1", "lsf": "4242", "openlava": "4242"}')
    answer = '("Job <{}> is submitted to queue <normal>.\\n",),'
    hostile = "tests/llmctl/submit/test_hostile_values.py"
    tree.add_after(hostile, f'    "lsf": {answer}', f'    "openlava": {answer}')


@pytest.fixture
def with_scheduler(tree: CopiedTree) -> CopiedTree:
    """The copy after all steps of the page but the goldens."""
    add_package(tree)
    add_tests(tree)
    tree.run(".venv/bin/ruff format tests")
    return tree


# Of the folders that the proof names, the files that know all schedulers. Scripts in bash are left to the proof.
FILES = (
    *("submit/test_taken_once.py", "submit/test_hostile_values.py", "cli/test_cluster_files.py"),
    "operate/test_attach_container.py",
)
QUICK = (
    *("openlava", "goldens_are_few", "every_profile_has_a_page", "every_site_of", "unknown_scheduler"),
    *("names_file_and_key", "every_scheduler_of", "by_a_scheduler_name", "index_names"),
)


def test_a_scheduler_passes_its_proof_and_the_gates(with_scheduler: CopiedTree) -> None:
    with_scheduler.check_format()
    backends, _, submit = proof_of("add-a-scheduler", NAME="openlava")
    assert "#BSUB -n 16" in json.loads(with_scheduler.run(submit))["script"]
    # In one run, because the gates are slow to load.
    words = " ".join(
        [backends, *(f"tests/llmctl/{file}" for file in FILES), "tests/test_architecture.py tests/test_docs.py"]
    )
    with_scheduler.run(narrowed(words, " or ".join(QUICK)), LLMCTL_REFRESH_GOLDEN="1")
    golden = with_scheduler.text("tests/golden/lsf__torchrun.sh")
    assert with_scheduler.text("tests/golden/openlava__torchrun.sh") == golden


@pytest.mark.proof
@pytest.mark.timeout(PROOF_S)
def test_a_scheduler_passes_all_tests_of_schedulers(with_scheduler: CopiedTree) -> None:
    with_scheduler.run(GOLDENS)
    for command in proof_of("add-a-scheduler", NAME="openlava"):
        # Ordinary users cannot read the copy.
        users = f" {WITHOUT_USERS}" if "tests/llmctl/submit" in command else ""
        with_scheduler.run(command + users, limit_s=PROOF_S)
    with_scheduler.prove(GATES)
