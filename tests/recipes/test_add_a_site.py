"""docs/dev/add-a-site.md, followed for a made-up site with Slurm that states an area for work but no runs_root."""

import json

import pytest

from tests.recipes.copied_tree import GATES, PROOF_S, WITHOUT_USERS, CopiedTree, narrowed, proof_of

PROFILE = """# Southlab: Slurm on nodes of 4 A100. The first hour: docs/sites/southlab.md.
# Sources:
#   [SYS]  https://docs.southlab.example/systems, seen 2026-11-26
#   [OWN]  llmctl's own default
description: Southlab, 4 x A100 per node, Slurm
scheduler: slurm
# A file system that all nodes mount; purged after 60 days [SYS].
work_area: /scratch/{group}/{user}/llmctl-runs
resource_types:
  gpu: {gpus: 4, gpu: A100, gpu_memory_gib: 40, cores: 64, queue: gpu, max_nodes: 8, max_time: "24:00:00"}  # [SYS]
defaults:
  resource_type: gpu
  time: "1:00:00"  # [OWN]
limits:
  max_nodes: 8  # [SYS]
rendezvous:
  interface: ib0  # the nodes' own network [SYS]
  ports: [20000, 29999]  # [OWN]
launch:
  launcher: torchrun
stop_grace_s: 120  # [OWN]
"""
GOLDENS = "LLMCTL_REFRESH_GOLDEN=1 .venv/bin/python -m pytest tests/llmctl/scripts/test_render.py"
PAGE = """# Southlab

Slurm on nodes of 4 A100. The profile: `clusters/southlab.yaml`.

| | |
|---|---|
| billing | hours of nodes, by group |
| login | login.southlab.example, by ssh key |
| Python | module python/3.12 |
| quota | 1 TB below /scratch |
| limits | 8 nodes, 24 hours |

## Connect

    ssh login.southlab.example

## Python 3.10 or later, and torch

    module load python/3.12 && python3 -m venv /scratch/GROUP/USER/llm

## Set up llmctl

    llmctl clusters setup southlab --group GROUP --runs-root /scratch/GROUP/USER/runs --venv /scratch/GROUP/USER/llm
    llmctl doctor --cluster southlab

## The first run

    llmctl submit --cluster southlab --nodes 1 --dry-run
    llmctl submit --cluster southlab --nodes 1 --name first --follow

Then use eight nodes:

    llmctl submit --cluster southlab --nodes 8 --name eight --set parallel.tensor_model_parallel_size=4

## Daily use

    llmctl interactive --cluster southlab
    llmctl status --cluster southlab
    llmctl logs first -f
    llmctl cancel first
    llmctl resume first
    llmctl nodes --cluster southlab

## What is different here

- Files below /scratch are removed after 60 days.

## Documents

- https://docs.southlab.example/systems
"""


@pytest.fixture
def with_site(tree: CopiedTree) -> CopiedTree:
    """The copy after all steps of the page but the goldens."""
    tree.write("clusters/southlab.yaml", PROFILE)
    tree.write("docs/sites/southlab.md", PAGE)
    tree.add_after(
        "docs/sites/README.md",
        "| [slurm](slurm.md) | any cluster with Slurm |",
        "| [southlab](southlab.md) | Southlab, Slurm, 4 x A100 |",
    )
    tree.change(
        "tests/llmctl/site/test_bundled_profiles.py", '"slurm-pyxis", "ssh",', '"slurm-pyxis", "southlab", "ssh",'
    )
    tree.change("CHANGELOG.md", "\n## Unreleased\n", "\n## Unreleased\n\n### Added\n\n- Profile of Southlab.\n")
    return tree


def test_a_site_with_an_area_for_work_passes_its_proof(with_site: CopiedTree) -> None:
    variables, validate, submit, tests = proof_of("add-a-site", NAME="southlab")
    with_site.run(f"{variables} && {validate}")
    found = json.loads(with_site.run(f"{variables} && {submit}"))
    assert "#SBATCH --partition=gpu" in found["script"]
    names = "southlab or every_profile_has_a_page or every_site_of or goldens_are_few"
    with_site.run(narrowed(tests, names), LLMCTL_REFRESH_GOLDEN="1")
    assert "#SBATCH --gpus-per-node=4" in with_site.text("tests/golden/southlab.head")


@pytest.mark.proof
@pytest.mark.timeout(PROOF_S)
def test_a_site_passes_the_tests_of_all_sites(with_site: CopiedTree) -> None:
    with_site.run(GOLDENS)
    with_site.run(proof_of("add-a-site", NAME="southlab")[-1], limit_s=PROOF_S)
    with_site.prove(f"{GATES} tests/llmctl/cli tests/llmctl/submit {WITHOUT_USERS}")
