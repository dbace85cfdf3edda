"""Every backend gets every number; none of them can end the run; a pipe sees no control codes."""

import io
import json
import logging
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config import Config, from_dict
from verl.trainer.ppo.batch import episode_rows
from verl.utils import tracking
from verl.utils.episode_text import episode_text, ranked
from verl.utils.tracking import Tracking

ROOT = Path(__file__).resolve().parents[4]

STEP = {
    "critic/score/mean": -0.3125,
    "reward/f1": 0.1134,
    "behavior/search_depth": 0.094,
    "actor/grad_norm": 4.204,
    "actor/kl_loss": 0.00031,
    "actor/entropy": 1.2031,
    "perf/throughput": 1240.4,
    "timing_s/step": 11.24,
    "timing_s/gen": 7.0,
    "timing_s/update_actor": 2.8,
    "timing_s/old_log_prob": 1.0,
    "timing_s/reward": 0.01,
    "timing_s/overhead": 0.44,
}


def config(*loggers: str) -> Config:
    return from_dict({"trainer": {"logger": list(loggers), "experiment_name": "test"}})


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_keeps_every_bit_and_takes_numpy_and_torch(tmp_path):
    with Tracking(config("jsonl"), tmp_path, total_steps=2) as tracker:
        tracker.log(
            1, {"a": 0.1 + 0.2, "b": np.float32(0.7), "c": torch.tensor(2.5), "d": 3, "e": math.nan, "f": math.inf}
        )
        assert rows(tmp_path / "metrics.jsonl") == [  # flushed at once
            {"step": 1, "a": 0.1 + 0.2, "b": float(np.float32(0.7)), "c": 2.5, "d": 3, "e": None, "f": None}
        ]


def test_a_resumed_run_repeats_no_step(tmp_path):
    with Tracking(config("jsonl"), tmp_path, total_steps=5) as tracker:
        for step in range(5):
            tracker.log(step, {"x": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # the kill came here
    with Tracking(config("jsonl"), tmp_path, total_steps=5, resume_step=2) as tracker:
        tracker.log(3, {"x": 30})
    assert [(row["step"], row["x"]) for row in rows(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_new_run_under_an_old_name_keeps_the_old_metrics_beside(tmp_path):
    for value in (1, 2, 3):
        with Tracking(config("jsonl"), tmp_path, total_steps=1) as tracker:
            tracker.log(0, {"x": value})
    found = {path.name: rows(path)[0]["x"] for path in tmp_path.glob("metrics*.jsonl")}
    assert found == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


def test_a_backend_that_fails_is_named_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    class Broken:
        def __init__(self, *_):
            self.calls = 0

        def log(self, step, metrics):
            raise OSError("disk gone\nand more")

        def close(self, error):
            raise AssertionError("closed although it was off")

    def refuse(*_):
        raise RuntimeError("no account")

    monkeypatch.setitem(tracking.BACKENDS, "tensorboard", Broken)
    monkeypatch.setitem(tracking.BACKENDS, "swanlab", refuse)
    with caplog.at_level(logging.WARNING):
        with Tracking(config("swanlab", "tensorboard", "jsonl"), tmp_path, total_steps=2) as tracker:
            tracker.log(1, {"x": 1})
            tracker.log(2, {"x": 2})
    assert [row["x"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [record.message for record in caplog.records] == [
        "tracking: swanlab is off from here on (RuntimeError: no account)",
        "tracking: tensorboard is off from here on (OSError: disk gone)",
    ]


def piped(monkeypatch, tmp_path, total_steps: int = 40) -> tuple[io.StringIO, Tracking]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return stream, Tracking(config("console"), tmp_path, total_steps=total_steps)


def test_a_pipe_gets_one_plain_line_a_step(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    tracker.log(1, STEP | {"timing_s/testing": 99.0})  # validation stands outside the step
    tracker.log(2, {"timing_s/step": 10.0})
    tracker.close()
    header, first, second = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert header.split() == "step score F1 depth grad KL entropy tok/s time where the time went".split()
    assert first.split() == (
        "1/40 -0.312 0.113 0.09 4.2 0.0003 1.203 1,240 11.2 s generate 62%, update 25%, log-probs 9%, other 4%".split()
    )
    assert second.split() == ["2/40", *["-"] * 7, "10.0", "s"]
    assert header.index("time") + len("time") == first.index(" s ") + 2  # columns line up


@pytest.mark.parametrize("size", [5.39e-05, 1e-300, 0.0, 0.125, 123456.7, 9.87e12, 1e300, math.nan, math.inf])
def test_columns_stay_apart_for_every_magnitude(monkeypatch, tmp_path, size):
    stream, tracker = piped(monkeypatch, tmp_path)
    for value in (size, -size):
        tracker.log(1, {metric: value for _, metric, _, _ in tracking.ConsoleBackend.COLUMNS})
    header, *lines = stream.getvalue().splitlines()
    for line, value in zip(lines, (size, -size), strict=True):
        shown = [float(text.replace(",", "")) for text in line.removesuffix(" s  ").split()[1:]]
        assert shown == pytest.approx([value] * len(tracking.ConsoleBackend.COLUMNS), rel=0.4, abs=0.51, nan_ok=True)
    if size < 1e99 or size == math.inf:  # such columns line up, too
        assert header.index("time") + len("time") == lines[0].rindex(" s") + 2


def test_a_small_gradient_norm_is_shown(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    tracker.log(1, STEP | {"behavior/search_depth": 0.12, "actor/grad_norm": 5.391e-05})
    assert " 0.12 5.4e-05 " in stream.getvalue()


def test_the_header_returns(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    for step in range(1, 42):
        tracker.log(step, STEP)
    assert [i for i, line in enumerate(stream.getvalue().splitlines()) if "score" in line] == [0, 21, 42]


def test_validation_is_its_own_line(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    names = {"mean": 0.5, "one_hop": 0.7, "two_hop": 0.3}
    values = {f"val/f1/{name}": value for name, value in names.items()}
    tracker.log(0, values | {"val/search_depth/mean": 1.5, "timing_s/testing": 14.25})
    assert stream.getvalue() == (
        "validation  after step 0: F1 0.500  depth 1.50  14.2 s  (F1 by source: one_hop 0.700, two_hop 0.300)\n"
    )


def test_sources_are_named_without_what_they_all_begin_with(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    values = {"mean": 0.5, "demo_two_hop": 0.25, "demo_two_steps": 0.75}
    tracker.log(4, {f"val/f1/{name}": value for name, value in values.items()})
    assert stream.getvalue().endswith("(F1 by source: hop 0.250, steps 0.750)\n")


def test_a_long_line_is_not_wrapped_in_a_pipe_and_markup_stays_text(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    text = "alert: [bold]depth[/bold] :warning: " + "x" * 300
    tracker.say(text)
    assert stream.getvalue() == text + "\n"


def terminal(monkeypatch) -> io.StringIO:
    """What a terminal of 70 columns is sent from here on."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    return stream


def as_seen(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch, tmp_path):
    stream = terminal(monkeypatch)
    with Tracking(config("console"), tmp_path, total_steps=40) as tracker:
        tracker.status("generating")
        tracker.log(1, STEP)
        tracker.say("careful", warn=True)
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is hidden, and shown again
    plain = as_seen(stream)
    assert "1/40" in plain and "generating" in plain and "careful" in plain
    assert all(len(line) <= 70 for line in re.split(r"[\r\n]+", plain))


def test_a_terminal_shows_a_validation_line_and_an_alert_in_full(monkeypatch, tmp_path):
    stream = terminal(monkeypatch)
    values = {f"val/f1/source{number}": number / 10 for number in range(8)} | {"val/f1/mean": 0.35}
    with Tracking(config("console"), tmp_path, total_steps=4) as tracker:
        tracker.log(0, values)
        tracker.say("depth " + "is below its range and " * 5 + "ends here", warn=True)
    plain = " ".join(as_seen(stream).split())
    assert "…" not in plain and "source7 0.700)" in plain and "ends here" in plain


def test_the_time_left_is_shown_once_it_is_known(monkeypatch, tmp_path):
    stream = terminal(monkeypatch)
    clock = [0.0]
    made = tracking.Progress
    monkeypatch.setattr(
        tracking, "Progress", lambda *columns, **options: made(*columns, **options, get_time=lambda: clock[0])
    )
    with Tracking(config("console"), tmp_path, total_steps=4) as tracker:
        tracker.log(0, {"val/f1/mean": 0.5})
        clock[0] = 600.0
        tracker.log(1, STEP)
        tracker._backends["console"]._progress.refresh()
        assert "left" not in as_seen(stream) and "-:--" not in as_seen(stream)
        clock[0] = 1200.0
        tracker.log(2, STEP)
        tracker._backends["console"]._progress.refresh()
    assert "left 0:20:00" in as_seen(stream)


def test_tensorboard_drops_the_steps_that_are_repeated(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for done, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (2, {3: 30.0, 4: 40.0})):
        with Tracking(config("tensorboard"), tmp_path, total_steps=4, resume_step=done) as tracker:
            for step, value in values.items():
                tracker.log(step, {"critic/score/mean": value})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert found == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("critic/score/mean", "Score"),
        ("critic/advantages/max", "Learning"),
        ("actor/kl_loss", "Learning"),
        ("actor/grad_norm", "Stability"),  # the longest beginning counts
        ("training/rollout_probs_diff_mean", "Stability"),
        ("behavior/query_diversity", "Behaviour"),
        ("response_length/sampled", "Lengths"),
        ("timing_s/gen", "Time"),
        ("val/f1/mean", "Validation"),
        ("loss", "Other"),
    ],
)
def test_sections_of_metrics(name, section):
    assert tracking.section_of(name) == section


def test_every_metric_of_a_step_has_a_section():
    names = set(STEP)
    for source in (ROOT / "verl").rglob("*.py"):  # literal names, and beginnings such as f"search/{name}"
        names |= set(re.findall(r'metrics\[f?"([a-z_]+/[^"]+)"\]', source.read_text()))
        names |= set(re.findall(r'^ +f?"([a-z_]+/[^"]+)": ', source.read_text(), re.MULTILINE))
    assert "critic/score/mean" in names and len(names) > 20
    assert [name for name in sorted(names) if tracking.section_of(name) == "Other"] == []


def test_one_quantity_shares_a_chart():
    names = ["critic/score/mean", "critic/score/max", "response_length/mean", "response_length/min", "reward/f1"]
    assert tracking.chart_layout([*names, "reward/em"]) == {
        "Score": {
            "critic/score": ["Multiline", ["^critic/score/mean$", "^critic/score/max$"]],
            "reward/f1": ["Multiline", ["^reward/f1$"]],
            "reward/em": ["Multiline", ["^reward/em$"]],
        },
        "Lengths": {"response_length": ["Multiline", ["^response_length/mean$", "^response_length/min$"]]},
    }


def row(score: float, **more) -> dict:
    """An episode as ``episode_rows`` writes it, with one search."""
    call = {"name": "web_search", "arguments": {"query": ["Lucky Ocean author", "x" * 150]}}
    turns = [
        {"kind": "tool_call", "think": "Who\nwrote it?", "queries": call["arguments"]["query"], "tool_call": call},
        {"kind": "malformed", "think": "", "reason": "no tag", "text": "<script>alert(1)</script>"},
        {"kind": "answer", "think": "Found.", "queries": [], "answer": "Nanlorr"},
    ]
    return {
        "question": f"Where? {score}",
        "ground_truths": ["Nanlorr", "Nanlor"],
        "data_source": "demo",
        "finish": "answer",
        "turns": turns,
        "reward": {"score": score, "f1": 1.0, "valid": 1.0},
    } | more


def test_an_episode_as_text():
    assert episode_text(row(0.25)).splitlines() == [
        "question: Where? 0.25",
        "gold: Nanlorr | Nanlor",
        "score 0.250, F1 1.000, answer, demo",
        "",
        "1 think: Who",
        "wrote it?",
        "1 web_search: Lucky Ocean author",
        "1 web_search: " + "x" * 96,
        "  " + "x" * 54,
        "",
        "2 malformed (no tag): <script>alert(1)</script>",
        "",
        "3 think: Found.",
        "3 answer: Nanlorr",
    ]


def test_what_the_trainer_writes_down_can_be_shown():
    call = ToolCall("web_search", {"query": ["capital of Norway"]})
    turns = [
        Turn("tool_call", think="Look it up.", tool_call=call, queries=["capital of Norway"]),
        Turn("malformed", text="Oslo?", reason="no tag"),
    ]
    asked = {"index": 0, "question": "Capital?", "ground_truths": ["Oslo"], "data_source": "demo", "prompt_ids": [1]}
    episodes = [
        Episode("0-0", i, turns=turns, finish=finish, **asked) for i, finish in enumerate(("malformed", "error"))
    ]
    info = {"score": np.array([-1.0, 0.0]), "f1": np.zeros(2), "valid": np.array([True, False])}

    class Tokenizer:
        def decode(self, ids, **_):
            return ""

    chosen = ranked(episode_rows(episodes, Tokenizer(), info))
    assert chosen["best"] is chosen["worst"] and episode_text(chosen["best"]).splitlines() == [
        "question: Capital?",
        "gold: Oslo",
        "score -1.000, F1 0.000, malformed, demo",
        "",
        "1 think: Look it up.",
        "1 web_search: capital of Norway",
        "",
        "2 malformed (no tag): Oslo?",
    ]


def test_worst_median_and_best_leave_out_what_has_no_score():
    failed = row(9.0, finish="error")
    unscored = row(-9.0, reward={"score": -9.0, "f1": 0.0, "valid": 0.0})
    rows = [row(0.5), failed, row(-1.0), unscored, row(0.0), row(1.0)]
    assert {rank: chosen["reward"]["score"] for rank, chosen in ranked(rows).items()} == {
        "worst": -1.0,
        "median": 0.5,
        "best": 1.0,
    }
    assert ranked([failed, unscored]) == {}


def test_tensorboard_shows_the_sections_samples_and_alerts(tmp_path):
    with Tracking(config("tensorboard"), tmp_path, total_steps=2) as tracker:
        tracker.log(0, {"val/f1/mean": 0.1})
        tracker.log_samples(1, [row(0.25), row(0.75)], "train")
        tracker.alert(1, {"behavior/depth": "step 1: depth is 0"})
        tracker.log(1, {"critic/score/mean": 0.5})
    events = EventMultiplexer().AddRun(str(tmp_path / "tensorboard"), "run").Reload()
    provider = MultiplexerDataProvider(events, str(tmp_path))
    plugin = CustomScalarsPlugin(TBContext(data_provider=provider))
    layout = json.loads(plugin.layout_impl(RequestContext(), ""))
    assert [category["title"] for category in layout["category"]] == ["Score", "Validation"]  # the newest layout
    (text,) = events.Tensors("run", "samples/train/best/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "    question: Where? 0.75" in shown and all(line[:4] in ("", "    ") for line in shown.splitlines())
    (alert,) = events.Tensors("run", "alerts/messages/text_summary")
    assert alert.tensor_proto.string_val[0].decode().strip() == "step 1: depth is 0"


def test_swanlab_works_offline_without_an_account(tmp_path, monkeypatch, caplog):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stdout = sys.stdout
    with Tracking(config("swanlab"), tmp_path, total_steps=2) as tracker:
        tracker.alert(1, {"behavior/depth": "step 1: depth is 0"})
        tracker.log_samples(1, [row(0.25)], "val")
        tracker.log(1, {"critic/score/mean": 0.25, "actor/grad_norm": 1.0, "bad": math.nan})
        assert sys.stdout is stdout
    assert [record.message for record in caplog.records] == ["step 1: depth is 0"]  # no console here to show it
    (written,) = (tmp_path / "swanlog").glob("run-*/*.swanlab")
    record = written.read_bytes()
    for name, section in ((b"critic/score/mean", b"Score"), (b"actor/grad_norm", b"Stability")):
        assert section in record[record.index(name) :][:80]
    texts = {path.read_text() for path in (tmp_path / "swanlog").glob("run-*/media/text/*.txt")}
    assert texts == {"step 1: depth is 0", episode_text(row(0.25))}


def test_swanlab_learns_how_the_run_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    with pytest.raises(ValueError), Tracking(config("swanlab"), tmp_path, total_steps=2):
        raise ValueError("the disk is full")
    (written,) = (tmp_path / "swanlog").glob("run-*/*.swanlab")
    assert b"ValueError: the disk is full" in written.read_bytes()


def test_local_mode_without_its_dashboard_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SWANLAB_MODE", "local")
    monkeypatch.setitem(sys.modules, "swanboard", None)
    with Tracking(config("swanlab"), tmp_path, total_steps=1):
        pass
    (record,) = caplog.records
    assert record.message.startswith("tracking: swanlab is off") and "see doc/tracking.md" in record.message
