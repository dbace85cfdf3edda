"""Where a run's metrics go: console, metrics.jsonl, TensorBoard, SwanLab. A backend that fails never ends the run."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from verl.trainer.config import Config, to_dict
from verl.utils.jsonl import continue_jsonl

log = logging.getLogger(__name__)
Metrics = Mapping[str, float]


class Backend(Protocol):
    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """Sends each step's metrics to every backend named in ``trainer.logger``.

    ``resume_step`` is the step whose checkpoint was loaded, 0 for a new run; what an earlier process logged after it is
    dropped. A backend that raises is warned about once and left out from
    then on. Use it as a context manager, so that the terminal is left as it was found.
    """

    def __init__(self, config: Config, run_dir: Path, *, total_steps: int, resume_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._backends: dict[str, Backend] = {}
        for name in config.trainer.logger:
            made = self._guard(name, lambda name=name: BACKENDS[name](config, run_dir, total_steps, resume_step))
            if made is not None:
                self._backends[name] = made

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``metrics``: one step's numbers by name; NumPy and torch scalars will do."""
        numbers = {name: _number(value) for name, value in metrics.items()}
        for name, backend in list(self._backends.items()):
            self._guard(name, lambda backend=backend: backend.log(step, numbers))

    def say(self, text: str, warn: bool = False) -> None:
        """A line for people, above the progress bar. Without a console only a warning (``warn``) is shown."""
        console = self._backends.get("console")
        if isinstance(console, ConsoleBackend):
            self._guard("console", lambda: console.say(text, warn))
        elif warn:
            log.warning(text)

    def status(self, text: str) -> None:
        """What is going on right now (a phase of ``timing_s/*`` or any text), beside the bar; on a terminal only."""
        console = self._backends.get("console")
        if isinstance(console, ConsoleBackend):
            self._guard("console", lambda: console.status(text))

    def close(self) -> None:
        for name, backend in list(self._backends.items()):
            self._guard(name, backend.close)
        self._backends.clear()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guard(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # whatever a tracker does, the training goes on
            self._backends.pop(name, None)
            reason = str(error).strip().splitlines()
            log.warning(f"tracking: {name} is off from here on ({type(error).__name__}: {reason[0] if reason else ''})")
            return None


class JsonlBackend:
    """``metrics.jsonl``: one object a step. Numbers come back to the last bit; NaN and infinities are null."""

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        path = run_dir / "metrics.jsonl"
        continue_jsonl(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorboardBackend:
    """Event files under ``tensorboard/``. Steps that a resumed run repeats are purged."""

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is wanted

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class SwanlabBackend:
    """SwanLab: online with ``SWANLAB_API_KEY``, else offline under ``swanlog/`` (``swanlab sync`` uploads it later).

    ``SWANLAB_MODE`` (online, offline, local, disabled) overrides. Never asks for a key.
    """

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        import swanlab  # takes seconds, so only where it is wanted

        self._run = swanlab.init(
            mode=os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline"),
            log_dir=str(run_dir / "swanlog"),
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            config=to_dict(config),
            # The terminal stays ours: its capture would break the progress bar.
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._run.finish()


class ConsoleBackend:
    """A line a step under a header that returns now and then; on a terminal a progress bar below.

    Piped into a file the lines are the same and nothing else is written: no bar, no control codes.
    """

    COLUMNS: tuple[tuple[str, str, int, str], ...] = (  # header, metric, width, format
        ("score", "critic/score/mean", 7, ".3f"),
        ("F1", "reward/f1", 6, ".3f"),
        ("depth", "behavior/search_depth", 6, ".2f"),
        ("grad", "actor/grad_norm", 8, ".3g"),
        ("KL", "actor/kl_loss", 8, ".4f"),
        ("entropy", "actor/entropy", 8, ".3f"),
        ("tok/s", "perf/throughput", 8, ",.0f"),
        ("time", "timing_s/step", 9, ",.1f"),
    )
    PHASES: dict[str, str] = {
        "gen": "generate",
        "old_log_prob": "log-probs",
        "ref_log_prob": "reference",
        "update_actor": "update",
        "update_weights": "sync",
        "adv": "advantage",
        "testing": "validate",
    }
    HEADER_EVERY = 20

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        self._total = total_steps
        self._lines = 0
        self._console = Console(highlight=False, emoji=False, markup=False)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", style="dim"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left", style="dim"),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=total_steps or None, completed=resume_step)
            self._progress.start()

    def log(self, step: int, metrics: Metrics) -> None:
        if "timing_s/step" in metrics:
            if self._lines % self.HEADER_EVERY == 0:
                self._print(self.header(), style="dim")
            self._lines += 1
            self._print(self.line(step, metrics))
        if any(name.startswith("val/") for name in metrics):
            self._print(self.validation_line(step, metrics), style="green")
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def header(self) -> str:
        names = "".join(f"{title:>{width}}" for title, _, width, _ in self.COLUMNS)
        return f"{'step':>{self._step_width}}{names}  where the time went"

    def line(self, step: int, metrics: Metrics) -> str:
        """One step: a value a column ("-" where there is none), then the largest shares of its time."""
        cells = []
        for _, metric, width, form in self.COLUMNS:
            text = format(metrics[metric], form) if metric in metrics else "-"
            cells.append(f"{text + ' s' if metric == 'timing_s/step' else text:>{width}}")
        return f"{f'{step}/{self._total}':>{self._step_width}}{''.join(cells)}  {self._shares(metrics)}"

    def validation_line(self, step: int, metrics: Metrics) -> str:
        """F1, EM and depth over all questions, then F1 by source where there is more than one."""
        parts = [
            f"{title} {metrics[name]:{form}}"
            for title, name, form in (
                ("F1", "val/f1/mean", ".3f"),
                ("EM", "val/em/mean", ".3f"),
                ("depth", "val/search_depth/mean", ".2f"),
            )
            if name in metrics
        ]
        sources = {name.removeprefix("val/f1/"): value for name, value in metrics.items() if name.startswith("val/f1/")}
        sources.pop("mean", None)
        by_source = ", ".join(f"{name} {value:.3f}" for name, value in sources.items()) if len(sources) > 1 else ""
        if "timing_s/testing" in metrics:
            parts.append(f"{metrics['timing_s/testing']:.1f} s")
        text = f"{'validation':>{self._step_width}}  after step {step}: {'  '.join(parts)}"
        return f"{text}  (F1 by source: {by_source})" if by_source else text

    def say(self, text: str, warn: bool) -> None:
        self._print(text, style="yellow" if warn else "")

    def status(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=self.PHASES.get(text, text))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def _step_width(self) -> int:
        return max(len("validation"), 2 * len(str(self._total)) + 1)

    def _shares(self, metrics: Metrics) -> str:
        whole = metrics["timing_s/step"]
        phases = {name.removeprefix("timing_s/"): s for name, s in metrics.items() if name.startswith("timing_s/")}
        for name in ("step", "overhead", "testing"):  # the sum, a derived value, and what comes after the step
            phases.pop(name, None)
        if not phases or whole <= 0:
            return ""
        largest = sorted(phases.items(), key=lambda item: -item[1])[:4]
        shown = [(self.PHASES.get(name, name), s / whole) for name, s in largest if s / whole >= 0.02]
        rest = 1 - sum(share for _, share in shown)
        return ", ".join(f"{name} {share:.0%}" for name, share in shown + ([("other", rest)] if rest >= 0.02 else []))

    def _print(self, text: str, style: str = "") -> None:
        # A terminal's width cuts a line rather than wrapping it; a file gets the whole of it.
        cut = self._progress is not None
        self._console.print(
            Text(text, style=style), no_wrap=cut, overflow="ellipsis" if cut else None, soft_wrap=not cut
        )


BACKENDS: dict[str, Callable[[Config, Path, int, int], Backend]] = {
    "console": ConsoleBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorboardBackend,
    "swanlab": SwanlabBackend,
}


def _number(value: Any) -> float:
    return value if isinstance(value, int) else float(value)
