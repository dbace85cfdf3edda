"""The algorithms' numbers, by hand or against slow loops. Fixture: groups A and B, N = 6, 14 tokens, Lmax = 8."""

import math
import random
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from verl.trainer.ppo.core_algos import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    Denominators,
    aggregate_loss,
    count_denominators,
    entropy_coefficient,
    kl_penalty,
    likelihood_displacement,
    policy_loss,
    rollout_weights,
    silent_rows,
    turn_owner,
    zero_variance_groups,
)

LENGTHS = [2, 4, 2, 3, 1, 2]
REWARDS = [1.0, 0.0, 0.0, 0.1, 0.1, 0.1]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
GROUP_ESTIMATORS = ["grpo", "drgrpo", "rloo", "grpo_turn"]


def one_turn(rewards, lengths, width=8):
    """Episodes of one turn, the reward on its last token: (rewards (B, R), mask (B, R))."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).float()
    scores = torch.zeros(len(lengths), width)
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        scores[i, max(length, 1) - 1] = reward
    return scores, mask


def from_turns(episodes):
    """Episodes given as lists of (sampled tokens, reward), two observation tokens between turns."""
    rows = []
    for turns in episodes:
        row = []
        for k, (length, reward) in enumerate(turns):
            row += [(0.0, 0)] * (2 if k else 0) + [(0.0, 1)] * (length - 1) + [(reward, 1)]
        rows.append(row)
    width = max(map(len, rows)) + 1
    padded = [row + [(0.0, 0)] * (width - len(row)) for row in rows]
    data = torch.tensor(padded)
    return data[..., 0], data[..., 1]


def estimate(name, rewards, mask, groups, **options):
    return ADVANTAGE_ESTIMATORS[name](rewards, mask, groups, **options)


def turn_index_of(mask):
    """k on the sampled tokens of turn k, -1 elsewhere."""
    rows = []
    for row in mask.tolist():
        k, before, out = -1, 0, []
        for sampled in row:
            k += bool(sampled and not before)
            out.append(k if sampled else -1)
            before = sampled
        rows.append(out)
    return torch.tensor(rows)


def per_turn(values, mask):
    """The value at each turn's last token, row by row."""
    index = turn_index_of(mask)
    return [[values[i][index[i] == k][-1].item() for k in range(int(index[i].max()) + 1)] for i in range(len(values))]


# ------------------------------------------------------------------------------------------------------- advantages
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("drgrpo", [2 / 3, -1 / 3, -1 / 3]),
        ("grpo", [1.1547, -0.5774, -0.5774]),
        ("grpo_turn", [1.1547, -0.5774, -0.5774]),
        ("rloo", [1.0, -0.5, -0.5]),
    ],
)
def test_fixture_advantages(name, expected):
    rewards, mask = one_turn(REWARDS, LENGTHS)
    advantages, returns = estimate(name, rewards, mask, GROUPS)
    assert advantages.dtype == torch.float32
    expected = torch.tensor([*expected, 0, 0, 0])[:, None] * mask
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)  # epsilon takes 1e-6
    assert torch.equal(advantages[3:], torch.zeros(3, 8))  # group B exactly, not nearly
    torch.testing.assert_close(returns, torch.tensor(REWARDS)[:, None] * mask)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_eight_times_point_seven_is_silence_not_noise(name):
    noisy = torch.full((8,), 0.7)
    off = abs(noisy.mean().item() - noisy[0].item())
    assert off == pytest.approx(6e-8, rel=0.1) and noisy.std().item() == pytest.approx(6.4e-8, rel=0.1)
    rewards, mask = one_turn(noisy.tolist(), [3] * 8)
    advantages, _ = estimate(name, rewards, mask, torch.zeros(8))
    assert torch.equal(advantages, torch.zeros_like(advantages))
    assert zero_variance_groups(rewards, mask, torch.zeros(8)) == (1, 1)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_spread_just_above_the_rule_keeps_its_sign(name):
    rewards, mask = one_turn([0.5, 0.5 + 1e-5], [2, 2])
    advantages, _ = estimate(name, rewards, mask, torch.zeros(2))
    assert advantages[0, 0] < 0 < advantages[1, 0]


def test_std_only_reaches_minus_one_million():
    rewards, mask = one_turn([-1.0] * 4, [2, 3, 4, 5])
    advantages, _ = estimate("std_only", rewards, mask, torch.zeros(4))
    torch.testing.assert_close(advantages, -1e6 * mask)
    rewards, mask = one_turn([1.0, 0.0, 0.0], [2, 2, 2])
    advantages, _ = estimate("std_only", rewards, mask, torch.zeros(3))
    torch.testing.assert_close(advantages[:, 0], torch.tensor([math.sqrt(3), 0, 0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "std_only"])
def test_a_group_of_one_gives_zero(name):
    rewards, mask = one_turn([-1.0, 1.0, 0.0], [2, 3, 2])
    advantages, _ = estimate(name, rewards, mask, ["alone", "pair", "pair"])
    assert torch.equal(advantages[0], torch.zeros(8))
    assert (advantages[1, :3] > 0).all()
    assert zero_variance_groups(rewards, mask, ["alone", "pair", "pair"]) == (1, 2)


@pytest.mark.parametrize("name", [n for n in ADVANTAGE_ESTIMATORS if n != "remax"])
def test_a_fully_masked_row_changes_nothing(name):
    rewards, mask = one_turn([1.0, 0.0, 0.25, 0.5, 0.5], [2, 4, 2, 1, 3])
    groups = torch.tensor([0, 0, 0, 1, 1])
    expected, expected_returns = estimate(name, rewards, mask, groups)
    with_dead = torch.cat([rewards, torch.full((1, 8), 7.0)]), torch.cat([mask, torch.zeros(1, 8)])
    advantages, returns = estimate(name, *with_dead, torch.tensor([0, 0, 0, 1, 1, 0]))
    assert torch.equal(advantages, torch.cat([expected, torch.zeros(1, 8)]))
    assert torch.equal(returns, torch.cat([expected_returns, torch.zeros(1, 8)]))
    nothing, _ = estimate(name, rewards, torch.zeros_like(mask), groups)
    assert torch.equal(nothing, torch.zeros_like(mask))


def test_silence_is_judged_as_the_estimator_looks():
    alike = [(1, 0.5), (1, 0.5)], [(1, 0.5), (1, 0.5)]
    moved = [(1, 1.0), (1, 0.0)], [(1, 0.0), (1, 1.0)]  # the same sum, earned at another turn
    apart = [(1, 0.0), (1, 1.0)], [(1, 0.0)]
    rewards, mask = from_turns([*alike, *moved, *apart, [(2, 1.0)]])
    groups = ["a", "a", "m", "m", "x", "x", "one"]
    by_sum, by_turn = (silent_rows(rewards, mask, groups, by_turn=by_turn).tolist() for by_turn in (False, True))
    assert by_sum == [True, True, True, True, False, False, True]
    assert by_turn == [True, True, False, False, False, False, True]
    assert zero_variance_groups(rewards, mask, groups) == (3, 4)
    assert zero_variance_groups(rewards, mask, groups, by_turn=True) == (2, 4)
    # Discounted, 1 + 0 and 0 + .5 differ.
    assert silent_rows(rewards, mask, groups, gamma=0.5).tolist() == [True, True, False, False, False, False, True]
    mask[4:6] = 0  # a group that failed throughout has nothing to teach, and is no group
    assert silent_rows(rewards, mask, groups).all()
    assert zero_variance_groups(rewards, mask, groups) == (3, 3)
    for name, silent in (("grpo", by_sum), ("grpo_turn", by_turn)):
        loud = estimate(name, *from_turns([*alike, *moved, *apart, [(2, 1.0)]]), groups)[0].any(dim=1)
        assert loud.tolist() == [not quiet for quiet in silent]


def test_group_labels_may_be_uids_in_any_order_and_ragged():
    rewards, mask = one_turn([0.0, 1.0, 0.5, 0.0, 1.0], [1, 2, 3, 4, 5])
    uids = np.array(["b", "a", "b", "a", "a"], dtype=object)
    advantages, _ = estimate("drgrpo", rewards, mask, uids)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-0.25, 1 / 3, 0.25, -2 / 3, 1 / 3]))
    again, _ = estimate("drgrpo", rewards, mask, uids.tolist())
    assert torch.equal(advantages, again)


def test_remax_subtracts_the_greedy_return_and_needs_it():
    rewards, mask = one_turn([1.0, 0.0, 0.3], [2, 3, 2])
    advantages, returns = estimate("remax", rewards, mask, [0, 1, 2], baselines=torch.tensor([0.25, 0.25, 0.3]))
    torch.testing.assert_close(advantages, torch.tensor([0.75, -0.25, 0.0])[:, None] * mask)
    torch.testing.assert_close(returns[:, 0], torch.tensor([1.0, 0.0, 0.3]))
    with pytest.raises(ValueError, match="baselines.*temperature 0"):
        estimate("remax", rewards, mask, [0, 1, 2])


# ---------------------------------------------------------------------------------------------------- turns and PBRS
PHI = [0.2, 0.5, 0.9]


def shaped(outcome, gamma, phi=PHI):
    """Turn rewards of closed shaping: gamma Phi(s_{k+1}) - Phi(s_k), and -Phi(s_T) with the outcome at the end."""
    after = [*phi[1:], 0.0]
    rewards = [gamma * b - a for a, b in zip(phi, after, strict=True)]
    rewards[-1] += outcome
    return [(2, r) for r in rewards]


def test_turns_are_read_off_the_mask_or_given():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0] * 8])
    expected = [[0, 0, 0, 0, 1, 1, 2, 2], [0] * 8, [0] * 8]
    assert turn_owner(mask).tolist() == expected
    assert turn_owner(mask, turn_index_of(mask)).tolist() == expected


def test_a_reward_on_an_observation_goes_to_the_turn_before_it():
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0.5, 0, 0, 0.25]])
    _, returns = estimate("grpo_turn", rewards, mask, [0], gamma=0.5)
    assert returns.tolist() == [[0.625, 0.625, 0, 0, 0.25, 0]]


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_closed_shaping_sums_to_minus_phi0_and_leaves_r_minus_phi_to_go(outcome):
    rewards, mask = from_turns([shaped(outcome, 1.0)])
    assert rewards.sum().item() == pytest.approx(outcome - 0.2, abs=1e-6)
    _, returns = estimate("grpo", rewards, mask, [0])
    assert returns[0, 0].item() == pytest.approx(outcome - PHI[0], abs=1e-6)
    _, to_go = estimate("grpo_turn", rewards, mask, [0])
    assert per_turn(to_go, mask)[0] == pytest.approx([outcome - phi for phi in PHI], abs=1e-6)


def test_discounted_shaping_telescopes_only_under_its_own_gamma():
    rewards, mask = from_turns([shaped(0.0, 0.9)])
    _, undiscounted = estimate("grpo", rewards, mask, [0], gamma=1.0)
    _, discounted = estimate("grpo", rewards, mask, [0], gamma=0.9)
    assert undiscounted[0, 0].item() == pytest.approx(-0.34, abs=1e-6)
    assert discounted[0, 0].item() == pytest.approx(-0.2, abs=1e-6)


def test_only_the_turn_level_estimator_sees_closed_shaping():
    lucky, poor = shaped(1.0, 1.0, [0.0, 0.8, 1.0]), shaped(1.0, 1.0, [0.0, 0.1, 1.0])
    rewards, mask = from_turns([lucky, poor])
    blind, _ = estimate("grpo", rewards, mask, [0, 0])
    assert torch.equal(blind, torch.zeros_like(blind))
    advantages = per_turn(estimate("grpo_turn", rewards, mask, [0, 0])[0], mask)
    # G = 1, .2, 0 against 1, .9, 0: equal at turns 0 and 2; at turn 1 the deviation is .7 / sqrt 2.
    assert advantages[0] == pytest.approx([0, -math.sqrt(0.5), 0], abs=1e-5)
    assert advantages[1] == pytest.approx([0, math.sqrt(0.5), 0], abs=1e-5)


def test_a_turn_that_few_reached_takes_the_groups_statistics():
    rewards, mask = from_turns([[(2, 0.0), (3, 0.5), (1, 0.5)], [(2, 0.0)], [(4, 0.0)]])
    advantages = per_turn(estimate("grpo_turn", rewards, mask, [0, 0, 0])[0], mask)
    # Only episode 0 reached turns 1 and 2: both get its episode's (1 - 1/3) / std(1, 0, 0).
    assert advantages[0] == pytest.approx([1.1547, 1.1547, 1.1547], abs=1e-4)
    assert advantages[1] == advantages[2] == pytest.approx([-0.5774], abs=1e-4)

    # Two at an index are compared with one another; min_samples=3 sends them to the group's statistics.
    rewards, mask = from_turns([[(1, 0.0), (1, 1.0)], [(1, 0.25), (1, 0.5)], [(1, 0.0)]])
    pair = per_turn(estimate("grpo_turn", rewards, mask, [0, 0, 0])[0], mask)
    assert [pair[0][1], pair[1][1]] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    fallback = per_turn(estimate("grpo_turn", rewards, mask, [0, 0, 0], min_samples=3)[0], mask)
    assert fallback[0][1] == fallback[0][0] == pytest.approx((1 - 1.75 / 3) / statistics.stdev([1, 0.75, 0]), abs=1e-4)


def random_episodes(rng, rows):
    episodes = [[(rng.randint(1, 4), rng.uniform(-1, 1)) for _ in range(rng.randint(1, 5))] for _ in range(rows)]
    return episodes, *from_turns(episodes)


def turn_returns_by_hand(episode, gamma):
    returns, ahead = [], 0.0
    for _, reward in reversed(episode):
        ahead = reward + gamma * ahead
        returns.insert(0, ahead)
    return returns


@pytest.mark.parametrize("seed", range(20))
def test_grpo_turn_against_a_slow_loop(seed):
    rng = random.Random(seed)
    episodes, rewards, mask = random_episodes(rng, 9)
    groups = [rng.randint(0, 2) for _ in episodes]
    gamma = rng.choice([1.0, 0.9, 0.5])
    returns = [turn_returns_by_hand(episode, gamma) for episode in episodes]

    def normal(value, values):
        if len(values) < 2 or max(values) - min(values) <= 1e-6:
            return 0.0
        return (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)

    expected = []
    for i, own in enumerate(returns):
        group = [returns[j] for j in range(len(returns)) if groups[j] == groups[i]]
        row = []
        for k, value in enumerate(own):
            same_turn = [other[k] for other in group if len(other) > k]
            first = [other[0] for other in group]
            row.append(normal(value, same_turn) if len(same_turn) > 1 else normal(own[0], first))
        expected.append(row)
    advantages, to_go = estimate("grpo_turn", rewards, mask, groups, gamma=gamma)
    for got, want in zip(per_turn(advantages, mask), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-4)
    for got, want in zip(per_turn(to_go, mask), returns, strict=True):
        assert got == pytest.approx(want, abs=1e-5)
    given, _ = estimate("grpo_turn", rewards, mask, groups, gamma=gamma, turn_index=turn_index_of(mask))
    assert torch.equal(given, advantages)
    assert torch.equal(advantages * (1 - mask), torch.zeros_like(advantages))


@pytest.mark.parametrize("seed", range(20))
def test_reinforce_plus_plus_against_a_slow_loop(seed):
    rng = random.Random(seed)
    episodes, _, mask = random_episodes(rng, 5)
    rewards = torch.tensor([[rng.uniform(-1, 1) for _ in row] for row in mask]) * mask
    gamma = rng.choice([1.0, 0.9, 0.5])
    index = turn_index_of(mask)
    expected = torch.zeros_like(rewards, dtype=torch.float64)
    for i in range(len(episodes)):
        ahead, turn = 0.0, int(index[i].max())
        for t in reversed(range(mask.shape[1])):
            if not mask[i, t]:
                continue
            if int(index[i, t]) < turn:
                ahead, turn = gamma * ahead, int(index[i, t])
            ahead = ahead + rewards[i, t].item()
            expected[i, t] = ahead
    advantages, returns = estimate("reinforce_plus_plus", rewards, mask, [0] * 5, gamma=gamma)
    torch.testing.assert_close(returns, expected.float(), atol=1e-5, rtol=0)
    tokens = expected[mask.bool()]
    normal = (expected - tokens.mean()) / (tokens.std() + 1e-6) * mask
    torch.testing.assert_close(advantages, normal.float(), atol=1e-4, rtol=0)


def test_reinforce_plus_plus_pays_the_search_for_the_answer():
    rewards, mask = from_turns([[(2, 0.0), (2, 1.0)], [(2, 0.0)]])
    advantages, returns = estimate("reinforce_plus_plus", rewards, mask, [0, 1])
    assert returns[0][mask[0].bool()].tolist() == [1, 1, 1, 1]  # also before the observation
    assert advantages[0, 0] > 0 > advantages[1, 0]
    constant, _ = estimate("reinforce_plus_plus", *one_turn([0.7] * 3, [1, 2, 3]), [0, 0, 0])
    assert torch.equal(constant, torch.zeros_like(constant))


@pytest.mark.parametrize("name", [n for n in ADVANTAGE_ESTIMATORS if n != "remax"])
def test_row_order_does_not_matter(name):
    rng = random.Random(3)
    _, rewards, mask = random_episodes(rng, 8)
    groups = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1])
    order = torch.tensor(rng.sample(range(8), 8))
    advantages, _ = estimate(name, rewards, mask, groups)
    shuffled, _ = estimate(name, rewards[order], mask[order], groups[order])
    torch.testing.assert_close(shuffled, advantages[order], atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------ aggregation and gradients
def centred_batch():
    rewards, mask = one_turn(REWARDS, LENGTHS)
    advantages, _ = estimate("drgrpo", rewards, mask, GROUPS)
    return advantages, mask


def gradient(rows, mode, denominators=None):
    """d loss / d log-prob at ratio 1, for some rows of the fixture."""
    advantages, mask = centred_batch()
    log_prob = torch.full((len(rows), 8), -1.0, requires_grad=True)
    loss, metrics = policy_loss(
        log_prob.detach(),
        log_prob,
        advantages[rows],
        mask[rows],
        clip_low=0.2,
        clip_high=0.28,
        clip_dual=3.0,
        loss_agg_mode=mode,
        denominators=denominators,
    )
    loss.backward()
    return loss.item(), log_prob.grad, metrics


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("seq-mean-token-mean", [-0.05556, 0.01389, 0.02778]),
        ("token-mean", [-0.04762, 0.02381, 0.02381]),
        ("seq-mean-token-sum-norm", [-0.01389, 0.00694, 0.00694]),
        ("seq-mean-token-sum", [-0.11111, 0.05556, 0.05556]),
    ],
)
def test_fixture_gradients(mode, expected):
    _, grad, _ = gradient(list(range(6)), mode)
    _, mask = centred_batch()
    expected = torch.tensor([*expected, 0, 0, 0])[:, None] * mask
    torch.testing.assert_close(grad, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [2, 4, 1]]])
def test_micro_batches_sum_to_the_whole(mode, parts):
    _, mask = centred_batch()
    counted = count_denominators(mask)
    assert counted == Denominators(tokens=14, sequences=6, max_length=8)
    whole_loss, whole_grad, whole_metrics = gradient(list(range(6)), mode)
    pieces = [gradient(rows, mode, counted) for rows in parts]
    assert sum(loss for loss, _, _ in pieces) == pytest.approx(whole_loss, abs=1e-7)
    grad = torch.zeros(6, 8)
    for rows, (_, piece, _) in zip(parts, pieces, strict=True):
        grad[rows] = piece
    torch.testing.assert_close(grad, whole_grad, atol=1e-8, rtol=1e-6)
    for name, value in whole_metrics.items():
        assert sum(metrics[name] for _, _, metrics in pieces) == pytest.approx(value, abs=1e-7)


def test_the_mean_of_micro_batch_means_is_the_bug_to_exclude():
    first, second = gradient([0, 1], "seq-mean-token-mean")[1], gradient([2, 3, 4, 5], "seq-mean-token-mean")[1]
    buggy = [first[0, 0].item() / 2, first[1, 0].item() / 2, second[0, 0].item() / 2]
    # The two groups of rows weigh the same although one has 2 sequences and the other 4. FACTS.md gives the bug as
    # -.05556, .02778, .02083 for a mean over tokens of each micro-batch; ours must equal neither.
    token_first, token_second = gradient([0, 1], "token-mean")[1], gradient([2, 3, 4, 5], "token-mean")[1]
    facts = [token_first[0, 0].item() / 2, token_first[1, 0].item() / 2, token_second[0, 0].item() / 2]
    assert facts == pytest.approx([-0.05556, 0.02778, 0.02083], abs=5e-6)
    for mode in ("token-mean", "seq-mean-token-mean"):
        whole = gradient(list(range(6)), mode)[1][:3, 0].tolist()
        assert whole != pytest.approx(facts, abs=1e-4)
        assert whole != pytest.approx(buggy, abs=1e-4)


def test_a_masked_sequence_is_no_sequence_and_lmax_can_be_given():
    mask = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert count_denominators(mask) == Denominators(3, 2, 4)
    assert count_denominators(mask, max_length=10).max_length == 10
    loss = torch.tensor([[1.0, 3, 9, 9], [9, 9, 9, 9], [5, 9, 9, 9]])
    expected = {
        "token-mean": 3.0,
        "seq-mean-token-mean": 3.5,
        "seq-mean-token-sum": 4.5,
        "seq-mean-token-sum-norm": 4.5 / 4,
    }
    for mode, value in expected.items():
        assert aggregate_loss(loss, mask, mode).item() == pytest.approx(value)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_nothing_sampled_is_zero_and_still_runs_backward(mode, kind):
    log_prob = torch.full((2, 3), float("nan"), requires_grad=True)
    zeros = torch.zeros(2, 3)
    loss, metrics = policy_loss(log_prob.detach(), log_prob, zeros, zeros, loss_agg_mode=mode, loss_kind=kind)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(log_prob.grad, zeros)
    assert metrics["actor/pg_clipfrac"] == 0


# ------------------------------------------------------------------------------------------------------ policy losses
def one_token(ratio, advantage, **options):
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0, "loss_agg_mode": "token-mean"} | options
    loss, metrics = policy_loss(
        torch.zeros(1, 1, dtype=torch.float64),
        log_prob,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1),
        **settings,
    )
    loss.backward()
    return loss.item(), log_prob.grad.item(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped", "dual"),
    [
        (1.5, 1.0, -1.28, 0.0, 1, 0),
        (0.5, 1.0, -0.5, -0.5, 0, 0),
        (1.5, -1.0, 1.5, 1.5, 0, 0),
        (0.5, -1.0, 0.8, 0.0, 1, 0),
        (4.0, -1.0, 3.0, 0.0, 0, 1),
        (1.0, 1.0, -1.0, -1.0, 0, 0),
    ],
)
def test_clip_table(ratio, advantage, loss, grad, clipped, dual):
    got_loss, got_grad, metrics = one_token(ratio, advantage)
    assert (got_loss, got_grad) == pytest.approx((loss, grad), abs=1e-12)
    assert (metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) == (clipped, dual)
    assert metrics["actor/pg_loss"] == pytest.approx(loss)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_without_dual_clip_the_bad_token_keeps_its_gradient():
    assert one_token(4.0, -1.0, clip_dual=None)[:2] == pytest.approx((4.0, 4.0))


def test_the_gradient_of_ppo_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(3, 5, generator=generator).double(), torch.randn(3, 5, generator=generator).double()
    log_prob = (old + 0.5 * torch.randn(3, 5, generator=generator)).double().requires_grad_()
    mask = (torch.rand(3, 5, generator=generator) > 0.3).float()
    assert torch.autograd.gradcheck(lambda x: policy_loss(old, x, advantages, mask)[0], log_prob)


def test_gspo_clips_the_sequence_not_the_token():
    # Ratios 2 and 1/2: each outside the range, their sequence's ratio is 1, so that nothing is clipped.
    log_prob = torch.tensor([[math.log(2.0), -math.log(2.0)]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
    arguments = (torch.zeros(1, 2), log_prob, advantages, mask)
    loss, metrics = policy_loss(*arguments, loss_agg_mode="seq-mean-token-mean", loss_kind="gspo")
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(-1.0)
    assert grad.tolist()[0] == pytest.approx([-0.5, -0.5])
    assert metrics["actor/pg_clipfrac"] == 0
    _, by_token = policy_loss(*arguments, loss_agg_mode="seq-mean-token-mean")
    assert by_token["actor/pg_clipfrac"] == 0.5  # A > 0: the ratio of 2 is held, the ratio of 1/2 is free

    # The gradient is that of -A exp(mean log ratio), a sequence at a time, masked tokens out of the mean.
    log_prob = torch.tensor([[0.1, 0.05, 9.0], [-0.1, 0.0, 0.06]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    advantages = torch.tensor([[1.0] * 3, [-2.0] * 3], dtype=torch.float64)
    loss, _ = policy_loss(
        torch.zeros(2, 3), log_prob, advantages, mask, loss_agg_mode="seq-mean-token-mean", loss_kind="gspo"
    )
    ratio = ((log_prob * mask).sum(1) / mask.sum(1)).exp()
    direct = -(advantages[:, 0] * ratio).mean()
    assert loss.item() == pytest.approx(direct.item())
    torch.testing.assert_close(torch.autograd.grad(loss, log_prob)[0], torch.autograd.grad(direct, log_prob)[0])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    for ratio, advantage, weight in [(1.5, 1.0, 1.28), (0.5, -1.0, 0.8), (4.0, -1.0, 1.28), (1.1, 2.0, 1.1)]:
        loss, grad, metrics = one_token(ratio, advantage, loss_kind="cispo")
        assert grad == pytest.approx(-weight * advantage)
        assert loss == pytest.approx(-weight * advantage * math.log(ratio))
        assert metrics["actor/pg_clipfrac"] == (weight != ratio)


# ------------------------------------------------------------------------- between engine and trainer, old and new
def test_rollout_weights_by_token_and_by_sequence():
    ratio = torch.tensor([[3.0, 0.5, 7.0], [0.5, 0.5, 1.0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
    engine = torch.full((2, 3), -2.0)
    trainer = engine + ratio.log()
    trainer[0, 2] = float("nan")  # an observation: whatever stands there counts nowhere
    by_token = rollout_weights(trainer, engine, mask, "token", 2.0)
    torch.testing.assert_close(by_token, torch.tensor([[2.0, 0.5, 0], [0.5, 0.5, 1]]))
    by_sequence = rollout_weights(trainer, engine, mask, "sequence", 2.0)
    torch.testing.assert_close(by_sequence, torch.tensor([[1.5, 1.5, 0], [0.25, 0.25, 0.25]]))
    capped = rollout_weights(trainer, engine, mask, "sequence", 1.25)
    assert capped[0].tolist() == [1.25, 1.25, 0]
    runaway = rollout_weights(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1), "token", 2.0)
    assert runaway.item() == 2.0


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_weighted_losses_make_the_gradient_of_the_trainers_policy(kind):
    """Sampled from q, weighed by p/q, the expected gradient at ratio 1 is that of sampling from p."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def gradient(sampled_from, weights):
        """Three episodes of one token, each as often as it is sampled."""
        log_prob = p.log()[:, None].clone().requires_grad_()
        total = 0.0
        for token, share in enumerate(sampled_from.tolist()):
            rows = slice(token, token + 1)
            loss, _ = policy_loss(
                p.log()[rows, None], log_prob[rows], advantages[rows, None], torch.ones(1, 1),
                loss_kind=kind, weights=None if weights is None else weights[rows],
            )  # fmt: skip
            total = total + share * loss
        return torch.autograd.grad(total, log_prob)[0]

    weights = rollout_weights(p.log()[:, None], q.log()[:, None], torch.ones(3, 1), "token", 1e9)
    torch.testing.assert_close(gradient(q, weights), gradient(p, None))
    assert not torch.allclose(gradient(q, None), gradient(p, None))


def test_displacement_counts_good_tokens_of_actions_that_lost_likelihood():
    # Two actions around an observation: the first lost .1 in all, by its first token; the second gained.
    old = torch.tensor([[-1.0, -1.0, 9.0, -1.0, -1.0]])
    new = torch.tensor([[-1.3, -0.8, 0.0, -1.2, -0.5]], requires_grad=True)
    mask = torch.tensor([[1.0, 1, 0, 1, 1]])
    good = likelihood_displacement(old, new, torch.zeros(1, 5), mask)
    torch.testing.assert_close(good, torch.tensor([[0.3, 0, 0, 0, 0]]))
    (gradient,) = torch.autograd.grad(good.sum(), new)
    assert gradient.tolist() == [[-1, 0, 0, 0, 0]]  # descent raises the one that fell
    assert not likelihood_displacement(old, new, torch.full((1, 5), -0.1), mask).any()  # bad ones may fall
    # The advantage may change within an action: only its good tokens are summed, and only they count.
    mixed = likelihood_displacement(old, new, torch.tensor([[-1.0, 1, 0, 1, -1]]), mask)
    torch.testing.assert_close(mixed, torch.tensor([[0.0, 0, 0, 0.2, 0]]))
    assert not likelihood_displacement(old, old, torch.ones(1, 5), mask).any()


def test_masked_nan_and_runaway_ratios_do_not_reach_the_gradient():
    old = torch.tensor([[0.0, float("nan"), -200.0]])
    log_prob = torch.tensor([[0.0, float("nan"), -0.1]], requires_grad=True)
    loss, metrics = policy_loss(old, log_prob, torch.tensor([[1.0, float("nan"), 1.0]]), torch.tensor([[1.0, 0, 1]]))
    loss.backward()
    assert loss.item() == pytest.approx(-(1 + 1.2) / 2)
    assert log_prob.grad.tolist()[0] == pytest.approx([-0.5, 0, 0])
    assert metrics["stability/log_ratio_clamped"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_kind": "pppo"}, "pppo.*ppo, gspo, cispo"),
        ({"loss_agg_mode": "mean"}, "'mean'.*token-mean"),
        ({"clip_dual": 0.9}, "clip_dual=0.9"),
        ({"clip_low": 1.2}, "clip_low=1.2"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        one_token(1.0, 1.0, **options)


# -------------------------------------------------------------------------------------------------------- KL, entropy
@pytest.mark.parametrize(("kind", "value"), [("k1", -0.5), ("k2", 0.125), ("k3", 0.14872), ("low_var_kl", 0.14872)])
def test_kl_forms(kind, value):
    got = kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), kind)
    assert got.item() == pytest.approx(value, abs=5e-6)


def test_kl_is_unbiased_and_bounded_and_refuses_unknown_names():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        assert (p * kl_penalty(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)
    assert torch.isfinite(kl_penalty(torch.tensor([-1e4]), torch.tensor([0.0]), "k3")).all()
    with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
        kl_penalty(p, q, "k4")


def test_entropy_schedules():
    assert entropy_coefficient(0.01, "cosine", 0, 90) == pytest.approx(0.01)
    assert entropy_coefficient(0.01, "cosine", 30, 90) == pytest.approx(0.01 * math.cos(math.pi * 30 / 180))
    assert entropy_coefficient(0.01, "cosine", 90, 90) == pytest.approx(0, abs=1e-12)
    assert entropy_coefficient(0.01, "linear", 25, 100) == pytest.approx(0.0075)
    assert entropy_coefficient(0.01, "linear", 500, 100) == 0
    assert entropy_coefficient(0.01, "constant", 77, 100) == 0.01
    with pytest.raises(ValueError, match="sine.*constant, cosine, linear"):
        entropy_coefficient(0.01, "sine", 1, 2)


# --------------------------------------------------------------------------------------------------- imports and speed
def test_imports_torch_and_nothing_heavier():
    code = (
        "import sys, verl.trainer.ppo.core_algos; "
        "heavy = {'ray', 'vllm', 'hydra', 'omegaconf', 'fastapi', 'transformers', 'tensordict'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_full_scale_batch_takes_little_cpu_time(name):
    mask = torch.ones(256, 8000)
    mask[:, ::1000] = 0
    rewards = torch.zeros(256, 8000)
    rewards[:, 7999] = torch.rand(256, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    estimate(name, rewards, mask, torch.arange(256) // 4, baselines=torch.zeros(256))
    assert time.process_time() - start < 1.0  # a quarter of the batch that has half a second; CI machines are busy
