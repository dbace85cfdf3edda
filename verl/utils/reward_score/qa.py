"""Exact match and F1 of a short answer against gold aliases, under the three definitions that published tables use.

All lowercase first, and the best alias counts:

- ``deepresearcher`` (Zheng et al. 2025, the training reward here): every ASCII punctuation character becomes a space,
  spaces are folded, articles stay. EM on the string, F1 on token *sets*.
- ``squad`` (Rajpurkar et al. 2016; HotpotQA and Search-R1 report this): punctuation is deleted, a/an/the are dropped,
  spaces are folded. EM on the string, F1 on token *counts*, 0 where one side is yes, no or noanswer, the other not.
- ``cover`` (EM only; ZeroSearch's "EM", R1-Searcher's "cover-EM"): the gold, normalised as in ``squad``, is a substring
  of the prediction.

Where normalising leaves nothing ("!!!", or "The The" without its articles) the lowercase text stands as it is, so that
two different such texts never match. Nothing matches an empty prediction or an empty gold.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

ANSWER_SPLIT = "<|answer_split|>"
DEFINITIONS = ("deepresearcher", "squad", "cover")

_TO_SPACE = bytes.maketrans(string.punctuation.encode(), b" " * len(string.punctuation))
_DELETED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True, slots=True)
class _Form:
    """A text as a definition sees it. ``erased``: normalising left nothing, so ``text`` is only lowercase."""

    text: str
    erased: bool
    tokens: frozenset[str]
    counts: Counter[str]


def split_golds(text: str) -> list[str]:
    """The aliases in a row's ``ground_truth``, without blank ones and without spaces around."""
    return [alias.strip() for alias in text.split(ANSWER_SPLIT) if alias.strip()]


def normalise(text: str, definition: str = "deepresearcher") -> str:
    """``text`` as ``definition`` compares it. Raises ValueError for an unknown definition."""
    _check(definition)
    return _form(text, definition).text


def tokenise(text: str) -> list[str]:
    """The tokens of ``text`` under the ``deepresearcher`` definition, in order; none if normalising erases it.

    Made for long texts: ``str.translate`` is slow as soon as one letter is not ASCII, while in UTF-8 an ASCII
    punctuation byte is never part of another character.
    """
    return text.lower().encode("utf-8", "surrogatepass").translate(_TO_SPACE).decode("utf-8", "surrogatepass").split()


def exact_match(
    prediction: str | None,
    golds: str | Iterable[str],
    definition: str = "deepresearcher",
) -> float:
    """1.0 if ``prediction`` is one of ``golds`` (for ``cover``: contains one), else 0.0.

    ``golds``: aliases, or one text that holds them joined by ``<|answer_split|>``.
    Raises ValueError for an unknown definition.
    """
    forms = gold_forms(golds, definition)
    if not prediction or not prediction.strip():
        return 0.0
    said = _form(prediction, definition)
    if definition == "cover":
        return float(any(said.text == gold.text if gold.erased else gold.text in said.text for gold in forms))
    return float(any(said.text == gold.text for gold in forms))


def f1(
    prediction: str | None,
    golds: str | Iterable[str],
    definition: str = "deepresearcher",
) -> float:
    """Harmonic mean of token precision and recall against the best of ``golds``, in [0, 1].

    Raises ValueError for an unknown definition, and for ``cover``, which has none.
    """
    if definition == "cover":
        raise ValueError("definition='cover' has no F1, it is an exact match only; use 'deepresearcher' or 'squad'")
    forms = gold_forms(golds, definition)
    if not prediction or not prediction.strip():
        return 0.0
    said = _form(prediction, definition)
    if definition == "deepresearcher":
        return max((_set_f1(said.tokens, gold.tokens) for gold in forms), default=0.0)
    return max((_count_f1(said, gold) for gold in forms), default=0.0)


def gold_forms(golds: str | Iterable[str], definition: str = "deepresearcher") -> tuple[_Form, ...]:
    """The normalised aliases. Cached, since a group of episodes asks for the same ones again and again."""
    _check(definition)
    return _cached_forms(
        tuple(split_golds(golds)) if isinstance(golds, str) else tuple(golds),
        definition,
    )


def _check(definition: str) -> None:
    if definition not in DEFINITIONS:
        raise ValueError(f"definition={definition!r} is not known; choose one of {', '.join(DEFINITIONS)}")


@lru_cache(maxsize=8192)
def _cached_forms(golds: tuple[str, ...], definition: str) -> tuple[_Form, ...]:
    return tuple(_form(gold, definition) for gold in golds if gold and gold.strip())


def _form(text: str, definition: str) -> _Form:
    if definition == "deepresearcher":
        words = tokenise(text)
    else:
        words = _ARTICLES.sub(" ", text.lower().translate(_DELETED)).split()
    erased = not words
    if erased:
        words = text.lower().split()
    return _Form(" ".join(words), erased, frozenset(words), Counter(words))


def _set_f1(said: frozenset[str], gold: frozenset[str]) -> float:
    return 2 * len(said & gold) / (len(said) + len(gold))


def _count_f1(said: _Form, gold: _Form) -> float:
    if said.text != gold.text and not _CLOSED_ANSWERS.isdisjoint((said.text, gold.text)):
        return 0.0
    common = sum((said.counts & gold.counts).values())
    return 2 * common / (said.counts.total() + gold.counts.total())
