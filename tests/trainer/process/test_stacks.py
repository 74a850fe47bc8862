"""Stacks of a rank that hangs, written on request."""

import threading

from trainer.process.heartbeat import Heartbeat
from trainer.process.stacks import FOLDER, WANTED, StackWriter


def a_function_that_stands_still(ended):
    ended.wait()


def test_each_request_is_answered_once_with_all_threads(tmp_path):
    writer, ended = StackWriter(tmp_path, 3), threading.Event()
    thread = threading.Thread(target=a_function_that_stands_still, args=(ended,))
    thread.start()
    try:
        writer.answer()
        assert not (tmp_path / FOLDER).exists()
        for number in (1, 2):
            with (tmp_path / WANTED).open("a") as file:
                file.write("\n")
            writer.answer()
            writer.answer()
            text = (tmp_path / FOLDER / "rank-00003.txt").read_text()
            assert text.count("a_function_that_stands_still") == number
    finally:
        ended.set()
        thread.join()


def test_a_rank_without_a_run_directory_writes_none():
    with Heartbeat(None, 0):
        pass
