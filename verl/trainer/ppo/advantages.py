"""Rewards to advantages, as pure functions on tensors.

Shapes: B episodes, R response length, T turns (the most of any episode), N sampled tokens. ``response_mask (B, R)`` is
1 on the tokens that the policy sampled. A row that is masked throughout (a failed episode, a pad row) counts nowhere:
not in its group's statistics, not as a sequence, not in the loss.

The return of an episode is discounted between turns only, ``sum_k gamma^k r_k`` with ``r_k`` all reward placed in
turn k, because potential-based shaping (Ng, Harada, Russell 1999) is written in those steps. All statistics are in
float64: eight float32 rewards of .7 have a deviation of 6e-8, and noise over noise is not an advantage.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6  # added to a deviation before dividing by it
SAME_REWARD = 1e-6  # a group whose rewards lie this close together carries no signal

Advantages = tuple[Tensor, Tensor]
Labels = Tensor | Sequence[Any]  # (B,), one label an episode: a tensor, an array of uids, a list


# ---------------------------------------------------------------------------------------------------------- returns
class TurnReturns(NamedTuple):
    """``row, column, turn (N,)`` long: where each sampled token is, in order, and the turn it belongs to;
    ``reached (B, T)`` bool: the episode has that turn; ``returns (B, T)`` float64: discounted return-to-go;
    ``alive (B,)`` bool: the episode has a sampled token at all."""

    row: Tensor
    column: Tensor
    turn: Tensor
    reached: Tensor
    returns: Tensor
    alive: Tensor

    def on_tokens(self, values: Tensor, like: Tensor) -> Tensor:
        """``values (N,)`` on the sampled tokens, 0 elsewhere: ``(B, R)`` float32, in the shape of ``like``."""
        return torch.zeros(like.shape, device=like.device).index_put_((self.row, self.column), values.float())


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


def _owners(row: Tensor, column: Tensor, turn_index: Tensor) -> Tensor:
    """``turn_owner(turn_index)[row, column]``, at the cost of those places alone: all but a few name their turn."""
    owner = turn_index[row, column]
    between = owner < 0
    if between.any():
        rows, place = row[between].unique(return_inverse=True)
        owner[between] = turn_owner(turn_index, turn_index[rows])[place, column[between]]
    return owner


def turn_returns(
    token_level_rewards: Tensor, response_mask: Tensor, turn_index: Tensor | None = None, gamma: float = 1.0
) -> TurnReturns:
    """Return-to-go of every turn: ``G_k = r_k + gamma G_{k+1}``.

    A reward on a token that nobody sampled (an observation, padding) goes to the turn before it: none is lost.
    """
    turn_index = turn_owner(response_mask) if turn_index is None else turn_index
    row, column = response_mask.nonzero(as_tuple=True)
    turn = _owners(row, column, turn_index)
    paid, place = token_level_rewards.nonzero(as_tuple=True)  # rewards are sparse: a few a turn
    paid_turn = _owners(paid, place, turn_index)
    alive = torch.zeros(len(response_mask), dtype=torch.bool, device=row.device).index_fill_(0, row, True)
    last = torch.zeros(len(alive), dtype=torch.long, device=row.device)
    for rows, turns in ((row, turn), (paid, paid_turn)):
        last = last.scatter_reduce(0, rows, turns, "amax")
    numbers = torch.arange(int(last.max()) + 1, device=row.device)
    returns = torch.zeros(len(alive), len(numbers), dtype=torch.float64, device=row.device)
    returns.index_put_((paid, paid_turn), token_level_rewards[paid, place].double(), accumulate=True)
    for k in range(len(numbers) - 2, -1, -1):
        returns[:, k] += gamma * returns[:, k + 1]
    return TurnReturns(row, column, turn, (numbers <= last[:, None]) & alive[:, None], returns, alive)


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


def silent_rows(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Labels,
    *,
    turn_index: Tensor | None = None,
    gamma: float = 1.0,
    by_turn: bool = False,
    **_: Any,
) -> Tensor:
    """``(B,)`` bool: the rows of groups that carry no signal, whose returns lie within 1e-6 of one another.

    ``by_turn``: and their returns-to-go at every turn too, which is what ``grpo_turn`` compares. A group of one, and
    one in which nothing was sampled, carry none.
    """
    turns = turn_returns(token_level_rewards, response_mask, turn_index, gamma)
    ids = group_ids(group_index).to(turns.alive.device)
    row, k = (turns.reached if by_turn else turns.reached[:, :1]).nonzero(as_tuple=True)
    width = turns.returns.shape[1]
    loud = group_stats(turns.returns[row, k], ids[row] * width + k).spread > SAME_REWARD
    return ~torch.isin(ids, ids[row[loud]])


def zero_variance_groups(
    token_level_rewards: Tensor, response_mask: Tensor, group_index: Labels, **options: Any
) -> tuple[int, int]:
    """How many groups are silent (see ``silent_rows``), and how many groups sampled anything at all."""
    ids, alive = group_ids(group_index), response_mask.bool().any(dim=1).cpu()
    silent = silent_rows(token_level_rewards, response_mask, group_index, **options).cpu()
    return len(ids[silent & alive].unique()), len(ids[alive].unique())


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
    return turns.on_tokens(advantage[turns.row], response_mask), turns.on_tokens(score[turns.row], response_mask)


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
    return turns.on_tokens(advantage[turns.row], response_mask), turns.on_tokens(score[turns.row], response_mask)


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
    to_go = turns.returns[turns.row, turns.turn] - _paid_before(turns, token_level_rewards)
    if len(to_go) < 2 or to_go.max() - to_go.min() <= SAME_REWARD:
        advantages = torch.zeros_like(to_go)
    else:
        advantages = (to_go - to_go.mean()) / (to_go.std() + epsilon)
    return turns.on_tokens(advantages, response_mask), turns.on_tokens(to_go, response_mask)


def _paid_before(turns: TurnReturns, token_level_rewards: Tensor) -> Tensor:
    """``(N,)`` float64: the reward that a token's own turn was paid on its earlier sampled tokens."""
    rewards = token_level_rewards[turns.row, turns.column].double()
    first = torch.ones_like(turns.row, dtype=torch.bool)  # the first sampled token of its turn
    first[1:] = (turns.row[1:] != turns.row[:-1]) | (turns.turn[1:] != turns.turn[:-1])
    so_far = rewards.cumsum(0) - rewards
    return so_far - so_far[first][first.cumsum(0) - 1]


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
    advantages, to_go = by_turn[turns.row, turns.turn], turns.returns[turns.row, turns.turn]
    return turns.on_tokens(advantages, response_mask), turns.on_tokens(to_go, response_mask)


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
