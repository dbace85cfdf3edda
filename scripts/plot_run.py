"""Draws training runs from their metrics.jsonl: what was learned, how stable it was, and where the time went.

    python scripts/plot_run.py outputs/{project}/{experiment} [more runs] [--out plot.png]

Writes plot.png into the first run's folder, or what --out names (.png, .svg, .pdf). One run shows its time by phase;
several are drawn over one another. Rings are validation. A run that is still going can be drawn at any time.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any directory

from verl.utils.report.metrics import SMOOTH_FROM, Run, phase_seconds, read_run, smooth

COLOURS = ("#2f6db5", "#d9662b", "#3a9a5b", "#8a5fb0", "#c23b57", "#7a6a4f")
INK, FAINT = "#2b2f36", "#8a9099"


@dataclass(frozen=True)
class Panel:
    title: str
    metric: str
    validation: str = ""  # metric of the rings; "": none
    log: bool = False  # a logarithmic axis, where the values span more than a factor of ten


PANELS = (
    Panel("Score", "critic/score/mean", "val/score/mean"),
    Panel("F1", "reward/f1", "val/f1/mean"),
    Panel("Searches an episode", "behavior/search_depth", "val/search_depth/mean"),
    Panel("Response length (tokens)", "response_length/mean"),
    Panel("Gradient norm", "actor/grad_norm", log=True),
    Panel("KL to the reference", "actor/kl_loss"),
    Panel("Entropy", "actor/entropy"),
    Panel("Seconds a step", "timing_s/step"),
)
PHASE_COLOURS = ("#2f6db5", "#7fb2dd", "#d9662b", "#f2b48a", "#d5d8dd")


def load_run(path: Path) -> Run:
    """Reads a run's folder, or its metrics.jsonl itself. A last line that is still being written is left out.

    Raises:
        ValueError: nothing there, nothing in it yet, or a line that is no metrics object.
    """
    file = path if path.is_file() else path / "metrics.jsonl"
    try:
        run = read_run(file)
    except OSError as error:
        raise ValueError(
            f"{file} can't be read ({error.strerror}); give a run's folder, outputs/{{project}}/{{experiment}}, "
            "whose trainer.logger has jsonl"
        ) from None
    if run.problems:
        raise ValueError(f"{run.problems[0]}; remove that line")
    if not run.steps:
        raise ValueError(f"{file} has no finished step yet; draw it again after the first one")
    return run


def draw(runs: Sequence[Run]) -> Figure:
    """Small multiples, one a metric; a panel without data says so."""
    style = {
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure, grid = plt.subplots(2, 4, figsize=(14, 6.4), sharex=True, layout="constrained")
        for panel, axes in zip(PANELS, grid.flat, strict=True):
            axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
            axes.grid(axis="y", color="#eceef1")
            axes.set_axisbelow(True)
            if panel.metric == "timing_s/step" and len(runs) == 1:
                drawn = _draw_time(axes, runs[0])
            else:
                drawn = _draw_panel(axes, panel, runs)
            if not drawn:
                axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=FAINT)
                axes.set_yticks([])
        for axes in grid[-1]:
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        figure.suptitle(_headline(runs), x=0.01, ha="left", fontsize=13, fontweight="bold")
        handles = [plt.Line2D([], [], color=_colour(i), lw=2.5, label=run.name) for i, run in enumerate(runs)]
        handles = handles if len(runs) > 1 else []
        if any(len(run.series(panel.validation)[0]) for run in runs for panel in PANELS):
            handles.append(plt.Line2D([], [], ls="", marker="o", mfc="white", mec=INK, mew=1.8, label="validation"))
        if handles:
            figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False)
    return figure


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _headline(runs: Sequence[Run]) -> str:
    """The run's name and what changed from its first point to its last; for several runs, how many."""
    if len(runs) > 1:
        return f"{len(runs)} runs"
    changes = []
    for name, metric, fallback in (
        ("F1", "val/f1/mean", "reward/f1"),
        ("searches", "val/search_depth/mean", "behavior/search_depth"),
    ):
        values = next((v for v in (runs[0].series(m)[1] for m in (metric, fallback)) if len(v) > 1), None)
        if values is not None:
            changes.append(f"{name} {values[0]:.2f} → {values[-1]:.2f}")
    return "   ·   ".join([runs[0].name, f"{runs[0].steps[-1]} steps", *changes])


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> bool:
    drawn, extremes = False, []
    for index, run in enumerate(runs):
        colour = _colour(index)
        steps, values = run.series(panel.metric)
        if panel.log:
            steps, values = steps[values > 0], values[values > 0]
        if len(steps):
            drawn = True
            extremes += [values.min(), values.max()]
            smoothed = len(steps) >= SMOOTH_FROM
            axes.plot(steps, values, color=colour, lw=1 if smoothed else 2, alpha=0.3 if smoothed else 1)
            if smoothed:
                axes.plot(steps, smooth(values), color=colour, lw=2)
            if len(steps) == 1:
                axes.plot(steps, values, "o", color=colour, ms=4)
        steps, values = run.series(panel.validation)
        if len(steps):
            drawn = True
            axes.plot(steps, values, "o", mfc="white", mec=colour, mew=1.8, ms=6.5, clip_on=False, zorder=5)
    if panel.log and drawn and max(extremes) > 10 * min(extremes):
        axes.set_yscale("log")
    return drawn


def _draw_time(axes: Axes, run: Run) -> bool:
    """Seconds of each phase stacked to the whole step."""
    steps, phases = phase_seconds(run)
    if not len(steps):
        return False
    names, layers = list(phases), list(phases.values())
    highest = float(np.sum(layers, axis=0).max())
    if len(steps) == 1:
        steps, layers = np.array([steps[0] - 0.4, steps[0] + 0.4]), [np.repeat(layer, 2) for layer in layers]
    areas = axes.stackplot(steps, layers, colors=PHASE_COLOURS, labels=names)
    axes.set_ylim(0, highest * 1.6)  # room for the legend
    axes.legend(handles=areas[::-1], loc="upper right", fontsize=7.5, frameon=False, ncols=2, handlelength=1)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="a run's folder, or a metrics.jsonl")
    parser.add_argument("--out", type=Path, help="image to write (default: plot.png in the first run's folder)")
    args = parser.parse_args(argv)
    try:
        figure = draw([load_run(path) for path in args.runs])
        first = args.runs[0]
        out = args.out or (first.parent if first.is_file() else first) / "plot.png"
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150, facecolor="white")
    except (ValueError, OSError) as error:  # OSError: the image can't be written there
        print(error, file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
