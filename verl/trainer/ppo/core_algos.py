"""The algorithms, as pure functions on tensors: advantages, policy losses, KL, aggregation.

Shapes: B episodes, R response length, T turns (the most of any episode). ``response_mask (B, R)`` is 1 on the tokens
that the policy sampled. A row that is masked throughout (a failed episode, a pad row) counts nowhere: not in its
group's statistics, not as a sequence, not in the loss.

The return of an episode is discounted between turns only, ``sum_k gamma^k r_k`` with ``r_k`` all reward placed in
turn k, because potential-based shaping (Ng, Harada, Russell 1999) is written in those steps. All statistics are in
float64: eight float32 rewards of .7 have a deviation of 6e-8, and noise over noise is not an advantage.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6  # added to a deviation before dividing by it
SAME_REWARD = 1e-6  # a group whose rewards lie this close together carries no signal
MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside every clip range, and far from overflow

Advantages = tuple[Tensor, Tensor]
Labels = Tensor | Sequence[Any]  # (B,), one label an episode: a tensor, an array of uids, a list


# ---------------------------------------------------------------------------------------------------------- returns
class TurnReturns(NamedTuple):
    """``owner (B, R)`` long: the turn that a position belongs to; ``reached (B, T)`` bool: the episode has that turn;
    ``returns (B, T)`` float64: discounted return-to-go; ``alive (B,)`` bool: the episode has a sampled token at all."""

    owner: Tensor
    reached: Tensor
    returns: Tensor
    alive: Tensor


def turn_owner(response_mask: Tensor, turn_index: Tensor | None = None) -> Tensor:
    """``(B, R)`` long: the turn of each sampled token, and for other positions the turn before them (0 if none).

    ``turn_index (B, R)``: k on the sampled tokens of turn k, -1 elsewhere. None: turn k is the k-th run of sampled
    tokens in the mask, which is exact, since the frame of an observation parts any two turns.
    """
    if turn_index is not None:
        return turn_index.cummax(dim=1).values.clamp_min_(0)
    mask = response_mask.bool()
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts.cumsum(dim=1).sub_(1).clamp_min_(0)


def turn_returns(
    token_level_rewards: Tensor, response_mask: Tensor, turn_index: Tensor | None = None, gamma: float = 1.0
) -> TurnReturns:
    """Return-to-go of every turn: ``G_k = r_k + gamma G_{k+1}``.

    A reward on a token that nobody sampled (an observation, padding) goes to the turn before it: none is lost.
    """
    owner, alive = turn_owner(response_mask, turn_index), response_mask.bool().any(dim=1)
    last = owner.amax(dim=1, keepdim=True)
    turns = torch.arange(int(last.max()) + 1, device=owner.device)
    row, t = token_level_rewards.nonzero(as_tuple=True)  # rewards are sparse: a few a turn
    returns = torch.zeros(len(owner), len(turns), dtype=torch.float64, device=owner.device)
    returns.index_put_((row, owner[row, t]), token_level_rewards[row, t].double(), accumulate=True)
    for k in range(len(turns) - 2, -1, -1):
        returns[:, k] += gamma * returns[:, k + 1]
    return TurnReturns(owner, (turns <= last) & alive[:, None], returns, alive)


# ------------------------------------------------------------------------------------------------- group statistics
class GroupStats(NamedTuple):
    """Statistics of the group that each value belongs to, all ``(N,)`` float64; ``std`` has ddof=1, 0 for one value."""

    count: Tensor
    mean: Tensor
    std: Tensor
    spread: Tensor


def group_ids(group_index: Labels) -> Tensor:
    """``(B,)`` long: 0, 1, ... in order of appearance, from any hashable labels."""
    labels = group_index.tolist() if hasattr(group_index, "tolist") else list(group_index)
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.long)


def group_stats(values: Tensor, ids: Tensor) -> GroupStats:
    """``values (N,)`` float64, ``ids (N,)`` long."""
    groups = int(ids.max()) + 1 if ids.numel() else 0
    zeros = values.new_zeros(groups)
    count = zeros.index_add(0, ids, torch.ones_like(values))
    mean = zeros.index_add(0, ids, values) / count.clamp_min(1)
    square = zeros.index_add(0, ids, (values - mean[ids]) ** 2)
    std = (square / (count - 1).clamp_min(1)).sqrt()
    high = zeros.scatter_reduce(0, ids, values, "amax", include_self=False)
    low = zeros.scatter_reduce(0, ids, values, "amin", include_self=False)
    return GroupStats(count[ids], mean[ids], std[ids], (high - low)[ids])


def zero_variance_groups(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    **_: Any,
) -> tuple[int, int]:
    """How many groups have one return throughout (a group of one among them), and how many groups there are."""
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    ids = group_ids(group_index).to(turns.alive.device)[turns.alive]
    stats = group_stats(turns.returns[turns.alive, 0], ids)
    return len(ids[stats.spread <= SAME_REWARD].unique()), len(ids.unique())


# ------------------------------------------------------------------------------------------------------- advantages
def _outcome(
    formula: Callable[[Tensor, GroupStats], Tensor],
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    zero_variance_rule: bool = True,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    **_: Any,
) -> Advantages:
    """One advantage an episode, on all its sampled tokens: ``formula(return, statistics of its group)``."""
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    alive, score = turns.alive, turns.returns[:, 0]
    stats = group_stats(score[alive], group_ids(group_index).to(alive.device)[alive])
    silent = stats.spread <= SAME_REWARD if zero_variance_rule else stats.count < 2
    advantage = torch.zeros_like(score)
    advantage[alive] = formula(score[alive], stats).masked_fill(silent, 0.0)
    return _on_tokens(advantage[:, None], response_mask), _on_tokens(score[:, None], response_mask)


def _on_tokens(values: Tensor, response_mask: Tensor) -> Tensor:
    """``values (B, 1)`` or ``(B, R)`` on the sampled tokens, 0 elsewhere: ``(B, R)`` float32."""
    return torch.where(response_mask.bool(), values.float(), 0.0)


def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Labels, *, epsilon: float = EPSILON, **options: Any
) -> Advantages:
    """``A_i = (r_i - mean) / (std + eps)`` in its group, ddof=1. DeepSeekMath (Shao et al. 2024, arXiv:2402.03300)."""

    def formula(r: Tensor, group: GroupStats) -> Tensor:
        return (r - group.mean) / (group.std + epsilon)

    return _outcome(formula, token_level_rewards, response_mask, group_index, **options)


def drgrpo(token_level_rewards: Tensor, response_mask: Tensor, group_index: Labels, **options: Any) -> Advantages:
    """``A_i = r_i - mean``: no deviation, so that an easy or hard question weighs no more than another.

    Its loss is aggregated as ``seq-mean-token-sum-norm``. Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    """
    return _outcome(lambda r, group: r - group.mean, token_level_rewards, response_mask, group_index, **options)


def std_only(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Labels, *, epsilon: float = EPSILON, **options: Any
) -> Advantages:
    """``A_i = r_i / (std + eps)``, raw: a group whose rewards are all -1 gets -1 / (0 + 1e-6) = -1,000,000.

    What the first MiniResearcher called Dr. GRPO, the wrong half of GRPO taken away. Kept to reproduce its explosion,
    hence without the zero-variance rule.
    """

    def formula(r: Tensor, group: GroupStats) -> Tensor:
        return r / (group.std + epsilon)

    return _outcome(formula, token_level_rewards, response_mask, group_index, zero_variance_rule=False, **options)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, group_index: Labels, **options: Any) -> Advantages:
    """``A_i = r_i - mean of the others = (r_i - mean) n / (n - 1)``. RLOO (Ahmadian et al. 2024, arXiv:2402.14740)."""

    def formula(r: Tensor, group: GroupStats) -> Tensor:
        return (r - group.mean) * group.count / (group.count - 1).clamp_min(1)

    return _outcome(formula, token_level_rewards, response_mask, group_index, **options)


def remax(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    baselines: Tensor | None = None,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    **_: Any,
) -> Advantages:
    """``A_i = r_i - b_i``, ``b (B,)`` the return of the greedy episode of the same question.

    No group takes part, so one sample a question is enough. ReMax (Li et al. 2023, arXiv:2310.10505).

    Raises: ValueError without ``baselines``.
    """
    if baselines is None:
        raise ValueError(
            "adv_estimator=remax needs baselines (B,), the return of each question's greedy episode, and got None; "
            "roll the questions out at temperature 0 and pass their returns, or choose adv_estimator=rloo"
        )
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    score = turns.returns[:, 0]
    advantage = score - baselines.double()
    advantage = advantage.masked_fill(advantage.abs() <= SAME_REWARD, 0.0)
    return _on_tokens(advantage[:, None], response_mask), _on_tokens(score[:, None], response_mask)


def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    epsilon: float = EPSILON,
    **_: Any,
) -> Advantages:
    """``A_t = (G_t - mean) / (std + eps)`` over all sampled tokens of the batch, ``G_t`` the return from token t on.

    The return runs on across observations: a search is paid by the answer it led to. Groups take no part.
    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).
    """
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    plain = turn_returns(token_level_rewards, response_mask, turn_index)
    # Undiscounted to the end, then what comes after this turn exchanged for its discounted value.
    later = torch.nn.functional.pad(gamma * turns.returns[:, 1:] - plain.returns[:, 1:], (0, 1))
    so_far = token_level_rewards.cumsum(dim=1, dtype=torch.float64)
    to_go = so_far[:, -1:] - so_far + token_level_rewards + later.gather(1, turns.owner)
    tokens = to_go[response_mask.bool()]
    if len(tokens) < 2 or tokens.max() - tokens.min() <= SAME_REWARD:
        advantages = torch.zeros_like(to_go)
    else:
        advantages = (to_go - tokens.mean()) / (tokens.std() + epsilon)
    return _on_tokens(advantages, response_mask), _on_tokens(to_go, response_mask)


def grpo_turn(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    epsilon: float = EPSILON,
    min_samples: int = 2,
    **_: Any,
) -> Advantages:
    """``A_{i,k} = (G_{i,k} - mean_k) / (std_k + eps)``: return-to-go of turn k against the group's at the same turn.

    Closed shaping adds the same -Phi(s_0) to every episode of a group, so that a sum over the episode can't see it;
    the return-to-go of turn k is R - Phi(s_k), which can. After the turn-level credit of Zeng et al. 2025
    (arXiv:2505.11821).

    Where fewer than ``min_samples`` episodes of the group reached turn k there is nothing to compare with (below two
    there is no deviation), and the turn takes its episode's advantage from the group's statistics,
    ``(G_{i,0} - mean_0) / (std_0 + eps)``, as in ``grpo``. ``G_{i,k}`` itself under those statistics would be unfair:
    the last turn of the only episode that searched has R - Phi ~ 0, and would be punished for a right answer.
    """
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    ids = group_ids(group_index).to(turns.alive.device)
    row, k = turns.reached.nonzero(as_tuple=True)
    returns, width = turns.returns[row, k], turns.returns.shape[1]
    stats = group_stats(returns, ids[row] * width + k)
    advantage = ((returns - stats.mean) / (stats.std + epsilon)).masked_fill(stats.spread <= SAME_REWARD, 0.0)

    alive, score = turns.alive, turns.returns[:, 0]
    group = group_stats(score[alive], ids[alive])
    episode = torch.zeros_like(score)
    episode[alive] = ((score[alive] - group.mean) / (group.std + epsilon)).masked_fill(group.spread <= SAME_REWARD, 0.0)

    by_turn = torch.zeros_like(turns.returns)
    by_turn[row, k] = torch.where(stats.count < min_samples, episode[row], advantage)
    advantages, to_go = by_turn.float().gather(1, turns.owner), turns.returns.float().gather(1, turns.owner)
    return _on_tokens(advantages, response_mask), _on_tokens(to_go, response_mask)


# Each: (token_level_rewards (B, R), response_mask (B, R), group_index (B,), **options) -> (advantages, returns), both
# (B, R) float32 and 0 where nothing was sampled. Options that an estimator has no use for are ignored, so that the
# trainer passes the same ones to all: turn_index (B, R), gamma, epsilon, baselines (B,), min_samples.
ADVANTAGE_ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    "grpo": grpo,
    "drgrpo": drgrpo,
    "std_only": std_only,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "grpo_turn": grpo_turn,
}


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
    denominators: Denominators | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss and metrics of a micro-batch; all tensors ``(B, R)``, ``advantages`` float32.

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
    loss = aggregate_loss(terms.loss, mask, loss_agg_mode, denominators)

    with torch.no_grad():
        tokens = max((denominators or count_denominators(mask)).tokens, 1.0)
        held, dual, over = terms.clipped & mask, terms.dual & mask, raw.abs() > MAX_LOG_RATIO
        sums = torch.stack([loss.double(), held.sum() / tokens, dual.sum() / tokens, -raw.sum() / tokens, over.sum()])
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    metrics = {f"actor/{name}": value for name, value in zip(names, sums.tolist()[:4], strict=True)}
    return loss, metrics | {"stability/log_ratio_clamped": float(sums[4])}


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
