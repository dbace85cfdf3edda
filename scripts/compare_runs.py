"""Compares the arms of an experiment: mean and interval over seeds, as a table and a plot.

    python scripts/compare_runs.py outputs/exp_03_pbrs --steps 1 64 129 --metrics reward/f1 actor/grad_norm
    python scripts/compare_runs.py logs/exp_03_pbrs --window 5       of the committed logs; prints, and writes nothing

Reads {arm}_seed{n}/metrics.jsonl or {arm}_seed{n}.jsonl in the folder. Writes table.md and plot.png into a folder of
runs, or to --out, there with the compared columns of every run as {arm}_seed{n}.jsonl. A run that ended early counts up
to its last step, one without a finished step is left out.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed

import matplotlib.pyplot as plt
import numpy as np
from plot_run import COLOURS, FAINT, Run, load_run, smooth

METRICS = ("behavior/search_depth", "reward/f1", "critic/score/mean", "actor/grad_norm")
# Two-sided 95 % quantile of Student's t by degrees of freedom; beyond the table the normal's is close enough.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NAME = re.compile(r"(?P<arm>.+)_seed(?P<seed>\d+)")


@dataclass(frozen=True)
class Arm:
    """The runs that differ in their seed alone."""

    name: str
    runs: tuple[Run, ...]

    def at(self, metric: str, step: int, window: int) -> np.ndarray:
        """(runs that got there,) the metric's mean over the ``window`` steps that end with ``step``."""
        values = []
        for run in self.runs:
            steps, series = run.series(metric)
            chosen = series[(steps > step - window) & (steps <= step)]
            if run.steps[-1] >= step and len(chosen):
                values.append(chosen.mean())
        return np.array(values)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t); NaN for fewer than two values."""
    if len(values) < 2:
        return (float(values[0]) if len(values) else float("nan")), float("nan")
    quantile = T95[len(values) - 2] if len(values) - 2 < len(T95) else 1.96
    return float(values.mean()), float(quantile * values.std(ddof=1) / np.sqrt(len(values)))


def load_arms(folder: Path) -> list[Arm]:
    """Every run of an experiment's folder by arm, both sorted by name; one that can't be read is told and left out.

    Raises:
        ValueError: no run there that can be read.
    """
    files = {NAME.fullmatch(path.parent.name): path for path in folder.glob("*/metrics.jsonl")}
    files |= {NAME.fullmatch(path.stem): path for path in folder.glob("*.jsonl")}
    found: dict[str, dict[int, Run]] = {}
    for match, path in files.items():
        if match:
            try:
                found.setdefault(match["arm"], {})[int(match["seed"])] = load_run(path)
            except ValueError as error:
                print(f"left out: {error}", file=sys.stderr)
    found = {arm: runs for arm, runs in found.items() if runs}
    if not found:
        raise ValueError(f"{folder} holds no {{arm}}_seed{{n}} run with a step; give the folder of an experiment")
    return [Arm(name, tuple(runs[seed] for seed in sorted(runs))) for name, runs in sorted(found.items())]


def table(arms: Sequence[Arm], metrics: Sequence[str], steps: Sequence[int], window: int) -> str:
    """A Markdown table a metric: arms down, steps across, mean ± interval over the seeds that got there."""
    lines = []
    for metric in metrics:
        lines += [f"**{metric}**", "", "| arm | seeds | " + " | ".join(f"step {s}" for s in steps) + " |"]
        lines.append("|---|---|" + "---|" * len(steps))
        for arm in arms:
            cells = [_cell(arm.at(metric, step, window), len(arm.runs)) for step in steps]
            lines.append(f"| {arm.name} | {len(arm.runs)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(values: np.ndarray, runs: int) -> str:
    if not len(values):
        return "–"
    mean, half = mean_interval(values)
    text = f"{mean:.3g}" + (f" ± {half:.2g}" if np.isfinite(half) else "")
    return text + (f" ({len(values)} of {runs})" if len(values) < runs else "")


def best_arm(arms: Sequence[Arm], prefix: str, metric: str, window: int) -> str:
    """The name of the arm whose metric is highest at its runs' end, the mean of the last ``window`` steps.

    Raises:
        ValueError: no arm of that prefix has the metric.
    """
    ends = {}
    for arm in arms:
        values = arm.at(metric, min(run.steps[-1] for run in arm.runs), window)
        if arm.name.startswith(prefix) and len(values):
            ends[arm.name] = values.mean()
    if not ends:
        raise ValueError(f"no arm {prefix}... has {metric}; its runs failed, their console.log says why")
    return max(ends, key=ends.__getitem__)


def draw(arms: Sequence[Arm], metrics: Sequence[str], title: str) -> plt.Figure:
    """A panel a metric: every run faintly, each arm's mean strongly."""
    looks = list(product(("-", "--", ":", "-."), COLOURS)) * len(arms)
    columns = min(4, len(metrics))
    rows = -(-len(metrics) // columns)
    with plt.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT}
    ):
        figure, grid = plt.subplots(
            rows, columns, figsize=(3.6 * columns, 3 * rows + 0.6), squeeze=False, layout="constrained"
        )
        for panel in grid.flat[len(metrics) :]:
            panel.set_visible(False)
        for metric, axes in zip(metrics, grid.flat, strict=False):
            axes.set_title(metric, loc="left", fontsize=10, fontweight="bold")
            axes.grid(axis="y", color="#eceef1")
            for arm, (style, colour) in zip(arms, looks, strict=False):
                _draw_arm(axes, arm, metric, colour, style)
            positive = np.concatenate([line.get_ydata() for line in axes.lines] or [np.zeros(0)])
            if len(positive) and positive.min() > 0 and positive.max() > 100 * positive.min():
                axes.set_yscale("log")
            axes.set_xlabel("step", color=FAINT)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        handles = [
            plt.Line2D([], [], color=colour, ls=style, lw=2.5, label=arm.name)
            for arm, (style, colour) in zip(arms, looks, strict=False)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=8, frameon=False)
    return figure


def _draw_arm(axes: plt.Axes, arm: Arm, metric: str, colour: str, style: str) -> None:
    by_step: dict[float, list[float]] = {}
    for run in arm.runs:
        steps, values = run.series(metric)
        axes.plot(steps, values, color=colour, lw=0.7, alpha=0.25, marker="o" if len(steps) == 1 else None, ms=3)
        for step, value in zip(steps, values, strict=True):
            by_step.setdefault(step, []).append(value)
    if by_step:
        steps = np.array(sorted(by_step))
        means = np.array([np.mean(by_step[step]) for step in steps])
        marker = "o" if len(means) == 1 else None
        axes.plot(steps, smooth(means) if len(means) >= 24 else means, color=colour, ls=style, lw=2, marker=marker)


def write_logs(arms: Sequence[Arm], metrics: Sequence[str], folder: Path) -> None:
    """The compared columns of every run, a line a step: small enough to keep."""
    for arm in arms:
        for run in arm.runs:
            columns = {metric: dict(zip(*run.series(metric), strict=True)) for metric in metrics}
            rows = [
                {"step": step} | {m: float(f"{c[step]:.6g}") for m, c in columns.items() if step in c}
                for step in run.steps
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{run.name}.jsonl").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outputs/{experiment} or logs/{experiment}")
    parser.add_argument("--metrics", nargs="+", default=METRICS)
    parser.add_argument("--steps", nargs="+", type=int, help="default: the first, the middle and the last")
    parser.add_argument("--window", type=int, default=1, help="steps averaged up to each of --steps (default 1)")
    parser.add_argument(
        "--best", metavar="PREFIX", help="only print the arm of that prefix whose last value is highest"
    )
    parser.add_argument("--out", type=Path, help="where to write (default: the folder itself, if it is one of runs)")
    args = parser.parse_args(argv)
    out = args.out or (args.folder if any(args.folder.glob("*/metrics.jsonl")) else None)
    try:
        arms = load_arms(args.folder)
        last = max(run.steps[-1] for arm in arms for run in arm.runs)
        if args.best is not None:
            print(best_arm(arms, args.best, args.metrics[0], args.window))
            return 0
        text = table(arms, args.metrics, args.steps or sorted({1, (last + 1) // 2, last}), args.window)
        print(text)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "table.md").write_text(text, encoding="utf-8")
            draw(arms, args.metrics, args.folder.name).savefig(out / "plot.png", dpi=80, facecolor="white")
            if out.resolve() != args.folder.resolve():
                write_logs(arms, args.metrics, out)
            print(f"{out / 'table.md'}, {out / 'plot.png'}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
