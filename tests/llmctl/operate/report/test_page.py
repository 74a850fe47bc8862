"""The page of runs as text: all that belongs to it, nothing that does not, and nothing that a run can break."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmctl.context import Context
from llmctl.operate.report.gather import gather_runs
from llmctl.operate.report.page import FOLDER, page_of
from llmctl.operate.report.secret_words import shown_command
from llmctl.transport.local import LocalTransport
from tests.llmctl.operate.report.made_runs import HOSTILE, add, made_run, trained
from tests.llmctl.run_directories import TRANSPORT, leave, make_run

SECRET = "hf_correcthorse"


class Text(HTMLParser):
    """Elements and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.scripts[-1] == "":
            self.scripts[-1] = data
        elif self.tags[-1:] != ["style"]:
            self.text += data


class Far(LocalTransport):
    """Another machine: its folder /far is a folder here."""

    host = "login.far"
    is_remote = True

    def __init__(self, folder: Path) -> None:
        super().__init__({})
        object.__setattr__(self, "folder", folder)

    def _here(self, path: str) -> str:
        assert path.startswith("/far/"), path
        return str(self.folder / path.removeprefix("/far/"))

    def read_parts(self, reads):
        return LocalTransport.read_parts([replace(one, path=self._here(one.path)) for one in reads])

    def list_names(self, folders):
        return LocalTransport.list_names([self._here(folder) for folder in folders])


@pytest.fixture
def context(home: Path) -> Context:
    return Context.of(("llmctl", "report"), (), dict(os.environ), home)


def page(context: Context, *runs) -> Text:
    return Text(page_of(gather_runs(context, [add(context, run) for run in runs])))


def test_a_resumed_run_has_curves_attempts_lost_time_plan_timeline_config_and_log(context, home):
    run = trained(made_run(home / "runs"), resumes_at=21)
    found = page(context, run)
    data = json.loads(found.scripts[0])
    (drawn,) = data["runs"]
    assert drawn["train"]["step"] == list(range(1, 41))
    assert drawn["train"]["tokens"][-1] == 40 * 4096
    assert drawn["valid"]["of"]["valid_loss"] == [[3.1]]
    # No number, no chart: MFU is null in every row.
    assert [chart["key"] for chart in data["charts"]] == [
        *("lm_loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_memory_bytes"),
    ]
    assert "Model FLOPs utilisation" not in found.text
    for words in ("1 to 34", "14 steps, 14 s", "21 to 40", "the GPU fell off the bus", "failed, exit code 1"):
        assert words in found.text, words
    assert "2 pipeline ranks, 4 micro-batches" in found.text
    assert "time of a step" in found.text and "pipeline rank 1" in found.text
    assert re.search(r"optimizer\.lr\s*0\.001\s*--set", found.text)
    assert "1/40 loss 5.5" in found.text
    assert "".join(found.text.partition("Memory by rank")[2].split()).startswith(
        "rankhostpeakofthelargest0node7600MiB100%1node7480MiB80%"
    )


def test_time_is_divided_into_what_counts_and_what_does_not(context, home):
    run = trained(made_run(home / "runs"), resumes_at=21)
    (found,) = gather_runs(context, [add(context, run)])
    time = found.costs.time
    # The submission is of today, the attempts of long ago: no time before the first.
    assert (time.queue_s, time.start_s, time.steps_s, time.lost_steps_s) == (0, 18, 40, 14)
    assert (time.hang_s, time.end_s, time.pause_s) == (3, 3, 38)
    words = page(context, run).text
    assert "Effective training time (ETTR): 34.5%: lost 76 s of 116 s: 38 s between attempts, 18 s starts" in words


def test_no_text_of_a_run_becomes_part_of_the_page(context, home):
    run = made_run(
        home / "runs", name=HOSTILE, command=("llmctl", "submit", HOSTILE), origins={"optimizer.lr": HOSTILE}
    )
    run.record.config["data"]["data_path"] = [HOSTILE]
    trained(run, resumes_at=21)
    folder = run.path / "attempts/1"
    (folder / "rank-00001.log").write_text(HOSTILE)
    error = json.loads((folder / "errors/rank-00001.json").read_text())
    (folder / "errors/rank-00001.json").write_text(json.dumps({**error, "message": HOSTILE, "host": HOSTILE}))
    (folder / "exit.json").write_text(json.dumps({"code": 1, "reason": HOSTILE, "signal": HOSTILE, "time": 1764000090}))
    found = page(context, run)
    assert found.text.count(HOSTILE) >= 6
    assert found.tags.count("script") == 2 and "img" not in found.tags
    assert json.loads(found.scripts[0])["runs"][0]["name"] == run.record.run_id


def test_names_in_the_data_cannot_end_its_element(context, home):
    run = trained(made_run(home / "runs"))
    rows = (run.path / "metrics.jsonl").read_text().replace('"grad_norm"', '"</script><q>_loss"')
    (run.path / "metrics.jsonl").write_text(rows)
    found = page(context, run)
    assert found.tags.count("script") == 2 and "q" not in found.tags
    assert "</script><q>_loss" in {chart["key"] for chart in json.loads(found.scripts[0])["charts"]}


def test_secrets_are_not_in_the_page(home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    context = Context.of(("llmctl", "report"), (), dict(os.environ), home)
    job = {"nodes": 1, "env": {"WANDB_API_KEY": "wandb-value", "PLAIN": "plain-value"}, "secrets": ["HF_TOKEN"]}
    command = ("llmctl", "submit", "--env", "WANDB_API_KEY=wandb-value", "--env=PLAIN=plain-value")
    run = trained(made_run(home / "runs", job=job, command=command), resumes_at=21)
    (run.path / "attempts/1/rank-00001.log").write_text(f"login with {SECRET} and wandb-value\n")
    fail_file = run.path / "attempts/1/errors/rank-00001.json"
    fail_file.write_text(fail_file.read_text().replace("the GPU", SECRET))
    found = page(context, run).text
    assert SECRET not in found and "wandb-value" not in found and "plain-value" not in found
    assert "login with [HF_TOKEN] and [WANDB_API_KEY]" in found
    assert "--env WANDB_API_KEY=... --env=PLAIN=..." in found
    assert shown_command(["submit", "--env", "NAME"]) == ["submit", "--env", "NAME"]


def test_several_runs_show_only_their_differences(context, home):
    first = trained(made_run(home / "runs"))
    second = trained(made_run(home / "runs", "other-261127-120000-abcd", name="other"), steps=30, loss=2.0)
    second.record.config["optimizer"]["lr"] = 0.5
    second.record.save(TRANSPORT)
    found = page(context, first, second)
    assert [len(run["train"]["step"]) for run in json.loads(found.scripts[0])["runs"]] == [40, 30]
    assert re.search(r"optimizer\.lr\s*0\.001\s*0\.5", found.text)
    assert "model.hidden_size" not in found.text
    assert "tokens/s" in found.text and "MFU" not in found.text


def test_a_run_of_another_machine_is_read_there(context, home):
    profile = home / "config/llmctl/clusters/far.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("scheduler: slurm\nlogin: {host: login.far}\nruns_root: /far/runs\n")
    run = trained(made_run(home / "runs", cluster="far"), resumes_at=21)
    place = Path("/far/runs") / run.record.run_id
    context.index.add(replace(run.record, run_dir=place))
    context.connections["far"] = Far(home)
    found = Text(page_of(gather_runs(context, [context.index.find(run.record.run_id)])))
    assert json.loads(found.scripts[0])["runs"][0]["train"]["step"] == list(range(1, 41))
    assert "the GPU fell off the bus" in found.text and "1/40 loss 5.5" in found.text and str(place) in found.text
    assert "No plan: the profile of its cluster names no known GPU." in found.text


def test_a_command_has_attempts_and_no_curves(context, home):
    run = make_run(home / "runs", "hello-261127-120000-abcd", train_iters=None)
    run.submit(None)
    leave(run.start_attempt(), "failed", 3)
    (run.path / "attempts/1/node-00000.log").write_text("no such file\n")
    found = page(context, run)
    assert "failed, exit code 3" in found.text and "no such file" in found.text
    assert "Curves" not in found.text and "Plan beside" not in found.text and "Config" not in found.text
    assert found.tags.count("script") == 0


def test_a_run_without_attempts_and_one_that_runs_have_pages(context, home):
    waiting = made_run(home / "runs").submit(None)
    assert "Attempts" not in page(context, waiting).text
    running = made_run(home / "runs", "live-261127-120000-abcd", name="live").submit(None)
    running.start_attempt()
    running.metrics(1, 2, 3)
    found = page(context, running)
    assert "no end recorded" in found.text and "1 to 3" in found.text


def test_the_page_asks_for_nothing_and_allows_only_its_own_script_and_style(context, home):
    text = page_of(gather_runs(context, [add(context, trained(made_run(home / "runs")))]))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe" not in policy
    assert not re.search(
        r"<(link|img|iframe|object|embed|video|audio|base)\b|\bsrc=|@import|url\(| style=| on\w+=\"", text
    )


def test_colours_can_be_told_from_their_ground():
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for lines and marks (1.4.11)."""
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", (FOLDER / "page.css").read_text(encoding="utf-8"))
    for block in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        texts = [("ink", "ground"), ("ink", "card"), ("soft", "ground"), ("soft", "card"), ("accent", "card")]
        texts += [(name, f"{name}-ground") for name in ("good", "bad", "busy", "calm")] + [("bad", "card")]
        kinds = ("forward", "backward", "backward-input", "backward-weight")
        texts += [("on-block", kind) for kind in kinds]
        marks = [(f"c{number}", "card") for number in range(10)] + [(kind, "card") for kind in kinds]
        wrong = [pair for pair in texts if contrast(*(colours[name] for name in pair)) < 4.5]
        wrong += [pair for pair in marks if contrast(*(colours[name] for name in pair)) < 3]
        assert wrong == []


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
