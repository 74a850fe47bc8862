"""Parsers of the doctor: sections, quotas, interfaces, GPUs, and architectures of torch's build."""

import subprocess

import pytest

from llmctl.doctor.probes import (
    Gpu,
    Quota,
    Section,
    parse_gpus,
    parse_interfaces,
    parse_python,
    parse_quotas,
    parse_sections,
    probe_script,
)
from llmctl.doctor.python import judge_driver, judge_python, runs_on
from llmctl.doctor.torch_wheels import ARCHITECTURES


def test_each_question_has_a_separate_answer():
    commands = [
        ("fine", "echo one; echo two"),
        ("absent", "no-such-command-here"),
        ("reads", "cat; echo 'it'\"'\"'s over'"),
        ("speaks", "echo out; echo err >&2; exit 3"),
        ("nothing", "true"),
    ]
    done = subprocess.run(["bash", "-c", probe_script(commands)], capture_output=True, text=True, check=True)
    found = parse_sections(f"a greeting\n{done.stdout}")
    assert found["fine"] == Section(0, "one\ntwo")
    assert found["absent"].status == 127
    assert found["reads"] == Section(0, "it's over")
    assert found["speaks"] == Section(3, "out\nerr")
    assert found["nothing"] == Section(0, "")


def test_a_truncated_answer_keeps_its_complete_sections():
    text = "==llmctl-doctor== a\nyes\n==llmctl-doctor== end 0\n==llmctl-doctor== b\nhalf of"
    assert parse_sections(text) == {"a": Section(0, "yes")}


# Columns of quota(1) and lfs-quota(1), as in their manual pages.
QUOTAS = [
    ("/dev/sda1  100 200 300       10 20 30", [Quota("/dev/sda1", 100, 300, 10, 30)]),
    ("/dev/sda1  350* 200 300  6days 10 0 0", [Quota("/dev/sda1", 350, 300, 10, 0)]),
    ("/lustre  8 0 2147483648 - 123 0 0 -", [Quota("/lustre", 8, 2147483648, 123, 0)]),
    ("server:/a/very/long/name\n   1 2 3  4 5 6", [Quota("server:/a/very/long/name", 1, 3, 4, 6)]),
    ("/scratch 1.5T 0k 50T - 99 0 2000 -", [Quota("/scratch", 3 << 29, 50 << 30, 99, 2000)]),
    ("Disk quotas for user ada (uid 1000): none", []),
    ("     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace", []),
    ("quota: error while getting quota from server:/home for ada (id 1000): Connection refused", []),
    ("", []),
]


@pytest.mark.parametrize(("text", "quotas"), QUOTAS, ids=[text[:30] for text, _ in QUOTAS])
def test_quotas(text, quotas):
    assert parse_quotas(text) == quotas


def test_usage_is_relative_to_the_nearer_limit():
    assert Quota("/h", 10, 100, 90, 100).fullness == 0.9
    assert Quota("/h", 10, 0, 90, 0).fullness == 0
    assert Quota("/h", 350, 300, 1, 0).fullness > 1


def test_interfaces_have_their_first_address_and_no_suffix():
    text = "2: ib0@if3    inet 10.0.0.5/24 brd x\n2: ib0    inet 10.9.9.9/24\n4: bond0.7    inet 172.16.0.1/12\nnoise\n"
    assert parse_interfaces(text) == {"ib0": "10.0.0.5", "bond0.7": "172.16.0.1"}


def test_gpus_of_new_and_old_drivers():
    text = "NVIDIA H100 80GB HBM3, 550.54.15, 9.0\nTesla V100-SXM2-16GB, 450.80.02\nNVIDIA-SMI has failed, because\n"
    assert parse_gpus(text) == [
        Gpu("NVIDIA H100 80GB HBM3", "550.54.15", "9.0"),
        Gpu("Tesla V100-SXM2-16GB", "450.80.02", None),
    ]


BUILDS = [
    (["sm_80", "sm_90"], "9.0", True),
    (["sm_80"], "8.6", True),  # machine code of the same major version
    (["sm_86"], "8.0", False),
    (["sm_80"], "9.0", False),
    (["sm_80", "compute_80"], "9.0", True),  # older PTX is compiled when loaded
    (["compute_90"], "8.0", False),
    (["sm_90a"], "9.0", True),
    (["sm_90a"], "10.0", False),
    (["sm_100", "sm_120"], "10.0", True),
    (["sm_70"], "10.0", False),
    (["gfx90a:sramecc+:xnack-", "gfx942"], "gfx90a", True),
    (["gfx1100"], "gfx90a", False),
    (["nonsense"], "9.0", False),
]


@pytest.mark.parametrize(("built_for", "gpu", "runs"), BUILDS)
def test_architectures_that_a_build_supports(built_for, gpu, runs):
    assert runs_on(built_for, gpu) is runs


FACTS = {
    "executable": "/v/bin/python",
    "version": [3, 12, 1],
    "packages": {"numpy": "2.1", "pydantic": "2.9", "pyyaml": "6.0", "safetensors": "0.5", "tokenizers": "0.21"},
    "torch": "2.10.0",
    "cuda": "12.8",
    "hip": None,
    "built_for": ["sm_80", "sm_90"],
    "import_s": 3.2,
}


def without(*names):
    return {name: version for name, version in FACTS["packages"].items() if name not in names}


PYTHONS = [
    ({}, "H100", [], ""),
    ({}, None, [], ""),
    ({"version": [3, 9, 18]}, "H100", ["python"], "Python 3.10 or later"),
    (
        {"torch": None, "torch_error": "No module named 'torch'"},
        "H100",
        ["torch"],
        "/v/bin/python -m pip install torch",
    ),
    ({"torch": None, "torch_error": "libcudart.so: no"}, "MI250X", ["torch"], "whl/rocm"),
    ({"cuda": None}, "H100", ["torch build"], "--force-reinstall torch"),
    ({"cuda": None}, None, [], ""),
    ({"built_for": ["sm_70"]}, "H200", ["torch build"], "--force-reinstall torch"),
    ({}, "MI250X", ["torch build"], "whl/rocm"),
    ({"cuda": None, "hip": "7.1", "built_for": ["gfx90a"]}, "MI250X", [], ""),
    ({"packages": without("pydantic", "numpy")}, None, ["packages"], "pip install numpy pydantic"),
    ({"unrelated_apex": "/v/lib/apex"}, None, ["apex"], "pip uninstall apex"),
]


@pytest.mark.parametrize(("change", "gpu", "faults", "remedy"), PYTHONS)
def test_a_problem_of_python_or_torch_comes_with_its_remedy(change, gpu, faults, remedy):
    facts = {name: value for name, value in {**FACTS, **change}.items() if name != "torch" or value is not None}
    checks = judge_python(facts, gpu)
    wrong = [check for check in checks if check.state == "FAULT"]
    assert [check.name for check in wrong] == faults
    assert all(remedy in check.remedy and check.exit_code == 3 for check in wrong)


def test_missing_optional_packages_give_a_warning():
    checks = judge_python({**FACTS, "packages": without("tokenizers")}, None)
    assert [(check.name, check.state) for check in checks if check.state != "ok"] == [("packages", "warning")]


def test_an_unknown_gpu_is_not_checked():
    assert judge_python(FACTS, "X9000")[-1].state == "note"
    assert "H200" in ARCHITECTURES


def test_a_driver_is_compared_with_the_cuda_of_torch():
    new, old = Gpu("H100", "550.54.15", "9.0"), Gpu("A100", "470.57.02", "8.0")
    assert judge_driver([new], FACTS, expected=True).state == "ok"
    assert judge_driver([old], FACTS, expected=True).state == "FAULT"
    assert "525.60.13" in judge_driver([old], FACTS, expected=True).remedy
    assert judge_driver([old], {**FACTS, "cuda": "11.8"}, expected=True).state == "ok"
    assert judge_driver([new], {**FACTS, "cuda": "13.0"}, expected=True).state == "FAULT"
    assert judge_driver([], FACTS, expected=False).state == "note"
    assert judge_driver([old], None, expected=False).state == "ok"


def test_the_report_of_python_is_found_among_other_output():
    assert parse_python('hello\n==llmctl-python== {"version": [3, 6]}\nbye') == {"version": [3, 6]}
    assert parse_python("==llmctl-python== {broken") is None
    assert parse_python("nothing") is None
