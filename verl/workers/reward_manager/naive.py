"""Episodes to rewards on tokens: outcome, potential-based shaping, early-stop and repetition penalties, and extras.

Every component is worked out whether it is switched on or not, so that the logs show what it would say.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scrl.types import Episode, Turn
from verl.trainer.config.schema import RewardConfig
from verl.utils.reward_score.qa import exact_match, f1, gold_forms, tokenise
from verl.workers.reward_manager.custom import CustomReward
from verl.workers.reward_manager.extras import EXTRAS, Evidence, Results

_JSON = json.JSONDecoder()
SWITCHED = ("pbrs", "early_stop", "repetition", *EXTRAS)  # logged raw and as used
COMPONENTS = ("f1", "em", "outcome", *(name + end for name in SWITCHED for end in ("", "_raw")))


@dataclass
class EpisodeReward:
    """One episode's rewards. ``turns``: what each turn earns, all components that are switched on together.

    ``components``: name -> value; ``x_raw`` before its switch and coefficient (early_stop: 1 if it stopped early;
    repetition: number of turns that repeat a query; pbrs and the extras: their sums), ``x`` as it entered the tokens;
    ``custom/x`` what a user's own function named.
    ``phi``: the potential before each turn and after the last one, so one longer than ``turns``.
    ``by_turn``: what each turn earned by component, as used; what earned it nothing is left out.
    """

    turns: list[float]
    components: dict[str, float]
    phi: list[float] = field(default_factory=list)
    by_turn: list[dict[str, float]] = field(default_factory=list)


class NaiveRewardManager:
    """Scores finished episodes and puts each reward on the last sampled token of the turn that earned it.

    Raises ValueError where ``config.custom`` names no function that can be used.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.custom = CustomReward(config.custom) if config.custom else None

    def __call__(
        self, episodes: Sequence[Episode], response_length: int, *, min_turns: int | None = None, discount: float = 1.0
    ) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """Score a batch of B episodes.

        Args:
            response_length: R, the width of the padded responses.
            min_turns: tool turns before an answer that cost nothing; None takes ``config.min_turns``.
            discount: factor between turns, used for ``info["return"]`` alone (the tokens hold undiscounted rewards).

        Returns:
            ``token_level_scores (B, R) float32`` and ``info``: arrays of shape (B,): every name of ``COMPONENTS``,
            ``score`` (sum over the tokens), ``return`` (the same discounted per turn), ``valid`` (bool; False for an
            episode that failed or sampled nothing, or that the user's reward function failed on; it scores 0) and
            ``phi`` and ``by_turn`` (object: lists, see EpisodeReward). With a function of the user's also
            ``custom_failed`` (bool) and ``custom/x`` for every ``x`` that it named.
        """
        min_turns = self.config.min_turns if min_turns is None else min_turns
        rows, columns, values = [], [], []
        info = {name: np.zeros(len(episodes)) for name in (*COMPONENTS, "score", "return")}
        info["valid"] = np.zeros(len(episodes), dtype=bool)
        info["phi"], info["by_turn"] = np.empty(len(episodes), dtype=object), np.empty(len(episodes), dtype=object)
        if self.custom:
            info["custom_failed"] = np.zeros(len(episodes), dtype=bool)
        for row, episode in enumerate(episodes):
            assert len(episode.response_mask) <= response_length, "a response is longer than the padded width"
            positions = _last_sampled_tokens(episode)
            info["phi"][row], info["by_turn"][row] = [], []
            if episode.finish == "error" or not positions:
                continue
            reward = self.score(episode, min_turns)
            if reward is None:
                info["custom_failed"][row] = True
                continue
            rows.extend([row] * len(positions))
            columns.extend(positions)
            values.extend(reward.turns)
            info["valid"][row] = True
            info["phi"][row], info["by_turn"][row] = reward.phi, reward.by_turn
            info["score"][row] = sum(reward.turns)
            info["return"][row] = sum(discount**k * value for k, value in enumerate(reward.turns))
            for name, value in reward.components.items():
                info.setdefault(name, np.zeros(len(episodes)))[row] = value
        scores = np.zeros((len(episodes), response_length), dtype=np.float32)
        # Two turns can share a token, so add rather than assign.
        np.add.at(scores, (np.array(rows, dtype=int), np.array(columns, dtype=int)), np.array(values, dtype=np.float32))
        return torch.from_numpy(scores), info

    def score(self, episode: Episode, min_turns: int) -> EpisodeReward | None:
        """The rewards of one episode that has at least one turn; None where the user's function failed on it.

        An answer earns its F1. Every other ending (a malformed turn, a tool call after the last one allowed, no room
        left to answer) earns ``format_score``: an episode that never answered has not kept the format, and paying it
        more than that would make rambling on until the context is full better than a malformed try.
        """
        config, turns = self.config, episode.turns
        answered = episode.finish == "answer"
        outcome_f1 = f1(episode.answer, episode.ground_truths) if answered else 0.0
        own = self.custom(episode) if self.custom else {"": outcome_f1 if answered else config.format_score}
        if own is None:
            return None
        outcome = sum(own.values())
        results = [observed_results(turn.observation) if turn.search_ok else [] for turn in turns]
        phi = potentials(turns, episode.ground_truths, results)
        early = float(answered and episode.search_depth < min_turns)
        shaping = shaping_rewards(phi, config.pbrs.gamma, config.pbrs.terminal, turns[-1].kind == "tool_call")
        parts = {  # name -> (coefficient, raw value of each turn)
            "pbrs": (float(config.use_pbrs), shaping),
            "early_stop": (
                config.early_stop_penalty * config.use_early_stop_penalty,
                [0.0] * (len(turns) - 1) + [early],
            ),
            "repetition": (
                config.repetition_penalty * config.use_repetition_penalty,
                repeated_turns(turns, config.repetition_threshold),
            ),
        }
        seen = Evidence(episode, results, phi)
        parts |= {name: (getattr(config.extras, name), extra(seen)) for name, extra in EXTRAS.items()}

        components = {
            "f1": outcome_f1,
            "em": exact_match(episode.answer, episode.ground_truths) if answered else 0.0,
            "outcome": outcome,
            **{f"custom/{name}": value for name, value in own.items() if name},
        }
        per_turn = [0.0] * len(turns)
        by_turn: list[dict[str, float]] = [{} for _ in turns]
        for name, (coefficient, raw) in parts.items():
            components[f"{name}_raw"] = float(sum(raw))
            components[name] = coefficient * components[f"{name}_raw"] + 0.0  # never -0.0
            if coefficient:
                per_turn = [earned + coefficient * value for earned, value in zip(per_turn, raw, strict=True)]
                for part, value in zip(by_turn, raw, strict=True):
                    part |= {name: round(coefficient * value, 6)} if value else {}
        per_turn[-1] += outcome
        by_turn[-1]["outcome"] = outcome
        return EpisodeReward(per_turn, components, phi, by_turn)


def shaping_rewards(phi: Sequence[float], gamma: float, terminal: str, ends_in_tool: bool = False) -> list[float]:
    """Potential-based shaping (Ng, Harada and Russell 1999), a value a turn: gamma * phi(s_{k+1}) - phi(s_k).

    ``phi``: potentials of the T + 1 states, before each of T turns and after the last. The last turn enters the
    terminal state. ``terminal="zero"`` gives that state potential 0, so the last turn gets -phi(s_{T-1}), the sum
    discounted by ``gamma`` is -phi(s_0) whatever the policy does, and the optimal policy stays. ``"carry"`` leaves
    the sum open: an answer gets 0, a tool turn that ends the episode the same as any other, and the policy is paid for
    what it found.
    """
    shaped = [gamma * after - before for before, after in zip(phi[:-1], phi[1:], strict=True)]
    if terminal == "zero":
        shaped[-1] = -phi[-2]
    elif not ends_in_tool:
        shaped[-1] = 0.0
    return shaped


def potentials(turns: Sequence[Turn], golds: Sequence[str], results: Sequence[Results] | None = None) -> list[float]:
    """Phi before each turn and after the last: how much of the best alias the observations so far contain.

    The share of an alias's distinct normalised tokens, the largest over the aliases, in [0, 1]. It is 0 throughout
    without a gold, and where an alias is yes or no: any page holds those words, and what else stands beside them as
    an alias in Natural Questions is the passage, not an answer. ``results``: of each turn, where they are known.
    """
    aliases = [form.tokens for form in gold_forms(golds)]
    if not aliases or any(alias in ({"yes"}, {"no"}) for alias in aliases):
        return [0.0] * (len(turns) + 1)
    if results is None:
        results = [observed_results(turn.observation) if turn.search_ok else [] for turn in turns]
    missing = set().union(*aliases)
    phi = [0.0]
    for rows in results:
        # At 1 there is nothing left to gain, so long texts after it need no look.
        found = _contained(missing, _text(rows)) if rows and phi[-1] < 1 else None
        if found:
            missing -= found
            phi.append(max(1 - len(alias & missing) / len(alias) for alias in aliases))
        else:
            phi.append(phi[-1])
    return phi


def _contained(tokens: set[str], text: str) -> set[str]:
    """Those of ``tokens`` that ``text`` holds. Most pages hold none: a search for a few is cheaper than tokenising."""
    if len(tokens) <= 64:
        lowered = text.lower()
        tokens = {token for token in tokens if token in lowered}
    return tokens.intersection(tokenise(text)) if tokens else tokens


def observed_results(observation: str) -> Results:
    """What the tool found, out of an observation's JSON: one dictionary of texts a result.

    The observation repeats the query, and what the policy wrote itself must earn nothing. Text that is not such
    JSON counts whole, as one result; an error message as none.
    """
    if observation.startswith("["):
        try:
            blocks, _ = _JSON.raw_decode(observation)
            results = [result for block in blocks for result in block["results"]]
            _text(results)
            return results
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass  # not in the form of our own tools
    return [] if not observation or observation.startswith('{"error"') else [{"text": observation}]


def _text(results: Results) -> str:
    return "\n".join(text for result in results for text in result.values())


def repeated_turns(turns: Sequence[Turn], threshold: float) -> list[bool]:
    """Which turns send a query more than ``threshold`` similar to one of any earlier turn.

    Similarity is Jaccard over distinct normalised tokens. Queries of one call go out together, so none of them is
    the earlier; pages to browse are not queries.
    """
    earlier: list[set[str]] = []
    repeated = []
    for turn in turns:
        searched = turn.tool_call is None or "query" in turn.tool_call.arguments
        queries = [set(tokens) for query in turn.queries if (tokens := tokenise(query))] if searched else []
        repeated.append(any(_jaccard(query, other) > threshold for query in queries for other in earlier))
        earlier.extend(queries)
    return repeated


def _jaccard(one: set[str], other: set[str]) -> float:
    common = len(one & other)
    return common / (len(one) + len(other) - common)


def _last_sampled_tokens(episode: Episode) -> list[int]:
    """Index of each turn's last sampled token; a turn that sampled nothing takes the one before it.

    Empty when there is no turn, or none of the first turn was sampled.
    """
    positions: list[int] = []
    for turn in episode.turns:
        start, end = turn.span
        last = next((t for t in range(end - 1, start - 1, -1) if episode.response_mask[t]), None)
        if last is None and not positions:
            return []
        positions.append(positions[-1] if last is None else last)
    return positions
