"""What the policy does, beside what it scores: figures from episodes, and alerts when they leave their range.

Pure Python: neither torch nor ray. Each figure is a small function of one episode (None where it is undefined there);
the batch's figure is the mean over the episodes for which it is defined. Failed episodes (``finish == "error"``) tell
of the machinery, not of the policy, and count in ``behavior/error_share`` alone.
"""

import json
import logging
import re
import statistics
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrl.types import Episode, Turn
    from verl.trainer.config.schema import MonitorConfig

logger = logging.getLogger(__name__)

NGRAM = 4  # words; shorter ones repeat in any English text
SAME_REWARD = 1e-6  # as in core_algos: rewards this close together give no advantage
MAX_SHOWN = 50  # episodes named in one alert

# Han, kana and Hangul have no spaces between words: a character is a token there. Elsewhere a run of letters, digits.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}_])\w)+")
_ASCII_TOKEN = re.compile(r"[a-z0-9]+")


def tokens(text: str) -> list[str]:
    """Words of ``text``, lower-cased and NFKC-normalised; in Chinese, Japanese and Korean, characters."""
    if text.isascii():  # the same, ten times as fast; most observations are
        return _ASCII_TOKEN.findall(text.lower())
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


# ----------------------------------------------------------------------------------------------- figures of an episode
def query_diversity(queries: Sequence[str]) -> float | None:
    """Mean over all pairs of queries of ``1 - |a & b| / |a | b|`` (Jaccard of their token sets), in [0, 1].

    None below two queries: one query is neither diverse nor the opposite. Two queries without any token are alike.
    """
    sets = [frozenset(tokens(query)) for query in queries]
    pairs = list(combinations(sets, 2))
    if not pairs:
        return None
    return statistics.fmean(1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in pairs)


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


def figures(episode: "Episode") -> dict[str, float | None]:
    """Every figure of one episode by name; None where it is undefined.

    ``info_gain``: mean of ``observation_gains`` over the tool turns (None without one). ``void_turn_share``: share of
    turns after which the policy knew no more than before and had not answered either, that is malformed turns, and
    tool turns that failed or brought no new token; after the void turns of SimpleTIR (Xue et al. 2025,
    arXiv:2509.02479), which come before a collapse.
    """
    turns = episode.turns
    gains = observation_gains(episode.question, [observation_text(turn) for turn in turns if turn.kind == "tool_call"])
    void = sum(gain == 0 for gain in gains) + sum(turn.kind == "malformed" for turn in turns)
    return {
        "search_depth": float(episode.search_depth),
        "query_diversity": query_diversity([query for turn in turns for query in turn.queries]),
        "info_gain": statistics.fmean(gains) if gains else None,
        "malformed_share": float(episode.finish == "malformed"),
        "void_turn_share": void / len(turns) if turns else None,
        "answer_avoidance_share": answer_avoided(episode),
        "repeated_ngrams": repeated_ngrams(episode),
    }


# -------------------------------------------------------------------------------------------------- figures of groups
def reward_spread(uids: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
    """``reward_deviation``: mean over the groups of their standard deviation (ddof 1); ``zero_variance_share``: share
    of groups whose rewards lie within 1e-6, which teach nothing. Groups of one are left out; {} when there are no
    others. The deviation falling towards 0 is the earliest sign of the echo trap of RAGEN (Wang et al. 2025,
    arXiv:2504.20073)."""
    groups: dict[str, list[float]] = defaultdict(list)
    for uid, reward in zip(uids, rewards, strict=True):
        groups[uid].append(float(reward))
    compared = [group for group in groups.values() if len(group) > 1]
    if not compared:
        return {}
    return {
        "reward_deviation": statistics.fmean(statistics.stdev(group) for group in compared),
        "zero_variance_share": statistics.fmean(max(group) - min(group) <= SAME_REWARD for group in compared),
    }


# ------------------------------------------------------------------------------------------------------------- monitor
@dataclass(frozen=True)
class Alert:
    """One figure out of its range at one step. ``episodes``: up to 50 that show it, the worst first, as
    ``{"uid", "sample_index", "value"}``; ``n_episodes``: how many there are."""

    step: int
    metric: str
    value: float
    threshold: float
    message: str
    n_episodes: int
    episodes: list[dict[str, str | int | float]]


class BehaviorMonitor:
    """Figures of each step's episodes; an alert where one falls below its threshold.

    Alerts go to the log (as a warning), to ``alerts`` (those of the last step) and, one JSON object a line, to
    ``alerts_path``. What the monitor says of a step depends on that step alone, so there is no state to save.
    """

    def __init__(self, config: "MonitorConfig", alerts_path: str | Path | None = None) -> None:
        """``alerts_path`` None: no file. ``config.enable`` False: figures without alerts."""
        self._thresholds = {"query_diversity": config.min_diversity, "search_depth": config.min_depth}
        self._enabled = config.enable
        self._halts = config.on_alert == "halt"
        self._path = Path(alerts_path) if alerts_path is not None else None
        self.alerts: list[Alert] = []

    @property
    def halt_reason(self) -> str:
        """Why training should stop after this step (on_alert=halt), "" to go on: the trainer saves first, then ends."""
        return "; ".join(alert.message for alert in self.alerts) if self._halts else ""

    def observe(self, step: int, episodes: Sequence["Episode"], rewards: Sequence[float]) -> dict[str, float]:
        """Figures of ``step`` under ``behavior/*``; one that is defined for no episode is left out.

        ``rewards``: each episode's return, in the same order. ``behavior/query_diversity_defined`` is the share of
        episodes that have a diversity at all.

        Raises: ValueError where ``rewards`` and ``episodes`` differ in length.
        """
        if len(episodes) != len(rewards):
            raise ValueError(f"{len(rewards)} rewards for {len(episodes)} episodes; give one reward an episode")
        self.alerts = []
        if not episodes:
            return {}
        sound = [
            (episode, reward) for episode, reward in zip(episodes, rewards, strict=True) if episode.finish != "error"
        ]
        metrics = {"error_share": 1 - len(sound) / len(episodes)}
        if sound:
            rows = [(episode, figures(episode)) for episode, _ in sound]
            columns = {name: [row[name] for _, row in rows if row[name] is not None] for name in rows[0][1]}
            metrics |= {name: statistics.fmean(column) for name, column in columns.items() if column}
            metrics["query_diversity_defined"] = len(columns["query_diversity"]) / len(rows)
            metrics |= reward_spread([episode.uid for episode, _ in sound], [reward for _, reward in sound])
            if self._enabled:
                self._raise_alerts(step, metrics, rows)
        return {f"behavior/{name}": value for name, value in metrics.items()}

    def _raise_alerts(
        self, step: int, metrics: dict[str, float], rows: Sequence[tuple["Episode", dict[str, float | None]]]
    ) -> None:
        for name, threshold in self._thresholds.items():
            if threshold is None or name not in metrics or metrics[name] >= threshold:
                continue
            showing = sorted(
                (row[name], episode.uid, episode.sample_index) for episode, row in rows if _below(row[name], threshold)
            )
            message = (
                f"step {step}: {name} is {metrics[name]:.3f}, below {threshold:g} "
                f"({len(showing)} of {len(rows)} episodes)"
            )
            shown = [{"uid": uid, "sample_index": index, "value": value} for value, uid, index in showing[:MAX_SHOWN]]
            alert = Alert(step, f"behavior/{name}", metrics[name], threshold, message, len(showing), shown)
            self.alerts.append(alert)
            logger.warning("%s", message)
        if self._path is not None and self.alerts:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(alert), ensure_ascii=False) + "\n" for alert in self.alerts)


def _below(value: float | None, threshold: float) -> bool:
    return value is not None and value < threshold
