"""Dynamic sampling (DAPO: Yu et al. 2025, arXiv:2503.14476): groups that teach nothing are replaced by further ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scrl.types import Episode
from verl.protocol import DataProto
from verl.trainer.ppo.batch import join
from verl.utils.dataset import Question


@dataclass
class Sample:
    """Questions, the group of episodes of each, and what they earned: rows in the same order everywhere, group after
    group, each of the same size. ``info``: arrays (B,) of the reward manager."""

    questions: list[Question]
    episodes: list[Episode]
    batch: DataProto
    info: dict[str, np.ndarray]

    def groups(self, places: Sequence[int]) -> "Sample":
        """The groups at these places, in this order."""
        size = len(self.episodes) // len(self.questions)
        rows = [place * size + number for place in places for number in range(size)]
        return Sample(
            [self.questions[place] for place in places],
            [self.episodes[row] for row in rows],
            self.batch[np.array(rows, dtype=int)],
            {name: values[rows] for name, values in self.info.items()},
        )

    @staticmethod
    def join(parts: "Sequence[Sample]", pad_id: int) -> "Sample":
        """All groups of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return Sample(
            [question for part in parts for question in part.questions],
            [episode for part in parts for episode in part.episodes],
            join([part.batch for part in parts], pad_id),
            join_info([part.info for part in parts]),
        )


def join_info(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One array a name, the parts' rows in order. What a user's reward named in some parts alone is 0 in the others."""
    names = dict.fromkeys(name for part in parts for name in part)
    absent = [np.zeros(len(next(iter(part.values())))) for part in parts]
    return {
        name: np.concatenate([part.get(name, zeros) for part, zeros in zip(parts, absent, strict=True)])
        for name in names
    }


def fill(
    play: Callable[[int, int], Sample],
    is_silent: Callable[[Sample], Sequence[bool]],
    *,
    wanted: int,
    max_rounds: int,
    pad_id: int,
) -> tuple[Sample, Sample | None, dict[str, float]]:
    """Play questions until ``wanted`` groups carry signal, or ``max_rounds`` times.

    Each further round asks for as many questions as the share of groups with signal so far lets expect to suffice, at
    most ``wanted``. At the limit the groups with signal that there are make the step, however few; only where there is
    none at all does the first round's batch, so that a step is never empty. Groups with signal beyond ``wanted`` are
    left out, the last ones played first.

    Args:
        play: (number of questions, number of questions played before) -> their sample.
        is_silent: of each group of a sample, whether it carries no signal.

    Returns:
        ``(trained, left_out, metrics)``: the sample to train on, the rest (None: nothing) and ``filter_groups/*``.
    """
    parts = [play(wanted, 0)]
    silent = list(is_silent(parts[0]))
    while (missing := wanted - silent.count(False)) > 0 and len(parts) < max_rounds:
        share = max(silent.count(False), 1) / len(silent)
        parts.append(play(min(wanted, math.ceil(missing / share)), len(silent)))
        silent += is_silent(parts[-1])
    loud = [place for place, quiet in enumerate(silent) if not quiet]
    chosen = loud[:wanted] or list(range(wanted))
    rest = sorted(set(range(len(silent))) - set(chosen))
    everything = Sample.join(parts, pad_id)
    metrics = {
        "gen_batches": len(parts),
        "groups_played": len(silent),
        "groups_silent": len(silent) - len(loud),
        "groups_surplus": max(len(loud) - wanted, 0),
        "groups_missing": max(wanted - len(loud), 0),
    }
    trained = everything.groups(chosen) if rest else everything
    left_out = everything.groups(rest) if rest else None
    return trained, left_out, {f"filter_groups/{name}": float(value) for name, value in metrics.items()}
