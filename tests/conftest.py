"""What tests of several folders share."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def loggers_stay_as_they_are() -> Iterator[None]:
    """A test that quietens ours would hide what later ones look for."""
    ours = [logging.getLogger(name) for name in (None, "verl", "scrl")]

    def state() -> list[tuple[int, bool, bool]]:
        return [(logger.level, logger.disabled, logger.propagate) for logger in ours]

    before = state()
    yield
    assert state() == before


def _observation(step: int, sample: int) -> str:
    hits = [{"title": f"Page {step}", "text": f"The mayor of Oslo is Ann number {sample}. " * 3}]
    return json.dumps([{"query": f"mayor {step}", "results": hits}])


def rollout_row(step: int, group: int, sample: int, **changes: Any) -> dict[str, Any]:
    """A search and an answer; odd samples are right. Its tokens are "Ann" and the end, the first of them 0.5 apart."""
    right = sample % 2 == 1
    answer = "Ann" if right else "Bo"
    tokens = {
        "ids": "11 12",
        "text": "Ann<|im_end|>",
        "widths": "3 10",
        "loss": "11",
        "engine": "-0.5000 -0.2500",
        "trainer": "-1.0000 -0.2500",
    }
    search = {
        "kind": "tool_call",
        "think": f"Who is the mayor, at step {step}?",
        "queries": [f"mayor {step}"],
        "answer": None,
        "observation": _observation(step, sample),
        "observation_tokens": 40,
        "search_ok": True,
        "latency_s": 0.25,
        "generate_s": 1.5,
        "tool_call": {"name": "web_search", "arguments": {"query": [f"mayor {step}"]}},
        "tokens": tokens,
    }
    end = {"kind": "answer", "think": "It says so.", "queries": [], "answer": answer, "tokens": tokens}
    row = {
        "idx": group,
        "question": f"Who is mayor number {group}?",
        "ground_truths": ["Ann"],
        "data_source": "one_hop" if group % 2 else "two_hop",
        "answer": answer,
        "finish": "answer",
        "error": "",
        "uid": f"{step}-{group}",
        "sample_index": sample,
        "search_depth": 1,
        "turns": [search, end],
        "reward": {
            "f1": float(right),
            "outcome": float(right),
            "pbrs": 0.0,
            "score": right - 0.25,
            "phi": [0.0, 0.5, 0.5],
            "by_turn": [{"pbrs": 0.5}, {"outcome": float(right), "pbrs": -0.5, "repetition": -0.25}],
        },
        "turn_reward": [0.5, right - 0.75],
        "advantage": [1.0, -1.0],
    }
    return row | changes


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """``write_run(name, steps=3, groups=2, samples=4, rows={step: rows})``: a run's folder as training leaves it, with
    an alert at step 2 that names sample 0 of group 1, and a validation of one episode a group every other step."""

    def write(
        name: str = "demo", steps: int = 3, groups: int = 2, samples: int = 4, rows: dict[int, list] | None = None
    ) -> Path:
        folder = tmp_path / name
        (folder / "rollout").mkdir(parents=True)
        metrics = []
        for step in range(1, steps + 1):
            metrics.append(
                {
                    "step": step,
                    "critic/score/mean": step / 10,
                    "reward/f1": step / (steps + 1),
                    "behavior/search_depth": 1 / step,
                    "actor/grad_norm": 10.0**step if step < 9 else 1.0,
                    "timing_s/gen": 3.0,
                    "timing_s/update_actor": 1.0,
                    "timing_s/step": 5.0,
                    "extra/unknown": float(step),
                    **({"val/f1/mean": 0.5} if step % 2 == 0 else {}),
                }
            )
            made = [rollout_row(step, group, sample) for group in range(groups) for sample in range(samples)]
            text = json.dumps((rows or {}).get(step, made))
            (folder / "rollout" / f"rollout_step_{step}.json").write_text(text, encoding="utf-8")
            if step % 2 == 0:
                validation = [rollout_row(step, group, 1, uid=f"{step}-{group}") for group in range(groups)]
                (folder / "rollout" / f"val_step_{step}.json").write_text(json.dumps(validation), encoding="utf-8")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
        (folder / "config.yaml").write_text(f"trainer:\n  experiment_name: {name}\nmax_turns: 4\n", encoding="utf-8")
        alert = {
            "step": 2,
            "metric": "behavior/search_depth",
            "value": 0.5,
            "threshold": 0.6,
            "message": "step 2: search_depth is 0.500, below 0.6 (1 of 8 episodes)",
            "episodes": [{"uid": "2-1", "sample_index": 0, "value": 0.0}, {"uid": "9-9", "sample_index": 0}],
        }
        (folder / "behavior_alerts.jsonl").write_text(json.dumps(alert) + "\n", encoding="utf-8")
        return folder

    return write
