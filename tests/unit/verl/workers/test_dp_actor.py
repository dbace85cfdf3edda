"""The actor on one process: packed equals padded, values equal plain softmax, gradients don't depend on the cut."""

import math
from dataclasses import replace

import pytest
import torch

from tests.tiny import VOCAB as V
from tests.tiny import P, R, tiny_episodes, tiny_model, with_adapter
from verl.trainer.config.schema import (
    ActorConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    StabilityConfig,
)
from verl.trainer.ppo.core_algos import likelihood_displacement, policy_loss
from verl.utils.fsdp_utils import trainable_parameters
from verl.workers.actor.dp_actor import DataParallelPPOActor, PolicyModel
from verl.workers.actor.packing import PACKED_SDPA, forward_batch, needed_tokens

B = 8
OPTIM = OptimConfig(lr=1e-2)
CONFIG = ActorConfig(ppo_mini_batch_size=B, entropy_coeff=0.01, kl_loss_coef=0.1, grad_clip=1e9, optim=OPTIM)


def policy(attention=PACKED_SDPA, lora=True):
    model = tiny_model(attention)
    return PolicyModel(with_adapter(model) if lora else model)


def actor(config=CONFIG, stability=None, packed=True, lora=True, correction=None):
    model = policy(PACKED_SDPA if packed else "sdpa", lora)
    optim = config.optim
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=optim.lr, eps=optim.eps, weight_decay=0.0)
    return DataParallelPPOActor(
        model,
        config,
        stability or StabilityConfig(),
        max_response_length=R,
        correction=correction,
        packed=packed,
        optimizer=optimizer,
    )


def episodes(seed=0):
    """Row 3 is a failed episode."""
    return tiny_episodes(B, slice(3, 4), seed)


def gradients(trainer, data):
    """The gradient of the (single) optimizer step, before Adam."""
    kept = {}
    trainer.optimizer.step = lambda: kept.update(
        {name: p.grad.clone() for name, p in trainable_parameters(trainer.model).items()}
    )
    metrics, _ = trainer.update_policy(data)
    return kept, metrics


def plain_log_probs(model, data, temperature):
    """The slow reference: one episode at a time, all logits, log_softmax."""
    log_probs, entropies = torch.zeros(B, R), torch.zeros(B, R)
    for row in range(B):
        keep = data.batch["attention_mask"][row].bool()
        ids = data.batch["input_ids"][row][keep]
        log_p = torch.log_softmax(model.model(input_ids=ids[None]).logits[0].float() / temperature, -1)
        prompt = int(keep[:P].sum())
        for column in range(len(ids) - prompt):
            before = log_p[prompt + column - 1]
            log_probs[row, column] = before[ids[prompt + column]]
            entropies[row, column] = -(before.exp() * before).sum()
    mask = data.batch["response_mask"]
    return log_probs * mask, entropies * mask


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("limit", [20, 10_000])
@torch.no_grad()
def test_log_probs_equal_plain_softmax(packed, limit):
    trainer, data = actor(replace(CONFIG, ppo_max_token_len_per_gpu=limit), packed=packed), episodes()
    for expected, got in zip(plain_log_probs(trainer.model, data, 0.7), trainer.compute_log_prob(data), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_packed_equals_padded():
    data = episodes()
    packed, padded = actor(packed=True), actor(packed=False)
    for left, right in zip(packed.compute_log_prob(data), padded.compute_log_prob(data), strict=True):
        assert (left - right).abs().max() < 1e-5
    left, right = gradients(packed, data)[0], gradients(padded, data)[0]
    assert max((left[name] - right[name]).abs().max() for name in left) < 1e-5


def test_only_tokens_that_matter_are_read():
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
    mask = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
    needed = needed_tokens(attention, mask)
    # Prompt (2 of 3 columns) and the token before the sampled one; the observation after it can't matter.
    assert needed.tolist() == [[False, True, True, True, False, False, False], [False] * 7]
    batch = forward_batch(torch.arange(14).view(2, 7), needed, mask, [0], packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3]] and batch.boundaries.tolist() == [0, 3]
    assert batch.select.tolist() == [2] and batch.targets.tolist() == [4]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradient_does_not_depend_on_the_micro_batches(mode):
    data, found = episodes(), []
    whole = replace(CONFIG, loss_agg_mode=mode)
    for config in (
        whole,
        replace(whole, ppo_max_token_len_per_gpu=25),
        replace(whole, ppo_max_token_len_per_gpu=1),
        replace(whole, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=3),
    ):
        found.append(gradients(actor(config), data))
    for kept, metrics in found[1:]:
        for name, gradient in found[0][0].items():
            torch.testing.assert_close(kept[name], gradient, atol=1e-6, rtol=1e-4)
        assert metrics == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


def test_gradient_of_the_whole_loss_by_autograd():
    """Against one formula over plain logits: ratio 1 at the old log-probs, KL and entropy in."""
    trainer, data = actor(), episodes()
    old, _ = plain_log_probs(trainer.model, data, 0.7)
    data.batch["old_log_probs"] = old.detach()
    log_prob, entropy = plain_log_probs(trainer.model, data, 0.7)
    mask, advantages = data.batch["response_mask"], data.batch["advantages"]
    d = data.batch["ref_log_prob"] - log_prob
    loss = -(log_prob - old.detach()).exp() * advantages + 0.1 * (d.exp() - d - 1) - 0.01 * entropy
    trained = trainable_parameters(trainer.model)
    expected = torch.autograd.grad((loss * mask).sum() / mask.sum(), list(trained.values()))
    kept, metrics = gradients(trainer, data)
    for name, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(kept[name], gradient, atol=1e-6, rtol=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(((entropy * mask).sum() / mask.sum()).item(), rel=1e-5)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_full_fine_tuning_trains_the_tied_embedding():
    trainer, data = actor(lora=False), episodes()
    kept, _ = gradients(trainer, data)
    log_prob, entropy = plain_log_probs(trainer.model, data, 0.7)
    assert kept["model.model.embed_tokens.weight"].abs().sum() > 0
    mask = data.batch["response_mask"]
    d = data.batch["ref_log_prob"] - log_prob
    ratio = (log_prob - data.batch["old_log_probs"]).exp()
    free, held = -data.batch["advantages"] * ratio, -data.batch["advantages"] * ratio.clamp(0.8, 1.2)
    surrogate = torch.maximum(free, held)
    ceiling = -3.0 * data.batch["advantages"]
    surrogate = torch.where((data.batch["advantages"] < 0) & (surrogate > ceiling), ceiling, surrogate)
    loss = ((surrogate + 0.1 * (d.exp() - d - 1) - 0.01 * entropy) * mask).sum() / mask.sum()
    (expected,) = torch.autograd.grad(loss, trainable_parameters(trainer.model)["model.model.embed_tokens.weight"])
    torch.testing.assert_close(kept["model.model.embed_tokens.weight"], expected, atol=1e-5, rtol=1e-3)


def test_rows_without_mask_add_nothing():
    """Pad rows and failed episodes: the same gradient with and without them."""
    data = episodes()
    alive = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    left, right = gradients(actor(), data)[0], gradients(actor(), data[alive])[0]
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("limit", [20, 10_000])
def test_without_old_log_probs_the_step_is_that_of_its_own(limit):
    """On-policy the pass for the old log-probs can be left out: same gradient, and the log-probs come back."""
    data, config = episodes(), replace(CONFIG, ppo_max_token_len_per_gpu=limit)
    old, entropies = actor(config=config).compute_log_prob(data)
    given = episodes()
    given.batch["old_log_probs"], given.batch["entropys"] = old, entropies
    data.batch.pop("old_log_probs")
    expected, with_pass = gradients(actor(config=config), given)
    trainer = actor(config=config)
    trainer_gradient, without_pass = gradients(trainer, data)
    for name in expected:
        torch.testing.assert_close(trainer_gradient[name], expected[name], atol=1e-6, rtol=1e-5)
    assert all(with_pass.pop(name) < 1e-5 for name in ("actor/llds", "actor/llds_frac"))  # not displaced yet
    assert without_pass == pytest.approx(with_pass, rel=1e-5, abs=1e-6)
    again = actor(config=config)
    again.optimizer.step = lambda: None
    _, log_probs = again.update_policy(data)
    torch.testing.assert_close(log_probs, old, atol=1e-6, rtol=1e-5)


def test_a_batch_without_any_sampled_token_changes_nothing():
    trainer, data = actor(), episodes()
    data.batch["response_mask"] = torch.zeros(B, R)
    before = {name: p.detach().clone() for name, p in trainable_parameters(trainer.model).items()}
    metrics, _ = trainer.update_policy(data)
    assert metrics["actor/pg_loss"] == 0.0 and metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in trainable_parameters(trainer.model).items())


def test_mini_batches_epochs_and_warm_up():
    config = replace(CONFIG, ppo_epochs=2, optim=replace(OPTIM, lr_warmup_steps=8))
    trainer, data = actor(config), episodes()
    data.batch["mini_batch"] = torch.arange(B) // 2
    rates = []
    trainer.optimizer.step = lambda: rates.append(trainer.optimizer.param_groups[0]["lr"])
    trainer.update_policy(data)
    assert rates == pytest.approx([1e-2 * k / 8 for k in range(1, 9)])


def test_a_mini_batch_is_the_rows_that_carry_its_number():
    data, seen = episodes(), []
    data.batch["mini_batch"] = torch.tensor([2, 0, 0, 1, 2, 1, 0, 2])
    trainer = actor()
    step = trainer._step
    trainer._step = lambda batch, rows, *rest: seen.append(rows) or step(batch, rows, *rest)
    trainer.update_policy(data)
    assert seen == [[1, 2, 6], [3, 5], [0, 4, 7]]


# ------------------------------------------------------------------------------------------------- forms of the loss
PLAIN = replace(CONFIG, use_kl_loss=False, entropy_coeff=0.0)


def loss_gradient(data, old, weight, config=PLAIN, **options):
    """d loss / d adapter by autograd over plain logits, the tokens weighed by ``weight (B, R)``."""
    trainer = actor()
    log_prob, _ = plain_log_probs(trainer.model, data, 0.7)
    mask = data.batch["response_mask"]
    loss, _ = policy_loss(old, log_prob, data.batch["advantages"], mask, weights=weight, **options)
    trained = trainable_parameters(trainer.model)
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("mode", ["ppo", "gspo", "cispo"])
def test_the_form_of_the_loss_is_chosen_by_name(mode):
    data = episodes()
    config = replace(PLAIN, policy_loss=PolicyLossConfig(mode), clip_ratio=0.01)
    kept, _ = gradients(actor(config), data)
    expected = loss_gradient(
        data, data.batch["old_log_probs"], None, loss_kind=mode, clip_low=0.01, clip_high=0.01, clip_dual=3.0
    )
    for name, gradient in expected.items():
        torch.testing.assert_close(kept[name], gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_engine_and_trainer_apart_are_weighed_by_the_policy_before_the_step(level, given):
    """Also where that policy's log-probs are those of the update's own forward."""
    correction, data = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1.5), episodes()
    mask = data.batch["response_mask"]
    old, entropies = actor().compute_log_prob(data)
    gap = 0.3 * torch.randn(B, R, generator=torch.Generator().manual_seed(5))
    data.batch["rollout_log_probs"] = (old - gap) * mask
    data.batch.pop("old_log_probs")
    if given:
        data.batch["old_log_probs"], data.batch["entropys"] = old, entropies
    ratio = gap if level == "token" else (gap * mask).sum(dim=1, keepdim=True).expand(B, R)
    weight = ratio.exp().clamp(max=1.5)
    assert (weight == 1.5).any() and (weight < 1.5).any()
    kept, _ = gradients(actor(PLAIN, correction=correction), data)
    for name, gradient in loss_gradient(data, old, weight).items():
        torch.testing.assert_close(kept[name], gradient, atol=1e-5, rtol=1e-3)
    plain, _ = gradients(actor(PLAIN), data)
    assert max((plain[name] - kept[name]).abs().max() for name in kept) > 1e-3


def two_steps(config):
    """An update of the same episodes twice over; the second step sees what the first displaced."""
    trainer, data = actor(replace(config, ppo_epochs=2)), episodes()
    data.batch["old_log_probs"], data.batch["entropys"] = trainer.compute_log_prob(data)
    metrics, _ = trainer.update_policy(data)
    now, _ = trainer.compute_log_prob(data)
    return metrics, data, now


def test_displacement_is_measured_and_llds_holds_it_back():
    free, data, now = two_steps(PLAIN)
    good = (data.batch["advantages"] >= 0) & data.batch["response_mask"].bool()
    lost = (data.batch["old_log_probs"] - now)[good].clamp_min(0).mean()
    assert free["actor/llds"] > 0 and 0 < free["actor/llds_frac"] < 1 and lost > 0
    held, data, now = two_steps(replace(PLAIN, llds_coef=10.0))
    assert (data.batch["old_log_probs"] - now)[good].clamp_min(0).mean() < 0.8 * lost
    assert held["actor/llds"] == pytest.approx(free["actor/llds"])  # both were measured before the second step


def test_displacement_by_a_single_step_takes_a_pass_after_it():
    data = episodes()
    data.batch.pop("old_log_probs")
    trainer = actor(PLAIN)
    metrics, old = trainer.update_policy(data)
    assert "actor/llds" not in metrics
    again = actor(replace(PLAIN, llds_after_update=True))
    metrics, _ = again.update_policy(data)
    now, _ = trainer.compute_log_prob(data)
    mask = data.batch["response_mask"]
    displaced = likelihood_displacement(old, now, data.batch["advantages"], mask)
    assert metrics["actor/llds"] == pytest.approx((displaced.sum() / mask.sum()).item(), rel=1e-4)
    assert metrics["actor/llds"] > 0


def test_clipped_to_the_norm():
    small = replace(CONFIG, grad_clip=0.01)
    kept, metrics = gradients(actor(small), episodes())
    assert metrics["actor/grad_norm"] > 0.01
    assert math.sqrt(sum(float(g.square().sum()) for g in kept.values())) == pytest.approx(0.01, rel=1e-4)


def test_an_update_raises_what_was_good_and_lowers_what_was_bad():
    trainer, data = actor(replace(CONFIG, use_kl_loss=False, entropy_coeff=0.0)), episodes()
    data.batch["old_log_probs"], _ = trainer.compute_log_prob(data)
    trainer.update_policy(data)
    after, _ = trainer.compute_log_prob(data)
    assert ((after - data.batch["old_log_probs"]) * data.batch["advantages"]).sum() > 0


# ---------------------------------------------------------------------------------------------------------- stability
def test_advantages_of_minus_a_million_are_clamped_and_counted():
    data = episodes()
    data.batch["advantages"][0, 0] = -1e6
    data.batch["advantages"][1, 0] = float("nan")
    metrics, _ = actor().update_policy(data)
    assert metrics["stability/advantages_clamped"] == 1 and metrics["stability/advantages_nonfinite"] == 1
    data.batch["advantages"][1, 0] = 0.0
    off, _ = actor(stability=StabilityConfig(clamp_advantages=None)).update_policy(data)
    assert off["stability/advantages_clamped"] == 0
    assert off["actor/pg_loss"] > 10 * metrics["actor/pg_loss"]


def test_nan_logits_are_counted_and_the_step_is_skipped():
    trainer, data = actor(), episodes()
    before = {name: p.detach().clone() for name, p in trainable_parameters(trainer.model).items()}
    trainer.model.model.get_base_model().model.norm.register_forward_hook(
        lambda module, args, output: output * math.nan
    )
    log_probs, _ = trainer.compute_log_prob(data)
    assert torch.isfinite(log_probs).all()
    metrics, _ = trainer.update_policy(data)
    sampled = int(data.batch["response_mask"].sum())
    assert metrics["stability/logits_nonfinite"] == 2 * sampled * V  # the log-prob pass and the update
    assert all(torch.equal(p, before[name]) for name, p in trainable_parameters(trainer.model).items())


def test_huge_logits_are_clamped_and_counted_unless_switched_off():
    data = episodes()
    for limit in (1e4, None):
        trainer = actor(stability=StabilityConfig(clamp_logits=limit))
        norm = trainer.model.model.get_base_model().model.norm
        norm.register_forward_hook(lambda module, args, output: output * 1e6)
        log_probs, _ = trainer.compute_log_prob(data)
        guarded = trainer.logits_guard.drain("logits")
        lowest = log_probs.min().item()
        if limit is None:
            assert guarded == {"logits_clamped": 0, "logits_nonfinite": 0} and lowest < -1e6
        else:
            assert guarded["logits_clamped"] > 0 and lowest >= -2e4 / 0.7 - 10


def test_adams_eps_bounds_the_step_where_the_second_moment_is_0():
    """A moment lost to underflow: the first moment still says where to go, and nothing says how far."""
    moved = {}
    for eps in (1e-4, 1e-12):
        trainer, data = actor(replace(PLAIN, optim=replace(OPTIM, eps=eps))), episodes()
        trainer.update_policy(data)
        for state in trainer.optimizer.state.values():
            state["exp_avg_sq"].zero_()
        before = {name: p.detach().clone() for name, p in trainable_parameters(trainer.model).items()}
        data.batch["advantages"] = torch.zeros(B, R)  # no gradient: only the moments act
        metrics, _ = trainer.update_policy(data)
        after = trainable_parameters(trainer.model)
        moved[eps] = max((after[name] - before[name]).abs().max().item() for name in after)
        assert metrics["stability/adam_eps_bound"] == sum(p.numel() for p in after.values())
    assert moved[1e-4] < 10 and moved[1e-12] > 1e6 * moved[1e-4]


def test_where_no_second_moment_is_small_eps_binds_nothing():
    trainer = actor(replace(PLAIN, optim=replace(OPTIM, eps=1e-30)))
    metrics, _ = trainer.update_policy(episodes())
    assert metrics["stability/adam_eps_bound"] == 0


def infinite_gradient(trainer):
    parameter = trainable_parameters(trainer.model)[
        "model.base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    ]
    return parameter.register_hook(lambda gradient: gradient * math.inf)


def test_an_infinite_gradient_is_skipped_and_three_in_a_row_end_the_run():
    trainer, data = actor(), episodes()
    before = {name: p.detach().clone() for name, p in trainable_parameters(trainer.model).items()}
    infinite_gradient(trainer)
    for _ in range(2):
        metrics, _ = trainer.update_policy(data)
        assert metrics["stability/skipped_steps"] == 1 and "actor/grad_norm" not in metrics
    assert all(torch.equal(p, before[name]) for name, p in trainable_parameters(trainer.model).items())
    with pytest.raises(FloatingPointError, match="3 optimizer steps.*gradient of .*layers.1.self_attn.v_proj.lora_B"):
        trainer.update_policy(data)


def test_only_steps_in_a_row_end_the_run_also_after_resuming():
    trainer, data = actor(), episodes()

    def skips(count):
        hook = infinite_gradient(trainer)
        for _ in range(count):
            trainer.update_policy(data)
        hook.remove()

    skips(2)
    trainer.update_policy(data)  # a good one in between
    skips(2)
    state = trainer.gather_state()
    trainer = actor()
    trainer.load_state(state)
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row"):
        skips(1)


def test_without_the_guard_an_infinite_gradient_breaks_the_weights():
    trainer = actor(stability=StabilityConfig(skip_nonfinite_grad=False))
    infinite_gradient(trainer)
    trainer.update_policy(episodes())
    assert not all(torch.isfinite(p).all() for p in trainable_parameters(trainer.model).values())


def test_the_first_broken_tensor_is_named():
    stability = StabilityConfig(nan_to_num=False, clamp_advantages=None, max_skipped_steps=1)
    trainer, data = actor(stability=stability), episodes()
    data.batch["advantages"][0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite is advantages"):
        trainer.update_policy(data)


# -------------------------------------------------------------------------------------------------------------- state
def test_state_resumes_to_the_last_bit():
    data = [episodes(seed) for seed in range(4)]
    whole, first, second = actor(), actor(), actor()
    for batch in data:
        whole.update_policy(batch)
    for batch in data[:2]:
        first.update_policy(batch)
    state = {name: p.detach().clone() for name, p in first.model.state_dict().items()}
    second.model.load_state_dict(state)
    second.load_state(first.gather_state())
    for batch in data[2:]:
        second.update_policy(batch)
    expected = trainable_parameters(whole.model)
    assert all(torch.equal(p, expected[name]) for name, p in trainable_parameters(second.model).items())


def test_state_of_another_model_is_refused():
    first, second = actor(), actor(lora=False)
    first.update_policy(episodes())
    with pytest.raises(ValueError, match="fits no trained parameter"):
        second.load_state(first.gather_state())
