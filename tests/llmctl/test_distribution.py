"""Words for pip: where this llmctl came from, and the packages themselves where that is unknown."""

import importlib.metadata
import json
import re
import shlex
from pathlib import Path

import pytest

from llmctl import distribution
from llmctl.distribution import NAME, TRAINER_PACKAGES, install_words

ROOT = Path(__file__).parents[2]


def test_a_checkout_is_named_by_its_folder():
    assert shlex.split(install_words()) == [f"{ROOT}[train]"]


def test_another_machine_gets_the_packages():
    assert install_words(elsewhere=True) == "numpy pydantic pyyaml safetensors tokenizers torch zlib-ng"


def test_the_packages_are_those_of_the_extra():
    (listed,) = re.findall(r"^train = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    names = {re.split("[>=<]", requirement)[0] for requirement in json.loads(listed)}
    assert names == set(TRAINER_PACKAGES) - {"pydantic", "pyyaml"}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages with this llmctl, without its record of an origin."""
    package = tmp_path / "site packages" / "llmctl"
    package.mkdir(parents=True)
    folder = package.parent / f"{NAME.replace('-', '_')}-9.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {NAME}\nVersion: 9.1\n")
    monkeypatch.setattr(distribution, "PACKAGE", package)
    monkeypatch.syspath_prepend(str(package.parent))
    return folder


def test_an_entry_of_the_index_is_named_with_its_version(site):
    assert install_words() == f"'{NAME}[train]==9.1'"
    assert site.is_dir()


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (
            {"url": "https://x.org/l.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            f"'{NAME}[train] @ git+https://x.org/l.git@ab12'",
        ),
        ({"url": "https://x.org/l-1.whl", "archive_info": {}}, f"'{NAME}[train] @ https://x.org/l-1.whl'"),
        ({"url": f"file://{ROOT}", "dir_info": {}}, f"'{ROOT}[train]'"),
        ({"url": "file:///gone/l-1.whl", "archive_info": {}}, " ".join(TRAINER_PACKAGES)),
    ],
)
def test_an_installed_one_is_named_by_its_origin(site, origin, words):
    (site / "direct_url.json").write_text(json.dumps(origin))
    assert install_words() == words


def test_an_unknown_origin_gets_the_packages(site, tmp_path, monkeypatch):
    other = tmp_path / "other" / "llmctl"
    other.mkdir(parents=True)
    monkeypatch.setattr(distribution, "PACKAGE", other)
    assert install_words() == " ".join(TRAINER_PACKAGES)  # the metadata are another copy's
    monkeypatch.setattr(distribution, "PACKAGE", site.parent / "llmctl")
    monkeypatch.setattr(importlib.metadata, "distribution", _not_found)
    assert install_words() == " ".join(TRAINER_PACKAGES)


def _not_found(name):
    raise importlib.metadata.PackageNotFoundError(name)
