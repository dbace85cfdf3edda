"""Chunked log-probs against plain softmax: values, gradients, and what the guard touches."""

import math

import pytest
import torch

from verl.utils.torch_functional import ValueGuard, log_probs_from_hidden


def example(n=7, hidden=5, vocab=11, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    states = torch.randn(n, hidden, generator=gen, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=gen, dtype=dtype, requires_grad=True)
    return states, weight, torch.randint(0, vocab, (n,), generator=gen)


def plain(states, weight, targets, temperature):
    """The slow reference: whole logits, log_softmax, autograd."""
    log_p = torch.log_softmax(states @ weight.T / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_sampling_temperature_fixture():
    states, weight = torch.tensor([[2.0, 0.0]]), torch.eye(2)
    log_prob, _ = log_probs_from_hidden(states, weight, torch.tensor([0]), 0.5, ValueGuard())
    assert log_prob.item() == pytest.approx(-0.01815, abs=1e-5)
    log_prob, _ = log_probs_from_hidden(states, weight, torch.tensor([0]), 1.0, ValueGuard())
    assert log_prob.item() == pytest.approx(-0.12693, abs=1e-5)


def test_uniform_entropy_is_log_v():
    _, entropy = log_probs_from_hidden(
        torch.zeros(3, 4), torch.ones(9, 4), torch.zeros(3).long(), 1.0, ValueGuard(), True
    )
    torch.testing.assert_close(entropy, torch.full((3,), math.log(9)))


@pytest.mark.parametrize("logits_per_chunk", [1, 22, 33, 10**6])
def test_values_and_gradients_equal_plain_softmax(logits_per_chunk):
    states, weight, targets = example()
    upstream = torch.linspace(-1, 1, 7), torch.linspace(0.5, 2, 7)
    results = []
    for function in (
        lambda: plain(states, weight, targets, 0.7),
        lambda: log_probs_from_hidden(
            states, weight, targets, 0.7, ValueGuard(), True, logits_per_chunk=logits_per_chunk
        ),
    ):
        values = function()
        gradients = torch.autograd.grad(values, (states, weight), upstream)
        results.append([*values, *gradients])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("logits_per_chunk", [22, 10**6])
def test_under_a_frozen_head_the_gradient_is_made_with_the_logits(logits_per_chunk, monkeypatch):
    """The same values and gradient, and no product of the head in the backward."""
    states, weight, targets = example()
    weight.requires_grad_(False)
    upstream = torch.linspace(-1, 1, 7)
    expected, entropies = plain(states, weight, targets, 0.7)
    (slope,) = torch.autograd.grad(expected, states, upstream)
    log_probs, seen = log_probs_from_hidden(
        states, weight, targets, 0.7, ValueGuard(), True, entropy_gradient=False, logits_per_chunk=logits_per_chunk
    )
    assert not seen.requires_grad
    monkeypatch.setattr(torch.nn.functional, "linear", None)  # would fail if called
    (got,) = torch.autograd.grad(log_probs, states, upstream)
    for ours, theirs in ((log_probs, expected), (seen, entropies), (got, slope)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_without_entropy_only_log_probs_carry_gradient():
    states, weight, targets = example()
    log_probs, entropy = log_probs_from_hidden(states, weight, targets, 1.0, ValueGuard())
    assert not entropy.any()
    (got,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), states)
    (expected,) = torch.autograd.grad(plain(states, weight, targets, 1.0)[0].sum(), states)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_guard_repairs_counts_and_stops_the_gradient(frozen):
    logits = torch.tensor([[float("nan"), 1.0, 2e4], [float("inf"), float("-inf"), 0.0]])
    guard = ValueGuard(clamp=1e4)
    states = logits.clone().requires_grad_()
    log_probs, _ = log_probs_from_hidden(
        states, torch.eye(3).requires_grad_(not frozen), torch.tensor([1, 0]), 1.0, guard
    )
    # F.linear spreads a NaN over its whole row (NaN x 0), as a broken hidden state would.
    assert torch.isfinite(log_probs).all()
    assert log_probs[0].item() == pytest.approx(-math.log(3))
    (gradient,) = torch.autograd.grad(log_probs.sum(), states)
    assert not gradient.any()
    assert guard.drain("x") == {"x_nonfinite": 6.0, "x_clamped": 0.0}
    assert guard.drain("x") == {"x_nonfinite": 0.0, "x_clamped": 0.0}


def test_guard_on_values():
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 3.0, -1e6])
    guard = ValueGuard(clamp=1e4)
    fixed, touched = guard(values)
    assert fixed.tolist() == [0.0, 1e4, -1e4, 3.0, -1e4]
    assert touched.tolist() == [True, True, True, False, True]
    assert guard.drain("x") == {"x_nonfinite": 3.0, "x_clamped": 1.0}


def test_clean_values_pass_untouched():
    values = torch.tensor([1.0, -2.0])
    fixed, touched = ValueGuard()(values)
    assert fixed is values and touched is None


def test_each_guard_can_be_off():
    values = torch.tensor([float("nan"), -1e6])
    only_clamp, _ = ValueGuard(nan_to_num=False, clamp=1e4)(values)
    assert torch.isnan(only_clamp[0]) and only_clamp[1] == -1e4
    only_nan, _ = ValueGuard(nan_to_num=True, clamp=None)(values)
    assert only_nan.tolist() == [0.0, -1e6]
    off, touched = ValueGuard(nan_to_num=False, clamp=None)(values)
    assert off is values and touched is None


def test_temperature_must_be_positive():
    states, weight, targets = example()
    with pytest.raises(ValueError, match="temperature=0"):
        log_probs_from_hidden(states, weight, targets, 0.0, ValueGuard())


def test_no_matrix_of_tokens_by_vocabulary_exists(monkeypatch):
    """Every product made on the way, forward and backward, stays within the chunk."""
    largest = 0
    linear = torch.nn.functional.linear

    def watched(*args):
        nonlocal largest
        result = linear(*args)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    states, weight, targets = example(n=100, vocab=50)
    log_probs, _ = log_probs_from_hidden(states, weight, targets, 1.0, ValueGuard(), True, logits_per_chunk=500)
    log_probs.sum().backward()
    assert largest == 500


@pytest.mark.parametrize(("vocab", "tokens"), [(2**13, 128), (2**14, 128), (2**12, 256)])
def test_a_chunk_is_never_too_small_to_pay_for_the_weights(vocab, tokens, monkeypatch):
    """2^20 logits on a CPU, but at least 128 tokens."""
    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: sizes.append(len(args[0])) or linear(*args))
    log_probs_from_hidden(torch.ones(300, 2), torch.ones(vocab, 2), torch.zeros(300).long(), 1.0, ValueGuard())
    assert sizes == [tokens] * (300 // tokens) + [300 % tokens]
