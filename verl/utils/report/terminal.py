"""Episodes as text for a terminal: filters that can be typed, a line an episode, and one episode in full.

What models and pages wrote reaches the terminal as characters only: no markup is read in it, and control characters,
which could move the cursor or set a colour, are shown as a sign.
"""

import operator
import re
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from verl.utils.report.rollouts import EpisodeRecord, TurnRecord, hits

FIELDS: dict[str, Callable[[EpisodeRecord], str | float | None]] = {
    "step": lambda episode: episode.step,
    "set": lambda episode: episode.split,
    "score": lambda episode: episode.score,
    "f1": lambda episode: episode.f1,
    "depth": lambda episode: episode.depth,
    "sample": lambda episode: episode.sample,
    "finish": lambda episode: episode.finish,
    "source": lambda episode: episode.source,
}
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}
_TERM = re.compile(r"(\w+)(<=|>=|<|>|=)(\S+)")
# Control characters but newline and tab, and the marks that reorder what stands around them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def parse_filter(text: str) -> Callable[[EpisodeRecord], bool]:
    """``finish=answer score<0.5 oslo``: terms of a field, and words that must stand somewhere in the episode.

    Raises:
        ValueError: a field that isn't one of ``FIELDS``, or no number where it takes one.
    """
    tests: list[Callable[[EpisodeRecord], bool]] = []
    words = []
    for term in text.split():
        if match := _TERM.fullmatch(term):
            tests.append(_field_test(*match.groups()))
        else:
            words.append(term.lower())
    if words:
        tests.append(lambda episode: all(word in all_text(episode) for word in words))
    return lambda episode: all(test(episode) for test in tests)


def _field_test(field: str, sign: str, wanted: str) -> Callable[[EpisodeRecord], bool]:
    if field not in FIELDS:
        raise ValueError(f"filter {field}{sign}{wanted}: there is no field {field}; known are {', '.join(FIELDS)}")
    value, compare = FIELDS[field], _OPERATORS[sign]
    if field in ("set", "finish", "source"):
        if sign != "=":
            raise ValueError(f"filter {field}{sign}{wanted}: {field} is a word, so only {field}=... works")
        return lambda episode: value(episode) == wanted
    try:
        bound = float(wanted)
    except ValueError:
        raise ValueError(f"filter {field}{sign}{wanted}: {field} takes a number, such as {field}{sign}1") from None
    return lambda episode: value(episode) is not None and compare(value(episode), bound)


def all_text(episode: EpisodeRecord) -> str:
    """All that was asked, said and found, and how it ended, in lower case."""
    parts = [episode.question, *episode.golds, episode.source, episode.finish, episode.error, episode.answer or ""]
    for turn in episode.turns:
        parts += [turn.think, *turn.asked, turn.text, turn.reason, turn.observation]
    return "\n".join(parts).lower()


def siblings(episodes: Sequence[EpisodeRecord], place: int) -> list[int]:
    """Places of the samples of the same question at the same step, the one at ``place`` among them."""
    one = episodes[place]
    key = (one.split, one.step, one.group, one.question)
    return [i for i, other in enumerate(episodes) if (other.split, other.step, other.group, other.question) == key]


def extreme(episodes: Sequence[EpisodeRecord], place: int, best: bool) -> int:
    """The place of the best or worst sample of the group of the one at ``place``; the first of equals."""
    scored = [i for i in siblings(episodes, place) if episodes[i].score is not None]
    if not scored:
        return place
    return (max if best else min)(scored, key=lambda i: episodes[i].score)


# -------------------------------------------------------------------------------------------------------------- drawing
def clean(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


def plain(text: str, style: str = "") -> Text:
    """Text as it is: no markup, no control characters."""
    return Text(clean(text), style=style)


def one_line(text: str) -> str:
    return " ".join(clean(text).split())


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def score_style(score: float | None) -> str:
    return "" if score is None else "green" if score >= 0.5 else "red" if score < 0 else "yellow"


def cells(episode: EpisodeRecord) -> list[Text]:
    """When, sample, score, finish, depth, question, answer."""
    return [
        Text("test" if episode.split == "test" else f"{'val ' if episode.split == 'val' else ''}{episode.step}"),
        Text(str(episode.sample)),
        Text(number(episode.score), style=score_style(episode.score), justify="right"),
        Text(one_line(episode.finish)[:10]),
        Text(str(episode.depth)),
        Text(one_line(episode.question)[:90]),
        Text("no answer" if episode.answer is None else one_line(episode.answer)[:40]),
    ]


def draw_episode(episode: EpisodeRecord, results: bool) -> RenderableType:
    """One episode from the question to its answer; ``results``: with the texts that searches brought."""
    facts = f"{episode.split} step {episode.step} · sample {episode.sample} · {one_line(episode.source)} · "
    facts += f"{one_line(episode.finish)} · {episode.depth} searches · F1 {number(episode.f1)} · score "
    rewards = [f"{one_line(name)} {value:+.2f}" for name, value in episode.reward.items() if _earns(name, value)]
    parts: list[RenderableType] = [
        plain(episode.question, "bold"),
        Text.assemble("gold ", (clean("  /  ".join(episode.golds)) or "none", "green")),
        Text.assemble((facts, "dim"), (number(episode.score), score_style(episode.score))),
    ]
    if rewards:
        parts.append(Text("rewards: " + "  ".join(rewards), style="dim"))
    if episode.filtered:
        parts.append(Text("not trained on: its group taught nothing", style="yellow"))
    if episode.error:
        parts.append(plain(episode.error, "red"))
    for place, turn in enumerate(episode.turns, start=1):
        parts += [Text(), *_draw_turn(turn, place, results)]
    return Group(*parts)


def _earns(name: str, value: float) -> bool:
    return bool(value) and not name.endswith("_raw") and name not in ("score", "return", "valid", "f1", "em")


def _draw_turn(turn: TurnRecord, place: int, results: bool) -> list[RenderableType]:
    earned = [f"{one_line(name)} {value:+.2f}" for name, value in turn.parts.items() if value]
    if turn.advantage is not None:
        earned.append(f"advantage {turn.advantage:+.2f}")
    if turn.phi is not None:
        earned.append(f"Φ {turn.phi[0]:.2f} → {turn.phi[1]:.2f}")
    title = f"turn {place} · {one_line(turn.tool or turn.kind)}"
    parts: list[RenderableType] = [Rule(Text("   ".join([title, *earned]), style="cyan"), align="left", style="dim")]
    if turn.think:
        parts.append(plain(turn.think, "italic"))
    parts += [plain(f"⌕ {asked}", "bold blue") for asked in turn.asked]
    if turn.observation:
        parts.append(Padding(_draw_observation(turn, results), (0, 0, 0, 2)))
    if turn.kind == "malformed":
        parts += [plain(turn.reason or "malformed", "red"), *([plain(turn.text, "dim")] if turn.text else [])]
    if turn.kind == "answer":
        parts.append(plain(f"→ {turn.answer or '(blank)'}", "bold"))
    return parts


def _draw_observation(turn: TurnRecord, results: bool) -> RenderableType:
    found = hits(turn.observation) if turn.ok else None
    if found is None:
        return plain(turn.observation if results or not turn.ok else turn.observation[:300], "" if turn.ok else "red")
    lines = []
    for _, block in found:
        for hit in block:
            lines.append(plain(f"· {hit.title or hit.url or one_line(hit.text)[:60]}", "dim"))
            if results:
                lines.append(Padding(plain(hit.text), (0, 0, 0, 2)))
    return Group(*lines) if lines else Text("no results", style="dim")
