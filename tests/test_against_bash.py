"""benchmarks.published_corpus.against_bash: scripts under bash in a sandbox, beside the words that llmctl reads."""

import sys
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.published_corpus import against_bash
from benchmarks.published_corpus.against_bash import compare_script
from benchmarks.published_corpus.bash_page import EQUAL, NO_TRUTH, UNKNOWN
from benchmarks.published_corpus.same_words import compare
from benchmarks.published_corpus.sandbox import Start, is_available, record
from llmctl.scripts.shell.values import Chunk, Missing, Value, absent, plain

NOW = datetime(2026, 1, 2, 3, 4, 5)
PUBLISHED = Path(__file__).parent / "llmctl/scripts/published"
FLAGS = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
in_a_sandbox = pytest.mark.skipif(not is_available(), reason="this machine gives no namespaces of a user (unshare)")


@in_a_sandbox
@pytest.mark.parametrize(
    ("name", "given", "kind"),
    [("abci_gpt.sh", {}, UNKNOWN), ("geniac_llama3_8b.sh", {"fp8": "bf16"}, EQUAL), ("t5_distributed.sh", {}, EQUAL)],
)
def test_bash_gives_a_published_script_the_words_that_are_read(name: str, given: dict[str, str], kind: str) -> None:
    found = compare_script(PUBLISHED / name, PUBLISHED, given, NOW)
    assert (found.kind, found.detail, found.lost, found.swallowed) == (kind, "", (), ())
    assert found.words > 40


@in_a_sandbox
def test_answers_folders_and_inner_shells(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/run.sh").write_text(f"torchrun {FLAGS} --save $OUT/$NAME --load $HERE/start\n")
    (tmp_path / "deep/train.sh").write_text(
        'NAME=other; source /missing/activate; cd /missing/code\nexport NAME OUT=/out HERE=$OLDPWD; [ "$1" = go ]'
        ' || exit 1\nmkdir -p /out; srun -N 1 bash -c "bash $HERE/run.sh" &\n'
    )
    found = compare_script(tmp_path / "deep/train.sh", tmp_path, {"NAME": "a-b", "1": "go"}, NOW)
    assert found.kind in (EQUAL, UNKNOWN), found
    (tmp_path / "stops.sh").write_text(f'[ -n "$(cat /proc/never)" ] && torchrun {FLAGS}\n')
    assert compare_script(tmp_path / "stops.sh", tmp_path, {}, NOW).kind == NO_TRUTH


@in_a_sandbox
def test_a_script_reaches_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    script = tmp_path / "job/bad.sh"
    script.write_text(
        f"touch {tmp_path}/made /usr/made $HOME/made; rm -rf {tmp_path} /job/*; mount -o remount,rw /usr\n"
        f"ls {tmp_path.parent}; [ -e /root ] || python no_root; curl http://127.0.0.1; python3 -c 'print(1)'\n"
        "[ -w /proc/sys/kernel/hostname ] || python proc_read_only; touch /usr/made || python read_only\n"
    )
    found = record(Start(tmp_path / "job", "bad.sh", "", NOW))
    programs = [command[1:] for command in found.commands]
    assert {("curl", "http://127.0.0.1"), ("python3", "-c", "print(1)")} <= set(programs)
    assert {("python", one) for one in ("no_root", "proc_read_only", "read_only")} <= set(programs)
    assert script.is_file() and not (tmp_path / "made").exists() and not Path("/usr/made").exists()
    assert "Read-only file system" in found.errors


@in_a_sandbox
def test_the_page_counts_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "corpus/owner+one/main"
    folder.mkdir(parents=True)
    (folder / "plain.sh").write_text(f"torchrun {FLAGS}\n")
    monkeypatch.setattr(sys, "argv", ["against_bash", str(tmp_path / "corpus"), "--to", str(tmp_path / "page.md")])
    against_bash.main()
    assert "| owner/one | 1 | 1 | 0 | 0 | 0 | 0 | 19 | 0 |" in (tmp_path / "page.md").read_text()


def test_words_are_compared_one_by_one() -> None:
    job = Missing(1, "$JOB_ID", "is known only inside the job", "JOB_ID")
    some: Value = (Chunk("", 1, divides=True, missing=job),)
    here: Value = (Chunk(".", 1, is_here=True), *plain("/ck", 1))
    read = [plain("--lr", 1), plain("1", 1), some, plain("--save", 1), here, absent(job)]
    start = "/job/deep"
    assert compare(read, ["--lr", "1", "--save", "/job/deep/ck", "7"], start, "/elsewhere").difference is None
    found = compare(read, ["--lr", "1", "--bf16", "x", "--save", "./ck", "7"], start, start)
    assert found.difference is None and found.swallowed == ("--bf16",) and found.unknown == 2
    for received in (
        ["--lr", "2", "--save", "./ck", "7"],
        ["--lr", "1", "--save", "/job/ck", "7"],
        ["--lr", "1", "--save", "./ck"],
        ["--lr", "1", "--save", "./ck", "7", "--more"],
    ):
        assert compare(read, received, start, start).difference is not None
