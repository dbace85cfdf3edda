"""Rewards from the literature, each behind a coefficient of ``reward_model.extras`` that is 0 unless asked for.

A function gives a raw value for every turn; what enters the tokens is that times the coefficient, which is negative
for a penalty. All are logged raw whatever their coefficients are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scrl.types import Episode

Results = Sequence[dict[str, str]]  # what one turn's tool gave back


@dataclass(frozen=True)
class Evidence:
    """What an extra may look at: the episode, the results each turn brought, and the potential before each turn and
    after the last."""

    episode: Episode
    results: Sequence[Results]
    phi: Sequence[float]


def well_formed(seen: Evidence) -> list[float]:
    """The share of an episode's turns that keep the form to the letter, each turn holding its part of it.

    A tool call counts that needed no repair and had nothing after it, and an answer with nothing after it. A share and
    no count, because a reward for each correct call would pay for calling without end (the format rewards of
    R1-Searcher, Song et al. 2025, arXiv:2503.05592, are of the whole episode for the same reason).
    """
    turns = seen.episode.turns
    kept = (t.kind != "malformed" and not t.trailing and not (t.tool_call and t.tool_call.coerced) for t in turns)
    return [float(ok) / len(turns) for ok in kept]


def information_gain(seen: Evidence) -> list[float]:
    """What a turn added to the potential: ``max(0, phi(s_{k+1}) - phi(s_k))``.

    The gain of StepSearch (Wang et al. 2025, arXiv:2505.15107, section 3.2: similarity to the golden documents beyond
    what earlier turns had reached), with the gold answer in place of golden documents, which question-answer data
    don't have. Unlike closed shaping it is paid for good, so it may move the optimum.
    """
    return [max(0.0, after - before) for before, after in zip(seen.phi[:-1], seen.phi[1:], strict=True)]


def redundancy(seen: Evidence) -> list[float]:
    """The share of a turn's results that an earlier turn had brought already (StepSearch's redundancy penalty)."""
    earlier: set[tuple[str, str]] = set()
    shares = []
    for results in seen.results:
        names = [_name(result) for result in results]
        shares.append(sum(name in earlier for name in names) / len(names) if names else 0.0)
        earlier.update(names)
    return shares


def _name(result: dict[str, str]) -> tuple[str, str]:
    """What makes two results the same page. A text may have been cut to fit, so only how it begins counts."""
    return (result["url"], "") if result.get("url") else (result.get("title", ""), result.get("text", "")[:64])


def no_search(seen: Evidence) -> list[float]:
    """1 on the last turn of an episode that never called a tool: Search-R1++ (Xu et al. 2026, arXiv:2602.19526) takes
    .1 off the F1 of such an episode."""
    return _on_last(seen, seen.episode.search_depth == 0)


def no_answer(seen: Evidence) -> list[float]:
    """1 on the last turn of an episode without an answer, or with a blank one: Search-R1++'s other penalty, also .1,
    against the answer avoidance into which an F1 reward was seen to collapse."""
    return _on_last(seen, not (seen.episode.answer or "").strip())


def _on_last(seen: Evidence, shown: bool) -> list[float]:
    return [0.0] * (len(seen.episode.turns) - 1) + [float(shown)]


EXTRAS: dict[str, Callable[[Evidence], list[float]]] = {
    "format": well_formed,
    "information_gain": information_gain,
    "redundancy": redundancy,
    "no_search": no_search,
    "no_answer": no_answer,
}
