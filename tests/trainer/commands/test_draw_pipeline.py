"""Drawings show the table's content, in a terminal, in a pipe and as SVG."""

import os
import pty
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.waiting import HANG_S
from trainer.commands.draw_pipeline import main
from trainer.planning.schedule import ActionKind, build_schedule, timeline, zb_v
from trainer.planning.schedule.draw import Drawing, cut, text_rows

SVG = "{http://www.w3.org/2000/svg}"
EQUAL = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD_INPUT: 1.0, ActionKind.BACKWARD_WEIGHT: 1.0}


def test_plain_rows_are_on_one_time_scale(capsys):
    assert main(["--schedule", "zb-h1", "--pipeline-model-parallel-size", "3", "--num-micro-batches", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "zb-h1: 3 ranks, 4 micro-batches",
        "step time 14, of which 12 busy on average: bubble 14.3%; 16 messages between ranks",
    ]
    assert lines[3:6] == [
        "rank 0  |F0 F1 F2 ······I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "rank 1  |···F0 F1 ···I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "rank 2  |······F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert lines[7] == "F forward, I input gradient, W weight gradients, · waits"
    assert [line.split() for line in lines[10:13]] == [
        ["rank", "0", "14.3%", "3", "3"],
        ["rank", "1", "14.3%", "2", "3"],
        ["rank", "2", "14.3%", "1", "3"],
    ]


def test_durations_are_those_of_a_whole_rank(capsys):
    """Schedules with more chunks stay comparable: each chunk takes its share."""
    flags = ["--pipeline-model-parallel-size", "2", "--num-micro-batches", "2", "--forward", "2"]
    times = []
    for more in (["--schedule", "1f1b"], ["--schedule", "interleaved", "--chunks", "4"]):
        assert main([*flags, *more]) == 0
        times.append(float(re.search(r"step time (\S+),", capsys.readouterr().out)[1]))
    assert times == [12.0, 9.0]


def test_chunks_are_named(capsys):
    assert main(["--schedule", "zb-v", "--pipeline-model-parallel-size", "1", "--num-micro-batches", "1"]) == 0
    out = capsys.readouterr().out
    assert "rank 0  |F0-- F0.1 I0.1 W0.1 I0-- W0--\n" in out
    assert "F0.1 is micro-batch 0 in chunk 1" in out
    assert "zb-v: 1 rank, 1 micro-batch, 2 chunks on each rank" in out


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("coloured", [False, True])
def test_every_row_is_as_long_as_the_step(kind, coloured):
    schedule = build_schedule(kind, 4, 3 if kind == "interleaved" else 2 if kind == "zb-v" else 1, 11)
    uneven = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD_INPUT: 1.37, ActionKind.BACKWARD_WEIGHT: 0.81}
    rows = text_rows(Drawing(schedule, timeline(schedule, uneven), ""), coloured=coloured, padding=1)
    lengths = {sum(len(cell.text) for cell in row) for row in rows}
    assert len(lengths) == 1
    for row, actions in zip(rows, schedule.stages, strict=True):
        painted = [cell.text.strip(" -") for cell in row if cell.background]
        assert painted == [str(action.micro_batch) if coloured else str(action) for action in actions]
    [length] = lengths
    for row in rows:
        panels = [cut(row, start, start + 50) for start in range(0, length, 50)]
        assert "".join(cell.text for panel in panels for cell in panel) == "".join(cell.text for cell in row)
        assert all(sum(len(cell.text) for cell in panel) <= 50 for panel in panels)


def test_svg_has_every_action_at_its_time(tmp_path, capsys):
    path = tmp_path / "v.svg"
    assert main(["--schedule", "zb-v", "--pipeline-model-parallel-size", "2", "--svg", str(path)]) == 0
    assert capsys.readouterr().err == f"{path}: written\n"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    schedule = zb_v(2, 8)
    groups = root.findall(f"{SVG}g")
    assert len(groups) == sum(map(len, schedule.stages))
    times = timeline(schedule, {kind: time / 2 for kind, time in EQUAL.items()})
    spans = [span for row in times.rows for span in row]
    boxes = [group.find(f"{SVG}rect") for group in groups]
    scale = (float(boxes[-1].get("x")) - float(boxes[0].get("x"))) / (spans[-1][0] - spans[0][0])
    for group, box, (start, end) in zip(groups, boxes, spans, strict=True):
        assert float(box.get("x")) == pytest.approx(float(boxes[0].get("x")) + start * scale, abs=0.2)
        assert float(box.get("width")) == pytest.approx((end - start) * scale, abs=1.2)
        assert group.find(f"{SVG}title").text.endswith(f": {start:.4g} to {end:.4g}")
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        assert 0 <= float(element.get("x", "0")) <= width
        assert 0 <= float(element.get("y", "0")) <= height
    assert len({box.get("fill") for box in boxes}) == 6


def test_a_terminal_gets_colours_and_panels_of_its_width():
    command = [sys.executable, "-m", "trainer", "draw-pipeline", "--schedule", "zb-v"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # Linux reports the closed other end this way
            pass
    os.close(ours)
    assert process.returncode == 0
    text = written.decode()
    assert "\x1b[38;2;255;255;255;48;2;59;111;182m0" in text.replace(" 0", "0")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("rank 3 ") for line in lines) == 4  # three panels and the table


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--schedule", "2f2b"], "unknown pipeline schedule '2f2b'; use one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (["--chunks", "2"], "1f1b needs one chunk per rank, not 2"),
        (["--pipeline-model-parallel-size", "0"], "at least one rank, not 0"),
        (["--num-micro-batches", "-1"], "at least one micro-batch, not -1"),
        (["--forward", "0"], "argument --forward: '0' is not a duration: give a number above 0"),
        (["--backward-weight", "fast"], "argument --backward-weight: 'fast' is not a duration"),
        (["--backward-input", "inf"], "argument --backward-input: 'inf' is not a duration"),
        (["--forward", "1e308", "--backward-input", "1e308"], "'1e308' is not a duration: give a number above 0, from"),
        (["--forward", "1e-320"], "'1e-320' is not a duration: give a number above 0, from 1e-12 to 1e+12"),
        (["--forward", "1e-9"], "the step is 2.2e+10 times as long as its shortest action"),
        (["--num-micro-batches", "1000000000"], "4 ranks with 1000000000 micro-batches and 1 chunk each are too many"),
        (["--pipeline-model-parallel-size", "1000000"], "1000000 ranks with 8 micro-batches and 1 chunk each are too"),
        (["--schedule", "interleaved", "--chunks", "1000000"], "1000000 chunks each are too many to draw"),
    ],
)
def test_bad_flags_are_refused_with_a_sentence(flags, problem, capsys):
    try:
        code = main(flags)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert not captured.out


def test_an_svg_that_cannot_be_written_is_an_error(tmp_path, capsys):
    assert main(["--svg", str(tmp_path / "nowhere" / "a.svg")]) == 3
    assert "nowhere/a.svg: cannot be written: No such file or directory" in capsys.readouterr().err


def test_drawing_needs_no_torch():
    program = "import sys, trainer.commands.draw_pipeline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)
