"""The advantage estimators' numbers, by hand or against slow loops. Fixture: groups A and B, N = 6, 14 tokens."""

import math
import random
import statistics
import time

import numpy as np
import pytest
import torch

from verl.trainer.ppo.advantages import ADVANTAGE_ESTIMATORS, silent_rows, turn_owner, zero_variance_groups

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


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_full_scale_batch_takes_little_cpu_time(name):
    mask = torch.ones(256, 8000)
    mask[:, ::1000] = 0
    rewards = torch.zeros(256, 8000)
    rewards[:, 7999] = torch.rand(256, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    estimate(name, rewards, mask, torch.arange(256) // 4, baselines=torch.zeros(256))
    assert time.process_time() - start < 1.0  # a quarter of the batch that has half a second; CI machines are busy
