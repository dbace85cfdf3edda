"""A run's metrics.jsonl as columns over its steps: what every plot and page of runs reads."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SMOOTH_FROM = 24  # steps; fewer points are clearer as they are
# What of a step's time is drawn together, bottom up; what no phase covers is "other".
PHASES = {
    "generation and search": ("timing_s/gen",),
    "log-probs": ("timing_s/old_log_prob", "timing_s/ref_log_prob"),
    "update": ("timing_s/update_actor",),
    "weight sync": ("timing_s/update_weights",),
}


@dataclass
class Run:
    """One run's metrics. ``steps`` ascend; a step that was logged in two lines (training, then validation) is one.

    ``problems``: what of the file could not be used, a sentence each.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        merged: dict[int, dict[str, Any]] = {}
        for row in self.rows:
            merged.setdefault(row["step"], {}).update(row)
        self.steps = sorted(merged)
        self.rows = [merged[step] for step in self.steps]

    @property
    def metrics(self) -> list[str]:
        """Names of all that was logged, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values where the metric is a number; both (n,), n may be 0."""
        points = [(s, row[metric]) for s, row in zip(self.steps, self.rows, strict=True) if is_number(row.get(metric))]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)


def is_number(value: Any) -> bool:
    """A finite one; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_run(file: Path) -> Run:
    """Reads a metrics.jsonl. A line that is no metrics object is named in ``Run.problems``, but for a last line that
    is still being written, which is left out.

    Raises:
        OSError: it can't be read.
    """
    rows, problems = [], []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, row in enumerate(read_json_lines(lines), start=1):
        if row is not None and is_number(row.get("step")):
            rows.append({**row, "step": int(row["step"])})
        elif number < len(lines):
            text = lines[number - 1]
            problems.append(f"{file}, line {number} is no metrics object with a step ({text[:60]!r})")
    name = file.resolve().parent.name if file.name == "metrics.jsonl" else file.stem
    return Run(name, rows, problems)


def read_json_lines(lines: Iterable[str]) -> Iterable[dict[str, Any] | None]:
    """A line's object, or None where there is no such thing."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield row if isinstance(row, dict) else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a tenth of the run, (n,) to (n,); the window shrinks at the ends."""
    half = max(1, len(values) // 20)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def phase_seconds(run: Run) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps (n,), and the seconds of each of ``PHASES`` and of ``other`` in them, each (n,)."""
    steps, whole = run.series("timing_s/step")
    layers = {}
    for phase, metrics in PHASES.items():
        by_step: dict[float, float] = {}
        for metric in metrics:
            for step, seconds in zip(*run.series(metric), strict=True):
                by_step[step] = by_step.get(step, 0.0) + seconds
        layers[phase] = np.array([by_step.get(step, 0.0) for step in steps])
    layers["other"] = np.maximum(0.0, whole - np.sum(list(layers.values()), axis=0))
    return steps, layers
