"""Every backend gets every number; none of them can end the run; a pipe sees no control codes."""

import io
import json
import logging
import math
import re
import sys

import numpy as np
import pytest
import torch

from verl.trainer.config import Config, from_dict
from verl.utils import tracking
from verl.utils.tracking import Tracking

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

        def close(self):
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


def test_a_long_line_is_not_wrapped_in_a_pipe_and_markup_stays_text(monkeypatch, tmp_path):
    stream, tracker = piped(monkeypatch, tmp_path)
    text = "alert: [bold]depth[/bold] :warning: " + "x" * 300
    tracker.say(text)
    assert stream.getvalue() == text + "\n"


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "70")
    with Tracking(config("console"), tmp_path, total_steps=40) as tracker:
        tracker.status("generating")
        tracker.log(1, STEP)
        tracker.say("careful", warn=True)
    shown = stream.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is hidden, and shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "1/40" in plain and "generating" in plain and "careful" in plain
    assert all(len(line) <= 70 for line in re.split(r"[\r\n]+", plain))


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


def test_swanlab_works_offline_without_an_account(tmp_path, monkeypatch, caplog):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stdout = sys.stdout
    with Tracking(config("swanlab"), tmp_path, total_steps=2) as tracker:
        tracker.log(1, {"critic/score/mean": 0.25, "bad": math.nan})
        assert sys.stdout is stdout
    assert not caplog.records
    written = list((tmp_path / "swanlog").glob("run-*/*.swanlab"))
    assert len(written) == 1 and b"critic/score/mean" in written[0].read_bytes()
