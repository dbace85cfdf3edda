"""Where a run's metrics, sample episodes and alerts go: console, metrics.jsonl, TensorBoard, SwanLab, webhooks.

A backend that fails never ends the run.
"""

import json
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from verl.trainer.config import Config, to_dict
from verl.utils.episode_text import episode_text, ranked
from verl.utils.jsonl import continue_jsonl
from verl.utils.notify import WebhookNotifier

log = logging.getLogger(__name__)
Metrics = Mapping[str, float]


SPEED_PERIOD_S = 24 * 3600.0  # of steps that the time left is judged by; each may take many minutes

# Section of SwanLab's and TensorBoard's charts -> beginnings of the metric names in it; of several the longest counts.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Score": ("critic/score", "critic/rewards", "reward/", "custom/"),
    "Validation": ("val/",),
    "Behaviour": ("behavior/", "episodes/"),
    "Search": ("search/", "browse/", "chain/"),
    "Learning": ("actor/", "critic/", "adv/", "filter_groups/", "curriculum/"),
    "Stability": ("stability/", "alerts/", "training/", "rollout_corr/", "actor/grad_norm", "actor/llds"),
    "Lengths": ("prompt_length", "response_length"),
    "Time": ("timing_s/", "perf/", "rollout/"),
    "Samples": ("samples/",),
}


class Backend:
    """One place where things go. By itself it does nothing: a backend says what it takes."""

    def log(self, step: int, metrics: Metrics) -> None:
        """One step's numbers by name."""

    def log_text(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts of one step by name."""

    def close(self, error: BaseException | None) -> None:
        """``error``: what the run ended with, if not well."""


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
        self._notifier = WebhookNotifier(config.trainer.experiment_name, os.environ)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``metrics``: one step's numbers by name; NumPy and torch scalars will do."""
        numbers = {name: _number(value) for name, value in metrics.items()}
        self._each(lambda backend: backend.log(step, numbers))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
        """The worst, the median and the best of a step's episodes (``rows`` of ``batch.episode_rows``) as texts
        ``samples/{kind}/{worst,median,best}``; ``kind``: train or val. Episodes without a score are left out."""
        texts = {f"samples/{kind}/{rank}": episode_text(row) for rank, row in ranked(rows).items()}
        if texts:
            self._each(lambda backend: backend.log_text(step, texts))

    def alert(self, step: int, messages: Mapping[str, str]) -> None:
        """What left its range at this step: a message by metric. People see them, and webhooks send what is new."""
        if not messages:
            return
        for message in messages.values():
            self.say(message, warn=True)
        self._each(lambda backend: backend.log_text(step, {"alerts/messages": "\n".join(messages.values())}))
        self._notifier.alert(step, messages)

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

    def close(self, error: BaseException | None = None) -> None:
        self._each(lambda backend: backend.close(error))
        self._backends.clear()
        self._notifier.close()

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _each(self, action: Callable[[Backend], None]) -> None:
        for name, backend in list(self._backends.items()):
            self._guard(name, lambda backend=backend: action(backend))

    def _guard(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # whatever a tracker does, the training goes on
            self._backends.pop(name, None)
            reason = str(error).strip().splitlines()
            log.warning(f"tracking: {name} is off from here on ({type(error).__name__}: {reason[0] if reason else ''})")
            return None


class JsonlBackend(Backend):
    """``metrics.jsonl``: one object a step. Numbers come back to the last bit; NaN and infinities are null."""

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        path = run_dir / "metrics.jsonl"
        continue_jsonl(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self, error: BaseException | None) -> None:
        self._file.close()


class TensorboardBackend(Backend):
    """Event files under ``tensorboard/``. Steps that a resumed run repeats are purged.

    Scalars keep their names; the sections are in the tab "Custom scalars".
    """

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is wanted

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)
        self._known: dict[str, None] = {}  # in the order of their coming

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if not metrics.keys() <= self._known.keys():  # the newest layout counts
            self._known |= dict.fromkeys(metrics)
            self._writer.add_custom_scalars(chart_layout(self._known))
        self._writer.flush()

    def log_text(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, textwrap.indent(text, " " * 4), step)  # Markdown's way to leave it as it is

    def close(self, error: BaseException | None) -> None:
        self._writer.close()


class SwanlabBackend(Backend):
    """SwanLab: online with ``SWANLAB_API_KEY``, else offline under ``swanlog/`` (``swanlab sync`` uploads it later).

    ``SWANLAB_MODE`` (online, offline, local, disabled) overrides; local, for ``swanlab watch``, needs swanboard. Never
    asks for a key.
    """

    def __init__(self, config: Config, run_dir: Path, total_steps: int, resume_step: int) -> None:
        import swanlab  # takes seconds, so only where it is wanted

        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        if mode == "local" and not find_spec("swanboard"):  # SwanLab would go on, and show nothing in the end
            raise ValueError("SWANLAB_MODE=local needs swanboard, which is not installed; see doc/tracking.md")

        self._text = swanlab.Text
        self._run = swanlab.init(
            mode=mode,
            log_dir=str(run_dir / "swanlog"),
            project=config.trainer.project_name,
            name=config.trainer.experiment_name,
            config=to_dict(config),
            # The terminal stays ours: its capture would break the progress bar.
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        for section, beginnings in SECTIONS.items():
            for beginning in beginnings:
                self._run.define_metric(f"{beginning}*", section_name=section)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_text(self, step: int, texts: Mapping[str, str]) -> None:
        self._run.log({name: self._text(text) for name, text in texts.items()}, step=step)

    def close(self, error: BaseException | None) -> None:
        if error is None:
            self._run.finish()
        else:
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "crashed"
            self._run.finish(state, error=f"{type(error).__name__}: {error}")


class TimeLeftColumn(TimeRemainingColumn):
    """The time left, and nothing while it isn't known."""

    def render(self, task: Task) -> Text:
        return Text() if task.time_remaining is None else Text("left ", style="dim") + super().render(task)


class ConsoleBackend(Backend):
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
                TimeLeftColumn(),
                console=self._console,
                refresh_per_second=2,
                transient=True,
                speed_estimate_period=SPEED_PERIOD_S,
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
            self._print(self.validation_line(step, metrics), style="green", wrap=True)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def header(self) -> str:
        names = "".join(f"{title:>{width}}" for title, _, width, _ in self.COLUMNS)
        return f"{'step':>{self._step_width}}{names}  where the time went"

    def line(self, step: int, metrics: Metrics) -> str:
        """One step: a value a column ("-" where there is none), then the largest shares of its time."""
        cells = []
        for _, metric, width, form in self.COLUMNS:
            unit = " s" if metric == "timing_s/step" else ""
            text = _fitting(metrics[metric], form, width - 1 - len(unit)) if metric in metrics else "-"
            cells.append(f" {text + unit:>{width - 1}}")  # the space keeps columns apart whatever is in them
        return f"{f'{step}/{self._total}':>{self._step_width}}{''.join(cells)}  {self._shares(metrics)}"

    def validation_line(self, step: int, metrics: Metrics) -> str:
        """F1, EM and depth over all questions, then F1 by source where there is more than one, without what all
        sources' names begin with."""
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
        shared = _shared_words(sources)
        by_source = ", ".join(f"{name[shared:]} {value:.3f}" for name, value in sources.items() if len(sources) > 1)
        if "timing_s/testing" in metrics:
            parts.append(f"{metrics['timing_s/testing']:.1f} s")
        text = f"{'validation':>{self._step_width}}  after step {step}: {'  '.join(parts)}"
        return f"{text}  (F1 by source: {by_source})" if by_source else text

    def say(self, text: str, warn: bool) -> None:
        self._print(text, style="yellow" if warn else "", wrap=True)

    def status(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=self.PHASES.get(text, text))

    def close(self, error: BaseException | None) -> None:
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

    def _print(self, text: str, style: str = "", wrap: bool = False) -> None:
        """A terminal cuts a line of the table and wraps other text (``wrap``); a file gets it as it is."""
        if self._progress is None:
            self._console.print(Text(text, style=style), soft_wrap=True)
        elif wrap:
            self._console.print(Text(text, style=style), overflow="fold")
        else:
            self._console.print(Text(text, style=style), no_wrap=True, overflow="ellipsis")


BACKENDS: dict[str, Callable[[Config, Path, int, int], Backend]] = {
    "console": ConsoleBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorboardBackend,
    "swanlab": SwanlabBackend,
}


def section_of(name: str) -> str:
    """Where a metric's chart stands; "Other" for a name that nobody foresaw."""
    fitting = [
        (len(start), section) for section, starts in SECTIONS.items() for start in starts if name.startswith(start)
    ]
    return max(fitting)[1] if fitting else "Other"


def chart_layout(names: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's layout: a category a section, a chart a metric; what is one quantity, such as mean, max and min
    of a score or F1 by source, shares a chart."""
    charts: dict[str, dict[str, list[str]]] = {section: {} for section in (*SECTIONS, "Other")}
    for name in names:
        quantity, _, _ = name.rpartition("/")
        title = quantity if "/" in quantity or quantity.endswith("_length") else name
        charts[section_of(name)].setdefault(title, []).append(f"^{re.escape(name)}$")
    return {
        section: {title: ["Multiline", tags] for title, tags in found.items()}
        for section, found in charts.items()
        if found
    }


def _shared_words(names: Iterable[str]) -> int:
    """Length of the beginning, of whole words, that all names share: 5 of demo_yes_no and demo_two_hop."""
    shared = os.path.commonprefix(list(names))
    return max(map(shared.rfind, "_-/ .")) + 1


def _fitting(value: float, form: str, width: int) -> str:
    """``value`` in ``form``, or in a shorter one where that is wider than ``width``."""
    texts = [format(value, each) for each in (form, ".1e", ".0e")]
    return next((text for text in texts if len(text) <= width), texts[-1])


def _number(value: Any) -> float:
    return value if isinstance(value, int) else float(value)
