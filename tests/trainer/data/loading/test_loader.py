"""BatchLoader: bounded prefetching, by the ranks that need batches, the same on every layout."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.token_files import write
from tests.trainer.data.training_data import config
from tests.trainer.spawn import Ranks
from tests.waiting import HANG_S, wait_for
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.loading.build import build_data
from trainer.data.loading.loader import BatchLoader, ReadAhead
from trainer.data.loading.loader_sharing import BatchRole, mapped_role, needing_ranks, streaming_role
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh

STEP = 8
LIMITS: dict[Any, int] = {"train": 6 * STEP, "valid": 2 * STEP}


class Recorder:
    """Records its calls, and optionally blocks until released."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.leave = threading.Event()
        self.leave.set()

    def __call__(self, split: str, consumed: int) -> tuple[str, int]:
        self.leave.wait(HANG_S)
        self.asked.append((split, consumed))
        if (split, consumed) == ("train", 40):
            raise DataError("sample 40 is bad")
        return split, consumed


def settled(recorder: Recorder, count: int) -> list[tuple[str, int]]:
    """Calls so far, once there are ``count``; waits a moment for unwanted further calls."""
    wait_for(lambda: len(recorder.asked) >= count, f"{count} calls", step_s=0.001)
    time.sleep(0.01)
    return recorder.asked


def test_the_next_batches_are_prefetched() -> None:
    recorder = Recorder()
    ahead = ReadAhead(recorder, lambda *_: STEP, LIMITS, depth=2)
    assert ahead.get("train", 0) == ("train", 0)
    assert settled(recorder, 3) == [("train", 0), ("train", 8), ("train", 16)]  # and no more
    assert ahead.get("train", 8) == ("train", 8)
    assert settled(recorder, 4)[3:] == [("train", 24)]
    # An evaluation in between keeps the prefetched batches, and reads nothing beyond its end.
    assert [ahead.get("valid", consumed) for consumed in (0, 8)] == [("valid", 0), ("valid", 8)]
    assert settled(recorder, 6)[4:] == [("valid", 0), ("valid", 8)]
    assert ahead.get("train", 16) == ("train", 16)
    ahead.get("train", 24)
    ahead.get("train", 32)
    # The error is raised when its batch is requested.
    for _ in range(2):
        with pytest.raises(DataError, match="sample 40 is bad"):
            ahead.get("train", 40)
    ahead.close()
    assert ("train", 48) not in recorder.asked
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_batches_that_grow_are_prefetched() -> None:
    recorder = Recorder()
    ahead = ReadAhead(recorder, lambda _, consumed: 4 if consumed < 8 else 12, LIMITS, depth=2)
    for consumed in (0, 4, 8):
        assert ahead.get("train", consumed) == ("train", consumed)
    assert settled(recorder, 5) == [("train", consumed) for consumed in (0, 4, 8, 20, 32)]
    ahead.close()


def test_a_jump_discards_prefetched_batches_and_close_stops_reading() -> None:
    recorder = Recorder()
    ahead = ReadAhead(recorder, lambda *_: STEP, LIMITS, depth=2)
    assert ahead.get("train", 8) == ("train", 8)
    settled(recorder, 3)
    recorder.asked.clear()
    assert ahead.get("train", 0) == ("train", 0)
    assert settled(recorder, 3) == [("train", 0), ("train", 8), ("train", 16)]
    recorder.leave.clear()
    ahead.get("train", 8)
    recorder.asked.clear()
    recorder.leave.set()
    ahead.close()
    assert len(recorder.asked) <= 1


def test_without_prefetching_the_caller_reads() -> None:
    recorder = Recorder()
    before = threading.active_count()
    ahead = ReadAhead(recorder, lambda *_: STEP, LIMITS, depth=0)
    assert ahead.get("train", 16) == ("train", 16)
    assert threading.active_count() == before
    assert recorder.asked == [("train", 16)]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_read_that_hangs_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    data = build_data(config({"mock_data": True}), 0, 1)
    read, said, place = data.micro_batches, "", f"at sample {STEP:,};"

    def hang(split: Any, consumed: int) -> list[MicroBatch]:
        def told() -> str:
            # On a busy machine the batch before may have been told of, too.
            return "".join(line for line in capsys.readouterr().err.splitlines(True) if place in line)

        nonlocal said
        if consumed:
            said = wait_for(told, "a word of the hang", step_s=1.0)  # no progress for longer than the limit
        return read(split, consumed)

    monkeypatch.setattr(data, "micro_batches", hang)
    loader = BatchLoader(data, BatchRole(), {"train": STEP}, depth, report_after_s=0.3)
    assert loader.micro_batches("train", 0)
    assert loader.micro_batches("train", STEP)
    loader.close()
    assert said.startswith("trainer: the thread that reads data sleeps and has been silent for ")
    assert said.endswith(f" s while it reads the batch at sample {STEP:,}; check what it waits for\n")
    assert said.count("\n") == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_only_ends_of_the_pipeline_need_tokens() -> None:
    mesh = ParallelMesh(tp=2, pp=3, dp=2, rank=0)
    assert needing_ranks(mesh, 0, by_all=False) == (0, 1, 8, 9)
    assert needing_ranks(mesh, 1, by_all=False) == (2, 3, 10, 11)
    assert needing_ranks(mesh, 1, by_all=True) == (2, 3, 6, 7, 10, 11)
    roles = [mapped_role(mesh.at(rank), by_all=False) for rank in range(12)]
    assert [role.reads for role in roles] == [role.needs for role in roles]
    assert [rank for rank, role in enumerate(roles) if not role.needs] == [4, 5, 6, 7]
    # The loss is on the first rank (zb-v), which holds both ends.
    assert needing_ranks(ParallelMesh(tp=1, pp=3, dp=1, rank=0, loss_pp_rank=-3), 0, by_all=False) == (0,)


def asked(folder: Path, kind: str, packing: bool) -> TrainConfig:
    rules = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True} if packing else {}
    if kind == "mapped":
        data: dict[str, Any] = {"data_path": f"{folder}/d", **rules}
        return config(data, model={"vocab_size": 1000})
    data = {"streaming": True, "data_path": f"{folder}/t.jsonl", "tokenizer_type": "NullTokenizer", "num_workers": 0}
    return config({**data, **rules, "split": "80,20"}, model={"vocab_size": 1000})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    documents = [[number] * (1 + number % 19) for number in range(300)]
    write(folder / "d", documents)
    lines = (json.dumps({"text": " ".join(map(str, document))}) + "\n" for document in documents)
    (folder / "t.jsonl").write_text("".join(lines))
    return folder


Found = dict[str, dict[int, MicroBatch]]


def read_as_rank(rank: int, _world: int, mesh: ParallelMesh, asked: TrainConfig, depth: int) -> tuple[bool, Found]:
    mesh = mesh.at(rank)
    data = build_data(asked, mesh.dp_rank, mesh.dp)
    if data.stream is None:
        role = mapped_role(mesh, data.has_documents)
    else:
        role = streaming_role(mesh, data.has_documents, torch.device("cpu"), timedelta(seconds=60))
    loader = BatchLoader(data, role, {"train": 40, "valid": 16}, depth)
    found: Found = {}
    for split, places in (("train", (8, 16)), ("valid", (0, 8)), ("train", (24,)), ("valid", (0,))):
        for consumed in places:
            batches = loader.micro_batches(split, consumed)  # type: ignore[arg-type]
            found.setdefault(f"{split} {consumed}", {}).update({batch.index: batch for batch in batches})
    assert (loader.state(24) is not None) == role.reads
    loader.close()
    return role.needs, found


def check_equal(found: MicroBatch, expected: MicroBatch) -> None:
    for name in ("tokens", "labels", "loss_mask", "positions"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or (torch.equal(one, other) and one.dtype == other.dtype), name
    assert found.documents == expected.documents


LAYOUTS = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"pp": 4}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(map("{0[0]}{0[1]}".format, layout.items())))
@pytest.mark.parametrize("kind", ["mapped", "streaming"])
def test_every_rank_gets_what_one_process_reads(ranks: Ranks, folder: Path, kind: str, layout: dict[str, int]) -> None:
    mesh = ParallelMesh(**{"tp": 1, "pp": 1, "dp": 1, "rank": 0, **layout})
    # Without a tokenizer the ends of documents in prepared data are unknown.
    for packing in (False, True) if kind == "streaming" else (False,):
        wanted = asked(folder, kind, packing)
        whole = build_data(wanted, 0, 1)
        found = ranks.run(read_as_rank, mesh, wanted, 2 if mesh.tp == 2 else 0, world_size=mesh.world_size)
        for rank, (needs, batches) in enumerate(found):
            place = mesh.at(rank)
            assert needs == (packing or place.is_first_stage or place.computes_loss)
            for key, by_index in batches.items():
                split, consumed = key.split()
                expected = {b.index: b for b in whole.micro_batches(split, int(consumed))}  # type: ignore[arg-type]
                assert sorted(by_index) == sorted(expected)[place.dp_rank :: mesh.dp]
                for index, batch in by_index.items():
                    assert batch.tokens.shape == expected[index].tokens.shape
                    if needs:
                        check_equal(batch, expected[index])
