"""The algorithms, as pure functions on tensors: advantages (from ``advantages.py``), aggregation, policy losses, KL.

Shapes: B episodes, R response length. ``response_mask (B, R)`` is 1 on the tokens that the policy sampled. A row that
is masked throughout (a failed episode, a pad row) is no sequence and adds nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from verl.trainer.ppo.advantages import ADVANTAGE_ESTIMATORS, silent_rows, turn_owner, zero_variance_groups

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "Denominators",
    "ENTROPY_SCHEDULES",
    "KL_ESTIMATORS",
    "MAX_LOG_RATIO",
    "POLICY_LOSSES",
    "aggregate_loss",
    "count_denominators",
    "entropy_coefficient",
    "kl_penalty",
    "likelihood_displacement",
    "policy_loss",
    "rollout_weights",
    "silent_rows",
    "turn_owner",
    "zero_variance_groups",
]

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside every clip range, and far from overflow


# ------------------------------------------------------------------------------------------------------ aggregation
class Denominators(NamedTuple):
    """What a loss is divided by, counted over **all** ranks and micro-batches of an optimizer step."""

    tokens: float
    sequences: float
    max_length: float  # Lmax, the response budget: a constant, whatever was generated


def count_denominators(mask: Tensor, max_length: int | None = None) -> Denominators:
    """Counts of ``mask (B, R)``. A sequence that is masked throughout is none. ``max_length`` None: R."""
    mask = mask.bool()
    width = mask.shape[1] if max_length is None else max_length
    return Denominators(float(mask.sum()), float(mask.any(dim=1).sum()), float(width))


# The weight of one token's loss, from the lengths (B, 1) of the sequences and the denominators.
AGGREGATIONS: dict[str, Callable[[Tensor, Denominators], Tensor | float]] = {
    "token-mean": lambda lengths, n: 1 / n.tokens,  # DAPO (Yu et al. 2025, arXiv:2503.14476)
    "seq-mean-token-mean": lambda lengths, n: 1 / (lengths * n.sequences),  # GRPO (Shao et al. 2024)
    "seq-mean-token-sum": lambda lengths, n: 1 / n.sequences,
    "seq-mean-token-sum-norm": lambda lengths, n: 1 / (n.sequences * n.max_length),  # Dr. GRPO (Liu et al. 2025)
}


def aggregate_loss(loss_matrix: Tensor, mask: Tensor, mode: str, denominators: Denominators | None = None) -> Tensor:
    """``sum_{i,t} w_i m_{i,t} l_{i,t}``, ``w`` by ``mode``; a scalar.

    With the denominators of the whole step, the losses of its micro-batches **sum** to the step's loss, however it is
    cut (whole sequences each). Means of micro-batches, averaged, would weigh a token by the batch it fell into. Where
    ranks average their gradients, multiply by their number. ``denominators`` None: those of ``mask``.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode={mode!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
    mask = mask.bool()
    counted = denominators or count_denominators(mask)
    counted = Denominators(*(max(count, 1.0) for count in counted))  # nothing sampled: a loss of 0, not 0/0
    weight = AGGREGATIONS[mode](mask.sum(dim=1, keepdim=True).clamp_min(1), counted)
    return (torch.where(mask, loss_matrix, 0.0) * weight).sum()


# ---------------------------------------------------------------------------------------------------- policy losses
class Clip(NamedTuple):
    low: float
    high: float
    dual: float | None


class LossTerms(NamedTuple):
    """All ``(B, R)``: the loss of each token, and where a clip holds the gradient back (``dual``: the dual clip)."""

    loss: Tensor
    clipped: Tensor
    dual: Tensor


def _ppo(log_ratio: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> LossTerms:
    """``max(-A rho, -A clip(rho, 1 - low, 1 + high))``, ``rho = pi / pi_old``, and for A < 0 at most ``-A dual``.

    PPO (Schulman et al. 2017, arXiv:1707.06347); dual clip: Ye et al. 2020 (arXiv:1912.09729), so that a token of
    bad advantage which became likely can't blow the loss up; low < high ("clip-higher"): DAPO (Yu et al. 2025).
    """
    ratio = log_ratio.exp()
    free, held = -advantages * ratio, -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss, clipped = torch.maximum(free, held), held > free
    if clip.dual is None:
        return LossTerms(loss, clipped, torch.zeros_like(clipped))
    ceiling = -advantages * clip.dual
    dual = (advantages < 0) & (loss > ceiling)
    return LossTerms(torch.where(dual, ceiling, loss), clipped, dual)


def _gspo(log_ratio: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> LossTerms:
    """PPO's loss with the sequence's ratio ``s_i = exp(mean_t log rho_{i,t})`` for each of its tokens.

    The token form ``sg[s_i] pi / sg[pi]`` has the same value and gradient. GSPO (Zheng et al. 2025, arXiv:2507.18071).
    """
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)
    return _ppo(mean.detach() + log_ratio - log_ratio.detach(), log_prob, advantages, mask, clip)


def _cispo(log_ratio: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> LossTerms:
    """``-sg[clip(rho, 1 - low, 1 + high)] A log pi``: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1 2025, arXiv:2506.13585). There is no dual clip: the weight is bounded on both sides.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return LossTerms(-weight * advantages * log_prob, weight != ratio, torch.zeros_like(mask))


POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip], LossTerms]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
}


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_kind: str = "ppo",
    weights: Tensor | None = None,
    denominators: Denominators | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss and metrics of a micro-batch; all tensors ``(B, R)``, ``advantages`` float32.

    ``weights``: each token's loss is multiplied by its own (of ``rollout_weights``); None: 1.

    The metrics add up over micro-batches (and ranks) to the step's values, as the loss does: ``actor/pg_loss``; the
    share of sampled tokens that a clip holds back, ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower`` (dual clip);
    ``actor/ppo_kl``, the mean of log pi_old - log pi; and ``stability/log_ratio_clamped``, the number of tokens whose
    log ratio was beyond ±20 (they have no gradient).

    Raises: ValueError for an unknown ``loss_kind`` or ``loss_agg_mode`` and for clip values out of range.
    """
    if loss_kind not in POLICY_LOSSES:
        raise ValueError(f"loss_kind={loss_kind!r} is unknown; choose one of {', '.join(POLICY_LOSSES)}")
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: need 0 <= clip_low <= 1 and clip_high >= 0")
    if clip_dual is not None and clip_dual <= 1:
        raise ValueError(f"clip_dual={clip_dual} would clip an unchanged policy; choose above 1, or None for none")
    mask = response_mask.bool()
    # Masked before anything is computed: a NaN at an unsampled position would reach the gradient as 0 * NaN.
    log_prob = torch.where(mask, log_prob, 0.0)
    raw = log_prob - torch.where(mask, old_log_prob, 0.0)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clip = Clip(clip_low, clip_high, clip_dual)
    terms = POLICY_LOSSES[loss_kind](log_ratio, log_prob, advantages, mask, clip)
    weighted = terms.loss if weights is None else terms.loss * weights
    loss = aggregate_loss(weighted, mask, loss_agg_mode, denominators)

    with torch.no_grad():
        tokens = max((denominators or count_denominators(mask)).tokens, 1.0)
        held, dual, over = terms.clipped & mask, terms.dual & mask, raw.abs() > MAX_LOG_RATIO
        sums = torch.stack([loss.double(), held.sum() / tokens, dual.sum() / tokens, -raw.sum() / tokens, over.sum()])
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    metrics = {f"actor/{name}": value for name, value in zip(names, sums.tolist()[:4], strict=True)}
    return loss, metrics | {"stability/log_ratio_clamped": float(sums[4])}


# --------------------------------------------------------------------------- between engine and trainer, old and new
def _sequence_weight(log_ratio: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


# The log of the weight of each token, from the log ratios (B, R), which are 0 where nothing was sampled.
ROLLOUT_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda log_ratio: log_ratio,
    "sequence": _sequence_weight,
}


def rollout_weights(
    trainer_log_prob: Tensor, engine_log_prob: Tensor, response_mask: Tensor, level: str, cap: float
) -> Tensor:
    """Truncated importance weights ``(B, R)`` for episodes that another policy than the trainer's old one sampled.

    ``w = min(pi_trainer / pi_engine, cap)`` of each token (``level="token"``), or of all sampled tokens of an episode
    together (``"sequence"``, the product of their ratios); without gradient, 0 where nothing was sampled. By token the
    variance is small and what earlier tokens did to the state is left out; by sequence it is unbiased up to the cap,
    with a variance that grows with length. Truncated importance sampling: Ionides 2008; between engine and trainer:
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    mask = response_mask.bool()
    with torch.no_grad():
        log_ratio = torch.where(mask, trainer_log_prob - engine_log_prob, 0.0)
        weights = ROLLOUT_WEIGHTS[level](log_ratio).clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap)
        return torch.where(mask, weights, 0.0)


def likelihood_displacement(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> Tensor:
    """``(B, R)``: by how many nats each token became less likely that should not have, 0 elsewhere.

    Over the actions a (turns, the runs of sampled tokens) and their tokens of advantage >= 0,
    ``1[sum_{t in a} (log pi_old - log pi)_t > 0] max(0, (log pi_old - log pi)_t)``: an action that became less likely
    as a whole counts with those of its tokens that are to blame. Penalties on bad episodes also push down the good
    ones that share their words; as likelihoods sink, gradients grow, until the run collapses. As a loss (aggregated
    like the policy's) it is LLDS with the action-level gate. Deng et al. 2025 (arXiv:2512.04220).
    """
    mask = response_mask.bool() & (advantages >= 0)
    drop = torch.where(mask, old_log_prob - log_prob, 0.0)
    owner = turn_owner(response_mask)
    by_action = torch.zeros_like(drop).scatter_add(1, owner, drop.detach())
    return torch.where(by_action.gather(1, owner) > 0, drop.clamp_min(0.0), 0.0)


# ---------------------------------------------------------------------------------------------- KL, entropy schedule
def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(-d) - 1 + d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d**2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """KL(pi || ref) at tokens sampled from pi, same shape as given. With ``d = log pi - log ref``:

    ``k1 = d`` is unbiased, but as a loss its expected gradient is 0; ``k2 = d^2 / 2`` is biased with the right
    gradient; ``k3 = exp(-d) - 1 + d`` (``low_var_kl``) is unbiased and never negative; |d| counts up to 20 in it.
    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"kl_loss_type={kind!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](log_prob - ref_log_prob)


ENTROPY_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: math.cos(0.5 * math.pi * done),
    "linear": lambda done: 1.0 - done,
}


def entropy_coefficient(base: float, schedule: str, step: int, total_steps: int) -> float:
    """``base`` times the schedule at ``step / total_steps``; cosine is ``base cos(pi step / (2 total_steps))``."""
    if schedule not in ENTROPY_SCHEDULES:
        raise ValueError(f"entropy_schedule={schedule!r} is unknown; choose one of {', '.join(ENTROPY_SCHEDULES)}")
    return base * ENTROPY_SCHEDULES[schedule](min(max(step / max(total_steps, 1), 0.0), 1.0))
