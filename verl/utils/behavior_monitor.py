"""What the policy does, beside what it scores: figures from episodes, and alerts when they leave their range.

Pure Python: neither torch nor ray. Each figure is a small function of one episode (None where it is undefined there);
the batch's figure is the mean over the episodes for which it is defined. Failed episodes (``finish == "error"``) tell
of the machinery, not of the policy, and count in ``behavior/error_share`` alone.
"""

import json
import math
import re
import statistics
import string
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.jsonl import continue_jsonl

if TYPE_CHECKING:
    from scrl.types import Episode, Turn
    from verl.trainer.config.schema import MonitorConfig

NGRAM = 4  # words; shorter ones repeat in any English text
SAME_REWARD = 1e-6  # as in core_algos: rewards this close together give no advantage
MAX_SHOWN = 50  # episodes named in one alert
TEXT_SAMPLE = 512  # episodes a step whose observations are read: a share is then known to .02, whatever the batch

# Key of ``monitor.*`` -> the metric that it bounds, from below (min_) or above (max_).
THRESHOLDS: dict[str, str] = {
    "min_diversity": "behavior/query_diversity",
    "min_depth": "behavior/search_depth",
    "min_info_gain": "behavior/info_gain",
    "min_reward_deviation": "behavior/reward_deviation",
    "max_zero_variance_share": "behavior/zero_variance_share",
    "max_malformed_share": "behavior/malformed_share",
    "max_void_turn_share": "behavior/void_turn_share",
    "max_answer_avoidance_share": "behavior/answer_avoidance_share",
    "max_repeated_ngrams": "behavior/repeated_ngrams",
    "max_llds": "actor/llds",
    "max_rollout_gap": "training/rollout_probs_diff_mean",
}

# Han, kana and Hangul have no spaces between words: a character is a token there. Elsewhere a run of letters, digits.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}_])\w)+")
_KEPT = (string.ascii_lowercase + string.digits).encode()
_ASCII_WORDS = bytes(byte if byte in _KEPT else ord(" ") for byte in range(256))


def tokens(text: str) -> list[str]:
    """Words of ``text``, lower-cased and NFKC-normalised; in Chinese, Japanese and Korean, characters."""
    if text.isascii():  # the same, many times as fast; most observations are
        return text.lower().encode().translate(_ASCII_WORDS).decode().split()
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


# ----------------------------------------------------------------------------------------------- figures of an episode
def query_diversity(queries: Sequence[str]) -> float | None:
    """Mean over all pairs of queries of ``1 - |a & b| / |a | b|`` (Jaccard of their token sets), in [0, 1].

    None below two queries: one query is neither diverse nor the opposite. Two queries without any token are alike.
    """
    if len(queries) < 2:
        return None
    alike, counts = 0.0, Counter(frozenset(tokens(query)) for query in queries)
    for count in counts.values():
        alike += count * (count - 1) / 2
    for (a, times), (b, others) in combinations(counts.items(), 2):
        if not a.isdisjoint(b):  # most pairs are
            alike += times * others * len(a & b) / len(a | b)
    return 1 - alike / (len(queries) * (len(queries) - 1) / 2)


def observation_gains(question: str, observations: Iterable[str]) -> list[float]:
    """For each observation, the share of its distinct tokens that neither the question nor an earlier one held.

    0 where an observation has no token: it told nothing.
    """
    seen, gains = set(tokens(question)), []
    for text in observations:
        found = set(tokens(text))
        gains.append(len(found - seen) / len(found) if found else 0.0)
        seen |= found
    return gains


def observation_text(turn: "Turn") -> str:
    """Titles and texts that a tool turn brought back, without queries and JSON keys; "" where the tool failed."""
    if not turn.search_ok:
        return ""
    try:
        blocks = json.loads(turn.observation)
        return "\n".join(f"{hit.get('title', '')} {hit['text']}" for block in blocks for hit in block["results"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return turn.observation  # not in the form of our own tools: take it as it stands


def answer_avoided(episode: "Episode") -> float:
    """1 when it ended without an answer, or with a blank one, though its format was right: turns or room ran out."""
    if episode.finish == "answer":
        return float(not (episode.answer or "").strip())
    return float(episode.finish in ("max_turns", "length"))


def repeated_ngrams(episode: "Episode") -> float | None:
    """Share of the policy's own 4-grams of words that it had said before in the episode; None below one 4-gram.

    Its own words are thoughts, queries and answers: the JSON around a tool call is the same in every turn.
    """
    grams = [gram for turn in episode.turns for said in _own_words(turn) for gram in _ngrams(tokens(said))]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _own_words(turn: "Turn") -> list[str]:
    return [turn.text] if turn.kind == "malformed" else [turn.think, *turn.queries, turn.answer or ""]


def _ngrams(words: list[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(NGRAM)), strict=False)


def action_figures(episode: "Episode") -> dict[str, float | None]:
    """What a glance at the actions tells, by name; None where it is undefined."""
    return {
        "search_depth": float(episode.search_depth),
        "query_diversity": query_diversity([query for turn in episode.turns for query in turn.queries]),
        "malformed_share": float(episode.finish == "malformed"),
        "answer_avoidance_share": answer_avoided(episode),
    }


def text_figures(episode: "Episode") -> dict[str, float | None]:
    """What takes reading every text of an episode.

    ``info_gain``: mean of ``observation_gains`` over the tool turns (None without one). ``void_turn_share``: share of
    turns after which the policy knew no more than before and had not answered either, that is malformed turns, and
    tool turns that failed or brought no new token; after the void turns of SimpleTIR (Xue et al. 2025,
    arXiv:2509.02479), which come before a collapse.
    """
    turns = episode.turns
    gains = observation_gains(episode.question, [observation_text(turn) for turn in turns if turn.kind == "tool_call"])
    void = sum(gain == 0 for gain in gains) + sum(turn.kind == "malformed" for turn in turns)
    return {
        "info_gain": statistics.fmean(gains) if gains else None,
        "void_turn_share": void / len(turns) if turns else None,
        "repeated_ngrams": repeated_ngrams(episode),
    }


def figures(episode: "Episode") -> dict[str, float | None]:
    """Every figure of one episode by name."""
    return action_figures(episode) | text_figures(episode)


# -------------------------------------------------------------------------------------------------- figures of groups
def group_deviations(uids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
    """Standard deviation (ddof 1) of each group's rewards, exactly 0 where they lie within 1e-6. No groups of one."""
    groups: dict[str, list[float]] = defaultdict(list)
    for uid, reward in zip(uids, rewards, strict=True):
        groups[uid].append(float(reward))
    return {
        uid: statistics.stdev(group) if max(group) - min(group) > SAME_REWARD else 0.0
        for uid, group in groups.items()
        if len(group) > 1
    }


def reward_spread(deviations: Mapping[str, float]) -> dict[str, float]:
    """``reward_deviation``: the mean over the groups; ``zero_variance_share``: share of groups that teach nothing.

    {} without a group. The deviation falling towards 0 is the earliest sign of the echo trap of RAGEN (Wang et al.
    2025, arXiv:2504.20073).
    """
    if not deviations:
        return {}
    return {
        "reward_deviation": statistics.fmean(deviations.values()),
        "zero_variance_share": statistics.fmean(value == 0 for value in deviations.values()),
    }


# ------------------------------------------------------------------------------------------------------------- monitor
Column = list[tuple["Episode", float]]  # a figure of the episodes for which it is defined


@dataclass(frozen=True)
class Alert:
    """One figure out of its range at one step. ``episodes``: up to 50 that show it, the worst first, as
    ``{"uid", "sample_index", "value"}``; ``n_episodes``: how many there are. Likelihood displacement is measured over
    tokens of the whole batch, so an alert on it names none."""

    step: int
    metric: str
    value: float | None  # None: not a finite number
    threshold: float
    message: str
    n_episodes: int
    episodes: list[dict[str, str | int | float]]


class BehaviorMonitor:
    """Figures of each step's episodes; an alert where one leaves its range.

    Alerts go to ``alerts`` (those of the last step), into the step's metrics and, one JSON object a line, to
    ``alerts_path``. What the monitor says of a step depends on that step alone, so there is no state to save.
    """

    def __init__(self, config: "MonitorConfig", alerts_path: str | Path | None = None) -> None:
        """``alerts_path`` None: no file. ``config.enable`` False: figures without alerts."""
        bounds = {key: getattr(config, key) for key in THRESHOLDS} if config.enable else {}
        self._bounds = {key: bound for key, bound in bounds.items() if bound is not None}
        self._path = Path(alerts_path) if alerts_path is not None else None
        self.alerts: list[Alert] = []

    @property
    def complaint(self) -> str:
        """The last step's alerts in one line, "" without any. What follows from it is the trainer's to decide."""
        return "; ".join(alert.message for alert in self.alerts)

    def resume(self, step: int) -> None:
        """Forget the alerts of steps after ``step``: they are run again. A new run (0) puts an old file aside."""
        if self._path is not None:
            continue_jsonl(self._path, step)

    def observe(
        self,
        step: int,
        episodes: Sequence["Episode"],
        rewards: Sequence[float],
        measured: Mapping[str, float] | None = None,
        rollout_gaps: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Figures of ``step`` under ``behavior/*``; one that is defined for no episode is left out.

        Figures that need every text read are means over 512 episodes, evenly spaced, where there are more.
        ``behavior/query_diversity_defined`` is the share of episodes that have a diversity at all. ``alerts/{figure}``
        is 1 where there is an alert, 0 where there is a threshold and none; ``alerts/total`` how many.

        Args:
            rewards: each episode's return, in the same order.
            measured: metrics of the step from elsewhere, for the thresholds on them.
            rollout_gaps: each episode's mean |p_engine - p_trainer|.

        Raises: ValueError where the sequences differ in length.
        """
        for name, values in (("rewards", rewards), ("rollout gaps", rollout_gaps)):
            if values is not None and len(values) != len(episodes):
                raise ValueError(f"{len(values)} {name} for {len(episodes)} episodes; give one an episode")
        self.alerts = []
        if not episodes:
            return {}
        sound = [place for place, episode in enumerate(episodes) if episode.finish != "error"]
        metrics = {"behavior/error_share": 1 - len(sound) / len(episodes)}
        columns: dict[str, Column] = {}
        if sound:
            alive = [episodes[place] for place in sound]
            columns = _columns(alive)
            metrics |= {name: statistics.fmean(v for _, v in column) for name, column in columns.items() if column}
            metrics["behavior/query_diversity_defined"] = len(columns["behavior/query_diversity"]) / len(alive)
            deviations = group_deviations([e.uid for e in alive], [float(rewards[place]) for place in sound])
            metrics |= {f"behavior/{name}": value for name, value in reward_spread(deviations).items()}
            spread = [(episode, deviations[episode.uid]) for episode in alive if episode.uid in deviations]
            columns["behavior/reward_deviation"] = spread
            columns["behavior/zero_variance_share"] = [(episode, float(value == 0)) for episode, value in spread]
            if rollout_gaps is not None:
                columns[THRESHOLDS["max_rollout_gap"]] = [
                    (episodes[place], float(rollout_gaps[place])) for place in sound
                ]
        return metrics | self._raise_alerts(step, {**(measured or {}), **metrics}, columns)

    def _raise_alerts(self, step: int, metrics: Mapping[str, float], columns: Mapping[str, Column]) -> dict[str, float]:
        flags = {}
        for key, bound in self._bounds.items():
            name = THRESHOLDS[key]
            if name not in metrics:
                continue
            value, low = float(metrics[name]), key.startswith("min_")
            figure = name.rpartition("/")[2]
            out = not (value >= bound if low else value <= bound)  # NaN is out of any range
            flags[f"alerts/{figure}"] = float(out)
            if out:
                self.alerts.append(_alert(step, name, value, bound, low, columns.get(name, [])))
        if self._path is not None and self.alerts:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(alert), ensure_ascii=False) + "\n" for alert in self.alerts)
        return flags | {"alerts/total": float(len(self.alerts))} if self._bounds else {}


def _columns(episodes: Sequence["Episode"]) -> dict[str, Column]:
    """Every figure by its metric's name, over the episodes for which it is defined (of texts: over the sample)."""
    size = len(episodes)
    read = range(size) if size <= TEXT_SAMPLE else [i * size // TEXT_SAMPLE for i in range(TEXT_SAMPLE)]
    columns: dict[str, Column] = defaultdict(list)
    for measure, chosen in ((action_figures, range(size)), (text_figures, read)):
        for place in chosen:
            for name, value in measure(episodes[place]).items():
                column = columns[f"behavior/{name}"]
                if value is not None:
                    column.append((episodes[place], value))
    return columns


def _alert(step: int, metric: str, value: float, bound: float, low: bool, column: Column) -> Alert:
    showing = [(v, e.uid, e.sample_index) for e, v in column if (v < bound if low else v > bound)]
    showing.sort(key=lambda row: (row[0] if low else -row[0], *row[1:]))
    number = f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.1e}"
    message = f"step {step}: {metric.rpartition('/')[2]} is {number}, {'below' if low else 'above'} {bound:g}"
    if column:
        message += f" ({len(showing)} of {len(column)} episodes)"
    shown = [{"uid": uid, "sample_index": index, "value": v} for v, uid, index in showing[:MAX_SHOWN]]
    return Alert(step, metric, value if math.isfinite(value) else None, bound, message, len(showing), shown)
