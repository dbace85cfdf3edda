"""One HTML file of runs: curves, alerts and episodes, all inside, opened without a network.

What runs and models wrote travels as gzip in base64, which holds no character that HTML knows, and the page puts it
on the screen as text only. Besides, its policy allows no script but its own two, by their hashes.
"""

import base64
import dataclasses
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl.utils.report.index import EpisodeIndex, alert_records
from verl.utils.report.metrics import Run, phase_seconds
from verl.utils.report.rollouts import (
    EpisodeRecord,
    RolloutFile,
    TurnRecord,
    hits,
    read_rollout,
    render_hits,
)
from verl.utils.report.source import RunFolder

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data", "ui", "charts", "table", "episode", "tokens", "compare", "main")
MB = 1_000_000
PROBES = 8  # files that are packed to see how large all will be

Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True)
class Panel:
    """A chart of one metric. ``log``: a logarithmic axis where the values span more than a factor of ten."""

    title: str
    metric: str
    validation: str = ""
    log: bool = False
    about: str = ""


PANELS = (
    Panel("Score", "critic/score/mean", "val/score/mean", about="mean return of an episode, all rewards together"),
    Panel("F1", "reward/f1", "val/f1/mean", about="token overlap of answer and gold"),
    Panel("Searches an episode", "behavior/search_depth", "val/search_depth/mean", about="tool turns"),
    Panel("Query diversity", "behavior/query_diversity", about="how little an episode's queries overlap, 0 to 1"),
    Panel("Information gain", "behavior/info_gain", about="share of new words in what a search brings"),
    Panel("Answered", "episodes/finish/answer", "val/answered/mean", about="share of episodes that end in an answer"),
    Panel("Reward spread in groups", "behavior/reward_deviation", about="0 teaches nothing"),
    Panel("Gradient norm", "actor/grad_norm", log=True, about="before clipping"),
    Panel("KL to the reference", "actor/kl_loss", about="how far the policy has moved"),
    Panel("Entropy", "actor/entropy", about="of the next token, in nats"),
    Panel("Response length", "response_length/mean", about="tokens, observations included"),
    Panel(
        "Engine gap", "training/rollout_probs_diff_mean", log=True, about="token probability, engine against trainer"
    ),
)


CUSTOM_AFTER = 2  # the score and F1 come first, then what the user's own reward function gave


@dataclass(frozen=True)
class Trim:
    """What of the episodes is kept; None is all. ``token_files``: rollout files with token views, ``chars``: of each
    result's text, ``episodes``: of a file, ``files``: rollout files."""

    token_files: int | None = None
    chars: int | None = None
    episodes: int | None = None
    files: int | None = None


@dataclass(frozen=True)
class Report:
    """``html``: the page; ``notes``: what it leaves out for its size; ``problems``: what of the files was no use."""

    html: str
    notes: list[str]
    problems: list[str]


LEVELS = (
    Trim(),
    Trim(40),
    Trim(12),
    Trim(6, 2000),
    Trim(4, 800),
    Trim(4, 400),
    Trim(3, 240, 48),
    Trim(3, 240, 24),
    Trim(2, 160, 12),
    Trim(1, 120, 6, 400),
    Trim(0, 80, 3, 300),
    Trim(0, 60, 2, 100),
    Trim(0, 40, 1, 20),
)


def build(runs: Sequence[RunFolder], max_bytes: int = 10 * MB, progress: Progress = lambda *_: None) -> Report:
    """The page of one or more runs as HTML of at most ``max_bytes``.

    When everything doesn't fit, the next harder of ``LEVELS`` is taken, and the page says what it leaves out.

    Raises:
        ValueError: ``max_bytes`` is too small for even the least of it.
    """
    shell = _shell()
    files = [(number, file) for number, run in enumerate(runs) for file in run.rollouts]
    room = max_bytes - len(shell.encode())
    level = _first_level(files, room)
    for trim in LEVELS[level:]:
        payload, notes, problems = _payload(runs, files, trim, progress)
        if len(payload) <= room:
            return Report(shell.replace("<!--payload-->", payload), notes, problems)
    smallest = (len(shell) + len(payload)) / MB
    raise ValueError(
        f"a report of {max_bytes / MB:g} MB can't hold these runs, the least of them takes {smallest:.1f} MB; allow "
        "more with --max-mb, or name fewer runs"
    )


# ---------------------------------------------------------------------------------------------------------- the payload
def _payload(
    runs: Sequence[RunFolder], files: Sequence[tuple[int, RolloutFile]], trim: Trim, progress: Progress
) -> tuple[str, list[str], list[str]]:
    """Data blocks of the page (one of all but the episodes' turns, and one of these a rollout file), and its notes and
    problems."""
    index, blocks = EpisodeIndex(), []
    problems = [problem for run in runs for problem in run.problems]
    kept = [files[place] for place in evenly(len(files), trim.files)]
    with_tokens = set(evenly(len(kept), trim.token_files))
    seen = tokens_seen = 0
    for place, (run, file) in enumerate(kept):
        progress("packing episodes", place, len(kept))
        episodes, found = read_rollout(file)
        problems += [f"{runs[run].name}: {problem}" for problem in found]
        chosen = choose(episodes, trim.episodes, file.split)
        seen += len(episodes)
        tokens_seen += place not in with_tokens and any(turn.tokens for e in chosen for turn in e.turns)
        if chosen:
            index.add(run, len(blocks), chosen)
            blocks.append(_chunk(chosen, trim, place in with_tokens))
    progress("packing episodes", len(kept), len(kept))
    notes = []
    if len(kept) < len(files):
        notes.append(f"{len(kept)} of {len(files)} rollout files are in it")
    if len(index) < seen:
        notes.append(f"{len(index):,} of their {seen:,} episodes")
    if trim.chars is not None and blocks:
        notes.append(f"results are cut at {trim.chars} characters")
    if tokens_seen:
        notes.append(f"token views are left out for {tokens_seen} of {len(kept)} rollout files")
    overview = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [_run_record(run) for run in runs],
        "panels": [dataclasses.asdict(panel) for panel in panels([run.metrics for run in runs])],
        "alerts": alert_records(runs, index),
        "configDiff": config_differences(runs),
        "problems": problems,
        "notes": notes,
        **index.record(),
    }
    texts = [pack(overview), *blocks]
    tags = (f'<script type="text/plain" id="block-{n}">{text}</script>' for n, text in enumerate(texts))
    return "\n".join(tags), notes, problems


def panels(runs: Sequence[Run]) -> list[Panel]:
    """``PANELS``, and one for each component of a reward function of the user's own (``reward_model.custom``), or for
    its value where it names none."""
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics))
    named = [name for name in logged if name.startswith("reward/custom/")]
    about = "your reward function, mean over the episodes"
    own = [Panel(name.removeprefix("reward/"), name, about=about) for name in named]
    if not own and "reward/custom_failed" in logged:
        own = [Panel("custom", "reward/outcome", about=about)]
    return [*PANELS[:CUSTOM_AFTER], *own, *PANELS[CUSTOM_AFTER:]]


def _first_level(files: Sequence[tuple[int, RolloutFile]], room: int) -> int:
    """The first level that should fit, judged by a few files. What the table takes is in the margin."""
    probes = [read_rollout(files[place][1])[0] for place in evenly(len(files), PROBES)]
    for level, trim in enumerate(LEVELS[:-1]):
        count = min(len(files), trim.files or len(files))
        token_files = count if trim.token_files is None else min(count, trim.token_files)
        chosen = [choose(episodes, trim.episodes, "train") for episodes in probes]
        plain = [len(_chunk(episodes, trim, False)) for episodes in chosen]
        full = [len(_chunk(episodes, trim, True)) for episodes in chosen] if token_files else plain
        mean, mean_full = np.mean(plain or [0]), np.mean(full or [0])
        if count * mean + token_files * (mean_full - mean) <= 0.92 * room:
            return level
    return len(LEVELS) - 1


def evenly(size: int, most: int | None) -> list[int]:
    """At most ``most`` places of ``size``, evenly spread, the first and the last among them."""
    if most is None or most >= size:
        return list(range(size))
    return sorted({round(place) for place in np.linspace(0, size - 1, most)}) if most else []


def choose(episodes: Sequence[EpisodeRecord], most: int | None, split: str) -> Sequence[EpisodeRecord]:
    """At most ``most`` of a file's episodes: whole groups from the first on; of validation, which is ordered by source
    and asks the same questions each time, evenly spread ones."""
    if most is None or len(episodes) <= most:
        return episodes
    return episodes[:most] if split == "train" else [episodes[place] for place in evenly(len(episodes), most)]


def _chunk(episodes: Sequence[EpisodeRecord], trim: Trim, tokens: bool) -> str:
    return pack([_episode_record(episode, trim, tokens) for episode in episodes])


def _episode_record(episode: EpisodeRecord, trim: Trim, tokens: bool) -> dict[str, Any]:
    """What the table doesn't hold of an episode; empty fields are left out."""
    return {
        "error": episode.error,
        "filtered": episode.filtered,
        "reward": {name: rounded(value) for name, value in episode.reward.items()},
        "turns": [_turn_record(turn, trim, tokens) for turn in episode.turns],
    }


def _turn_record(turn: TurnRecord, trim: Trim, tokens: bool) -> dict[str, Any]:
    row = {name: value for name, value in vars(turn).items() if value not in (None, "", [], {})}
    if not tokens:
        row.pop("tokens", None)
    for name in ("reward", "advantage"):
        if name in row:
            row[name] = rounded(row[name])
    if turn.observation:
        row["observation"] = cut_observation(turn.observation, trim.chars)
    return row


def cut_observation(observation: str, chars: int | None) -> str:
    """With each result's text, or one that isn't in our tools' form as a whole, cut at ``chars``."""
    if chars is None or len(observation) <= chars:
        return observation
    results = hits(observation)
    if results is None:
        return _cut(observation, 4 * chars)
    return render_hits([(q, [hit._replace(text=_cut(hit.text, chars)) for hit in found]) for q, found in results])


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[:chars].rstrip() + " […]"


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def pack(value: Any) -> str:
    """JSON, gzip, base64. A lone surrogate becomes a question mark, for UTF-8 has no place for it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _run_record(run: RunFolder) -> dict[str, Any]:
    columns = {}
    for name in run.metrics.metrics:
        steps, values = run.metrics.series(name)
        if len(steps):
            by_step = dict(zip(steps.tolist(), values.tolist(), strict=True))
            columns[name] = [rounded(by_step[step]) if step in by_step else None for step in run.metrics.steps]
    return {
        "name": run.name,
        "steps": run.metrics.steps,
        "columns": columns,
        "phases": _phases(run.metrics),
        "config": run.config,
    }


def _phases(run: Run) -> dict[str, Any]:
    steps, layers = phase_seconds(run)
    rows = {name: [rounded(value) for value in values.tolist()] for name, values in layers.items()}
    return {"steps": steps.astype(int).tolist(), "seconds": rows}


def config_differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Keys whose values are not the same in all runs that have a configuration, with each run's."""
    flat = [dict(_flatten(run.config)) for run in runs]
    known = [one for one in flat if one]
    keys = dict.fromkeys(key for one in known for key in one if len({other.get(key) for other in known}) > 1)
    return [(key, [one.get(key, "–") for one in flat]) for key in keys]


def _flatten(config: str) -> Iterator[tuple[str, str]]:
    def walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}" if path else str(key))
        else:
            yield path, str(value)

    try:
        loaded = yaml.safe_load(config)
    except (yaml.YAMLError, RecursionError):
        return
    if isinstance(loaded, dict):
        yield from walk(loaded, "")


# ------------------------------------------------------------------------------------------------------------- the page
def _shell() -> str:
    """The page without data."""
    charts = (PAGE / "vendor" / "echarts.common.min.js").read_text(encoding="utf-8")
    app = "\n".join((PAGE / "app" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    app = f'"use strict";\n(() => {{\n{app}\n}})();'
    parts = {
        "style": (PAGE / "style.css").read_text(encoding="utf-8"),
        "charts": charts,
        "app": app,
        "script-hashes": f"{_hash(charts)} {_hash(app)}",
    }
    assert not any("</script" in part or "</style" in part for part in parts.values())
    template = (PAGE / "template.html").read_text(encoding="utf-8")
    return re.sub(r"<!--(style|charts|app)-->|\{(script-hashes)\}", lambda m: parts[m[1] or m[2]], template)


def _hash(script: str) -> str:
    """As a content security policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
