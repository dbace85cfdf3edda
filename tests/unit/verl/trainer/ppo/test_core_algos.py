"""The algorithms' numbers, by hand or against slow loops. Fixture: groups A and B, N = 6, 14 tokens, Lmax = 8."""

import math
import subprocess
import sys

import pytest
import torch

from verl.trainer.ppo.core_algos import (
    AGGREGATIONS,
    Denominators,
    aggregate_loss,
    count_denominators,
    entropy_coefficient,
    kl_penalty,
    likelihood_displacement,
    policy_loss,
    rollout_weights,
)

LENGTHS = [2, 4, 2, 3, 1, 2]
CENTRED = [2 / 3, -1 / 3, -1 / 3, 0.0, 0.0, 0.0]  # rewards 1, 0, 0 and .1, .1, .1, less their groups' means


# ------------------------------------------------------------------------------------------ aggregation and gradients
def centred_batch():
    mask = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).float()
    return torch.tensor(CENTRED)[:, None] * mask, mask


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
