"""What a run left in its folder, for readers that must open it whatever state it is in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.report.metrics import Run, is_number, read_json_lines, read_run
from verl.utils.report.rollouts import RolloutFile, rollout_files


@dataclass
class RunFolder:
    """``config``: the text of its YAML; ``alerts``: objects of behavior_alerts.jsonl, the last of each step and metric;
    ``problems``: what could not be used, a sentence each."""

    name: str
    metrics: Run
    rollouts: list[RolloutFile]
    alerts: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    problems: list[str] = field(default_factory=list)


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Runs by their folders, named apart. Rollout files are listed, not read.

    Raises:
        ValueError: a folder isn't there, or holds neither metrics nor episodes.
    """
    runs = [_open_run(path) for path in dict.fromkeys(path.expanduser().resolve() for path in paths)]
    for run, path in zip(runs, dict.fromkeys(path.expanduser().resolve() for path in paths), strict=True):
        if sum(other.metrics.name == run.metrics.name for other in runs) > 1:
            run.name = f"{path.parent.name}/{path.name}"
    return runs


def _open_run(path: Path) -> RunFolder:
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise ValueError(f"{path} is not there; give a run's folder, outputs/{{project}}/{{experiment}}")
    metrics, problems = Run(folder.name, []), []
    try:
        metrics = read_run(folder / "metrics.jsonl")
        problems += [f"{folder.name}: {problem}" for problem in _shorten(metrics.problems, folder)]
    except OSError as error:
        problems.append(f"{folder.name}: no curves, metrics.jsonl can't be read ({error.strerror})")
    rollouts = rollout_files(folder / "rollout")
    if not metrics.steps and not rollouts:
        raise ValueError(
            f"{folder} holds no run: neither a metrics.jsonl with a finished step nor rollout/rollout_step_*.json; "
            "give a run's folder, outputs/{project}/{experiment}, or wait for its first step"
        )
    alerts, bad = _read_alerts(folder / "behavior_alerts.jsonl")
    if bad:
        problems.append(f"{folder.name}: {bad} lines of behavior_alerts.jsonl were left out, they are no alerts")
    config = next((text for name in ("config.yaml", "val_config.yaml") if (text := _read_text(folder / name))), "")
    return RunFolder(folder.name, metrics, rollouts, alerts, config, problems)


def _shorten(problems: Sequence[str], folder: Path, most: int = 5) -> list[str]:
    """Names without the folder, and not more than a person reads."""
    shown = [problem.replace(f"{folder}/", "") for problem in problems[:most]]
    return shown + ([f"{len(problems) - most} more such lines"] if len(problems) > most else [])


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_alerts(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Alerts (a resumed run writes those of a repeated step again), and how many lines were none."""
    rows = list(read_json_lines(_read_text(file).splitlines()))
    sound = [row for row in rows if row and is_number(row.get("step")) and isinstance(row.get("metric"), str)]
    return list({(row["step"], row["metric"]): row for row in sound}.values()), len(rows) - len(sound)
