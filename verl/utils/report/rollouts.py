"""Rollout files as records: what a run's episodes were, whatever version or accident wrote them.

Nothing that stands in a file makes reading it fail. What can't be used is counted and named.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl.utils.report.metrics import is_number

_NAME = re.compile(r"(rollout|val)_step_(\d{1,12})\.json")
_LAST_TURN_PARTS = ("outcome", "early_stop")  # earned where the episode ends
_TOKEN_COLUMNS = ("ids", "text", "widths", "loss", "engine", "trainer")


class RolloutFile(NamedTuple):
    """``split``: train, val, or test for a roll-out of its own (``trainer.val_only``), which is written as step 0
    whatever checkpoint it played."""

    step: int
    split: str
    path: Path


class Hit(NamedTuple):
    title: str
    url: str
    text: str


@dataclass
class TurnRecord:
    """One policy turn. ``asked``: queries or URLs. ``parts``: what it earned by component, as used; ``reward``: their
    sum, as on the tokens. ``phi``: the potential before and after it. None and {}: not recorded."""

    kind: str = ""
    think: str = ""
    tool: str = ""
    asked: list[str] = field(default_factory=list)
    answer: str | None = None
    reason: str = ""
    text: str = ""
    observation: str = ""
    observation_tokens: int | None = None
    ok: bool = True
    latency_s: float | None = None
    generate_s: float | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    phi: tuple[float, float] | None = None
    tokens: dict[str, str] | None = None


@dataclass
class EpisodeRecord:
    """One episode. ``group``: the uid that its siblings share; ``reward``: every component's total, raw and as used.
    ``filtered``: its group taught nothing, so it was not trained on."""

    step: int
    split: str
    question: str = ""
    golds: list[str] = field(default_factory=list)
    source: str = ""
    index: int = -1
    group: str = ""
    sample: int = 0
    answer: str | None = None
    finish: str = ""
    error: str = ""
    depth: int = 0
    score: float | None = None
    f1: float | None = None
    reward: dict[str, float] = field(default_factory=dict)
    filtered: bool = False
    turns: list[TurnRecord] = field(default_factory=list)


def rollout_files(folder: Path) -> list[RolloutFile]:
    """Files of a run's ``rollout/`` by step, training before validation; [] without such a folder."""
    found = []
    for path in sorted(folder.glob("*_step_*.json")) if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            step = int(match[2])
            split = "val" if match[1] == "val" else "train" if step else "test"
            found.append(RolloutFile(step, split, path))
    return sorted(found)


def read_rollout(file: RolloutFile) -> tuple[list[EpisodeRecord], list[str]]:
    """A file's episodes in order, and what of it could not be used, a sentence each."""
    try:
        rows = json.loads(file.path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        return [], [f"{file.path.name} was left out: {_one_line(error)}"]
    if not isinstance(rows, list):
        return [], [f"{file.path.name} was left out: it holds {type(rows).__name__}, not a list of episodes"]
    sound = [row for row in rows if isinstance(row, dict)]
    lost = len(rows) - len(sound)
    problems = [f"{file.path.name}: {lost} of {len(rows)} rows were left out, they are no episodes"] if lost else []
    return [_episode(file.step, file.split, row) for row in sound], problems


def hits(observation: str) -> list[tuple[str, list[Hit]]] | None:
    """An observation's results, query by query; None where it isn't in our tools' form (see prompts.py)."""
    try:
        blocks = json.loads(observation)
        return [
            (
                to_text(block.get("query", block.get("url", ""))),
                [
                    Hit(*(to_text(hit.get(key)) for key in ("title", "url", "text")))
                    for hit in block["results"]
                    if hit.keys()
                ],
            )
            for block in blocks
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def render_hits(results: Sequence[tuple[str, Sequence[Hit]]]) -> str:
    """The opposite of ``hits``, without what is empty."""
    blocks = [
        {"query": query, "results": [{key: value for key, value in hit._asdict().items() if value} for hit in found]}
        for query, found in results
    ]
    return json.dumps(blocks, ensure_ascii=False)


def to_text(value: Any) -> str:
    """Any JSON value as text; None as nothing."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _whole(value: Any, otherwise: int) -> int:
    return int(value) if is_number(value) else otherwise


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    return {name: float(number) for name, number in _dict(value).items() if is_number(number)}


def _episode(step: int, split: str, row: dict[str, Any]) -> EpisodeRecord:
    reward = _dict(row.get("reward"))
    totals = _numbers(reward)
    turns = [_turn(turn) for turn in _list(row.get("turns")) if isinstance(turn, dict)]
    _place_rewards(turns, row, reward, totals)
    golds = row.get("ground_truths")
    answer = row.get("answer")
    return EpisodeRecord(
        step=step,
        split=split,
        question=to_text(row.get("question")),
        golds=[to_text(gold) for gold in (golds if isinstance(golds, list) else [golds] if golds else [])],
        source=to_text(row.get("data_source")),
        index=_whole(row.get("idx"), -1),
        group=to_text(row.get("uid")),
        sample=_whole(row.get("sample_index"), 0),
        answer=None if answer is None else to_text(answer),
        finish=to_text(row.get("finish")),
        error=to_text(row.get("error")),
        depth=_whole(row.get("search_depth"), sum(turn.kind == "tool_call" for turn in turns)),
        score=totals.get("score"),
        f1=totals.get("f1"),
        reward=_with_outcome_parts(totals, totals),
        filtered=row.get("filtered") is True,
        turns=turns,
    )


def _turn(row: dict[str, Any]) -> TurnRecord:
    call = _dict(row.get("tool_call"))
    asked = _list(row.get("queries")) or [
        item for items in _dict(call.get("arguments")).values() for item in _list(items)
    ]
    answer, tokens = row.get("answer"), row.get("tokens")
    if isinstance(tokens, dict):
        tokens = {name: to_text(tokens.get(name)) for name in _TOKEN_COLUMNS}
    return TurnRecord(
        kind=to_text(row.get("kind")),
        think=to_text(row.get("think")),
        tool=to_text(call.get("name")),
        asked=[to_text(item) for item in asked],
        answer=None if answer is None else to_text(answer),
        reason=to_text(row.get("reason")),
        text=to_text(row.get("text")),
        observation=to_text(row.get("observation")),
        observation_tokens=_whole(row["observation_tokens"], 0) if "observation_tokens" in row else None,
        ok=row.get("search_ok") is not False,
        latency_s=_number(row.get("latency_s")),
        generate_s=_number(row.get("generate_s")),
        tokens=tokens if isinstance(tokens, dict) else None,
    )


def _place_rewards(
    turns: Sequence[TurnRecord], row: dict[str, Any], reward: dict[str, Any], totals: dict[str, float]
) -> None:
    """Put rewards, advantages and potentials beside their turns. Files that lack components by turn get those of the
    episode that are known to be the last turn's."""
    by_turn = _list(reward.get("by_turn"))
    for turn, parts in zip(turns, by_turn, strict=False):
        turn.parts = _with_outcome_parts(_numbers(parts), totals)
    if turns and not by_turn:
        parts = {name: totals[name] for name in _LAST_TURN_PARTS if totals.get(name)}
        turns[-1].parts = _with_outcome_parts(parts, totals)
    for turn, value in zip(turns, _list(row.get("turn_reward")), strict=False):
        turn.reward = _number(value)
    for turn, value in zip(turns, _list(row.get("advantage")), strict=False):
        turn.advantage = _number(value)
    phi = _list(reward.get("phi"))
    for turn, before, after in zip(turns, phi[:-1], phi[1:], strict=False):
        if is_number(before) and is_number(after):
            turn.phi = (float(before), float(after))


def _with_outcome_parts(parts: dict[str, float], totals: dict[str, float]) -> dict[str, float]:
    """``parts`` with the names of the user's own reward function (``reward_model.custom``) where it made the outcome:
    those that it gave (``custom/x``, which sum up to the outcome), else ``custom``."""
    if "outcome" not in parts or "custom_failed" not in totals:
        return parts
    own = {name: value for name, value in totals.items() if name.startswith("custom/")}
    kept = {name: value for name, value in parts.items() if name not in ("outcome", *own)}
    if not kept.get("custom_failed"):
        kept.pop("custom_failed", None)
    return kept | (own or {"custom": parts["outcome"]})
