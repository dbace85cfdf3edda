"""A step's tensors, episodes and times to ``dict[str, float]``, under the family's metric names. Pure functions.

B episodes, P prompt length, R response length, L = P + R. A name whose statistic has nothing to stand on (no valid
episode, no sampled token) is left out rather than logged as NaN or 0.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from scrl.types import Episode, FinishReason
from verl.trainer.ppo.core_algos import MAX_LOG_RATIO

# Phases of ``timing`` in which a model or a search is at work. The rest of a step is the driver's own.
COMPUTE_PHASES = ("gen", "gen_max", "old_log_prob", "ref_log_prob", "update_actor", "testing")


def batch_metrics(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Scores, advantages, returns and lengths.

    ``batch`` (a TensorDict or a dict): ``prompts (B, P)``, ``attention_mask (B, L)``, and ``response_mask``,
    ``token_level_scores``, ``advantages``, ``returns``, all ``(B, R)``. Rows without a sampled token (episodes that
    failed) count nowhere. Advantages and returns are taken over sampled tokens; ``response_length`` holds
    observations too, ``response_length/sampled`` only what the policy wrote.
    """
    mask = batch["response_mask"].bool()
    alive = mask.any(dim=1)
    prompt_width = batch["prompts"].shape[1]
    attended = batch["attention_mask"][alive]
    return {
        **_stats("critic/score", batch["token_level_scores"][alive].sum(dim=1)),
        **_stats("critic/advantages", batch["advantages"][mask]),
        **_stats("critic/returns", batch["returns"][mask]),
        **_stats("prompt_length", attended[:, :prompt_width].sum(dim=1)),
        **_stats("response_length", attended[:, prompt_width:].sum(dim=1)),
        **_means({"response_length/sampled": mask[alive].sum(dim=1)}),
    }


def reward_metrics(info: Mapping[str, np.ndarray]) -> dict[str, float]:
    """``reward/{component}`` (mean over valid episodes, raw and as used) of what NaiveRewardManager reports.

    ``critic/rewards/*`` is the return discounted per turn, which is what the estimators see; ``reward/phi`` the
    potential of the last state.
    """
    valid = info["valid"]
    names = [name for name, values in info.items() if values.dtype.kind == "f" and name not in ("score", "return")]
    return {
        **_stats("critic/rewards", torch.from_numpy(info["return"][valid])),
        **_means({f"reward/{name}": info[name][valid] for name in names}),
        **_means({"reward/phi": np.array([phi[-1] for phi in info["phi"][valid]], dtype=float)}),
    }


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """``behavior/search_depth`` (tool turns of the episodes that did not fail) and how the episodes ended.

    ``episodes/finish/{answer,malformed,max_turns,length,error}`` are shares of all episodes;
    ``episodes/search_failed`` is the share of tool turns whose search failed.
    """
    tool_turns = [turn for episode in episodes for turn in episode.turns if turn.kind == "tool_call"]
    return _means(
        {
            "behavior/search_depth": [episode.search_depth for episode in episodes if episode.finish != "error"],
            **{f"episodes/finish/{kind}": [e.finish == kind for e in episodes] for kind in get_args(FinishReason)},
            "episodes/search_failed": [not turn.search_ok for turn in tool_turns],
        }
    )


def noise_metrics(episodes: Sequence[Episode], probability: float) -> dict[str, float]:
    """``curriculum/search_noise``, the probability that a query gets another's results (0: nothing is logged), and
    ``curriculum/noisy_queries``, the share of queries that did."""
    if not probability:
        return {}
    turns = [turn for episode in episodes for turn in episode.turns]
    asked, noisy = sum(len(turn.queries) for turn in turns), sum(turn.noisy_queries for turn in turns)
    return {"curriculum/search_noise": probability, "curriculum/noisy_queries": noisy / max(asked, 1)}


def rollout_gaps(rollout_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) each episode's mean |p_engine - p_trainer| over its sampled tokens, 0 where it has none."""
    mask = response_mask.double()
    gaps = (rollout_log_probs.double().exp() - old_log_probs.double().exp()).abs() * mask
    return gaps.sum(dim=1) / mask.sum(dim=1).clamp_min(1)


def rollout_gap_metrics(
    rollout_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, cap: float = 2.0
) -> dict[str, float]:
    """How far the engine's probabilities of the sampled tokens are from the trainer's. All tensors (B, R).

    ``training/rollout_probs_diff_{max,mean,std}``: of |p_engine - p_trainer|, so in [0, 1]. ``rollout_corr/*``: ``kl``
    and ``k3_kl``, two estimates of KL(engine || trainer) a token; ``log_ratio_max``, the largest gap in nats; and of
    the importance weights that ``algorithm.rollout_correction`` would use (or does), by token and by sequence, the
    largest before truncation, the share above ``cap``, and the effective sample size (sum w)^2 / (N sum w^2), which
    is 1 where engine and trainer agree.
    """
    row, column = response_mask.nonzero(as_tuple=True)
    engine, trainer = rollout_log_probs[row, column].double(), old_log_probs[row, column].double()
    if not len(row):
        return {}
    gap, log_ratio = (engine.exp() - trainer.exp()).abs(), trainer - engine
    by_row = log_ratio.new_zeros(len(response_mask)).index_add(0, row, log_ratio)[row.unique()]
    metrics = {
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_std": gap.std(correction=0),
        "rollout_corr/kl": -log_ratio.mean(),
        "rollout_corr/k3_kl": (log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - log_ratio).mean(),
        "rollout_corr/log_ratio_max": log_ratio.abs().max(),
    }
    for level, log_weights in (("token", log_ratio), ("sequence", by_row)):
        weights = log_weights.clamp(max=MAX_LOG_RATIO).exp()
        metrics |= {
            f"rollout_corr/{level}_weight_max": weights.max(),
            f"rollout_corr/{level}_above_cap": (weights > cap).double().mean(),
            f"rollout_corr/{level}_eff_sample_size": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        }
    return {name: value.item() for name, value in metrics.items()}


def timing_metrics(timing: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/*`` of a step, and what of it is overhead: neither generation, search, forward nor backward.

    ``timing``: seconds by phase as the driver saw them, ``step`` for the whole. Returns ``timing_s/overhead`` and
    ``perf/overhead_share`` (of ``step``, in [0, 1]) beside every phase.
    """
    working = sum(timing[name] for name in COMPUTE_PHASES if name in timing)
    overhead = max(0.0, timing["step"] - working)
    return {
        **{f"timing_s/{name}": float(seconds) for name, seconds in timing.items()},
        "timing_s/overhead": overhead,
        "perf/overhead_share": overhead / timing["step"],
    }


def throughput_metrics(
    batch: Mapping[str, Tensor], timing: Mapping[str, float], devices: int = 1, left_out: float = 0.0
) -> dict[str, float]:
    """Tokens and tokens a second. ``batch``: ``attention_mask (B, L)``, ``response_mask (B, R)``; ``left_out``: tokens
    sampled beside it, in groups that are not trained on.

    ``perf/throughput`` is the family's: all tokens of the batch per second of ``timing["step"]`` and device;
    ``perf/gen_tokens_per_s`` counts sampled tokens against ``timing["gen"]`` alone.
    """
    total, sampled = batch["attention_mask"].sum().item(), batch["response_mask"].sum().item()
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": float(timing["step"]),
        "perf/throughput": total / timing["step"] / devices,
    }
    if timing.get("gen"):
        metrics["perf/gen_tokens_per_s"] = (sampled + left_out) / timing["gen"]
    return metrics


def validation_metrics(episodes: Sequence[Episode], info: Mapping[str, np.ndarray]) -> dict[str, float]:
    """``val/{f1,em,score,search_depth,answered}/{data_source}`` and ``.../mean`` over all episodes.

    ``info`` is the reward manager's for these episodes. An episode that failed counts as a wrong one, since the
    question was asked; ``val/errors`` says what share that is. ``answered``: share that ended with an answer.
    """
    rows = defaultdict(list)
    for row, episode in enumerate(episodes):
        rows[episode.data_source].append(row)
        rows["mean"].append(row)
    values = {
        **{name: info[name] for name in ("f1", "em", "score")},
        "search_depth": np.array([episode.search_depth for episode in episodes]),
        "answered": np.array([episode.finish == "answer" for episode in episodes]),
    }
    by_source = {f"val/{name}/{source}": values[name][rows[source]] for name in values for source in rows}
    return _means({**by_source, "val/errors": [episode.finish == "error" for episode in episodes]})


def _stats(name: str, values: Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    values = values.double()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _means(values: Mapping[str, Sequence[float] | np.ndarray | Tensor]) -> dict[str, float]:
    return {name: float(np.mean(np.asarray(column, dtype=float))) for name, column in values.items() if len(column)}
