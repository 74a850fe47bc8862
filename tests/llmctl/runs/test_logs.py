from llmctl.runs.logs import LONGEST_LINE, LogFollower, clean, last_lines, node_logs, rank_logs
from llmctl.transport.file_reads import read_parts


def texts(lines):
    return [(line.source, line.text) for line in lines]


def test_names():
    names = ["rank-00000.log", "rank-00012.log", "node-00001.log", "rank-1.log", "rank-00000.log.bak", "stop"]
    assert rank_logs(names) == {0: "rank-00000.log", 12: "rank-00012.log"}
    assert node_logs(names) == {1: "node-00001.log"}


def test_many_files_are_followed_in_one_round_trip(tmp_path):
    trips = []

    def read(reads):
        trips.append(len(reads))
        return read_parts(reads)

    follower = LogFollower(read)
    for rank in range(50):
        (tmp_path / f"{rank}").write_text(f"hello {rank}\nhalf")
    follower.follow({f"rank {rank}": str(tmp_path / f"{rank}") for rank in range(50)}, {})
    assert len(follower.poll()) == 50
    assert trips == [50]
    with (tmp_path / "7").open("a") as file:
        file.write(" line\n")
    assert texts(follower.poll()) == [("rank 7", "half line")]
    assert len(follower.flush()) == 49


def test_a_file_may_appear_late_and_be_truncated(tmp_path):
    path = tmp_path / "log"
    follower = LogFollower(read_parts)
    follower.follow({"rank 0": str(path)}, {})
    assert follower.poll() == []
    path.write_text("one\ntwo\n")
    assert [line.text for line in follower.poll()] == ["one", "two"]
    path.write_text("new\n")
    assert [line.text for line in follower.poll()] == ["new"]


def test_invalid_bytes_escapes_and_progress_bars_are_cleaned():
    assert clean(b"\x1b[31mred\x1b[0m \x1b]0;title\x07end") == "red end"
    assert clean(b"\x00\x01a\xff\xfeb") == "\ufffd\ufffda\ufffd\ufffdb"
    assert clean(b"10%\r20%\r30%") == "30%"
    assert clean(b"windows line\r") == "windows line"
    assert clean("日本語\t2".encode()) == "日本語\t2"
    assert "\x9b" not in clean("\x9b31m".encode())


def test_a_very_long_line_is_shown_and_kept_in_part(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 << 20))
    follower = LogFollower(read_parts)
    follower.follow({"rank 0": str(path)}, {})
    assert follower.poll() == []
    with path.open("ab") as file:
        file.write(b"\nnext\n")
    endless, following = follower.poll()
    assert endless.text.startswith("xxx")
    assert endless.text.endswith(f" ... [{(3 << 20) - LONGEST_LINE} more bytes]")
    assert len(endless.text) < LONGEST_LINE + 50
    assert following.text == "next"


def test_a_very_long_progress_bar_keeps_its_last_state(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d%%\r" % (i % 100) for i in range(100_000)) + b"done\n")
    follower = LogFollower(read_parts)
    follower.follow({"rank 0": str(path)}, {})
    assert [line.text for line in follower.poll()] == ["done"]


def test_last_lines_of_large_small_and_absent_files(tmp_path):
    large, small, absent = tmp_path / "large", tmp_path / "small", tmp_path / "absent"
    large.write_text("".join(f"line {i}\n" for i in range(200_000)))
    small.write_text("a\nb\nunfinished")
    paths = [str(large), str(small), str(absent)]
    first, second, third = last_lines(read_parts, paths, 20_000, whole_only=True)
    assert first[0][0] == "line 180000"
    assert first[0][-1] == "line 199999"
    assert first[1] == large.stat().st_size
    assert second == (["a", "b"], 4)
    assert third == ([], 0)
    assert last_lines(read_parts, [str(small)], 2, whole_only=False) == [(["b", "unfinished"], 14)]
    assert last_lines(read_parts, [str(small)], 0, whole_only=True) == [([], 4)]


def test_last_lines_of_one_very_long_line_do_not_read_all_of_it(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse
    (lines, _offset) = last_lines(read_parts, [str(path)], 5, whole_only=False)[0]
    assert len(lines) == 1
    assert len(lines[0]) < LONGEST_LINE + 50


def test_files_appear_and_disappear_while_they_are_followed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1\n2\n")
    second.write_text("a\nb\n")
    follower = LogFollower(read_parts)
    follower.follow({"rank 0": str(first)}, {"rank 0": 2})
    assert texts(follower.poll()) == [("rank 0", "2")]
    follower.follow({"rank 0": str(first), "rank 1": str(second)}, {"rank 0": 0})
    assert texts(follower.poll()) == [("rank 1", "a"), ("rank 1", "b")]
    follower.follow({"rank 0": str(second)}, {})
    assert texts(follower.poll()) == [("rank 0", "a"), ("rank 0", "b")]
