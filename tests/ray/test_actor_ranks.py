"""The actor as real Ray workers over FSDP: 1 rank against 2, checkpoints, export, reference."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import cloudpickle
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny import LORA, P, R, tiny_episodes, tiny_model
from tests.tiny import VOCAB as V
from verl.single_controller import Dispatch, ResourcePool, WorkerGroup, connect, register
from verl.trainer.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    AgentGrpoConfig,
    Config,
    DataConfig,
    OptimConfig,
    PolicyLossConfig,
    RayConfig,
    RolloutCorrectionConfig,
    TrainerConfig,
)
from verl.workers.fsdp_workers import ActorRefWorker

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers can't import this file
B = 7  # 7 episodes: 2 ranks need a pad row


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a model")
    tiny_model().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return str(folder)


class BreakableWorker(ActorRefWorker):
    @register(Dispatch.ONE_TO_ALL)
    def poison(self, rank: int, what: str | None) -> None:
        """From now on the last hidden states of this rank are NaN, its gradients Inf, or neither any more."""
        if self.rank != rank:
            return
        norm = self.policy.get_base_model().model.norm
        if what == "nan logits":
            self.hook = norm.register_forward_hook(lambda module, args, output: output * float("nan"))
        elif what == "inf gradient":
            self.hook = norm.register_full_backward_pre_hook(lambda module, grads: (grads[0] * float("inf"),))
        else:
            self.hook.remove()

    @register(Dispatch.ONE_TO_ALL)
    def reconfigure(self, actor: ActorConfig, correction: RolloutCorrectionConfig) -> None:
        self.actor.config, self.actor.correction = actor, correction


@pytest.fixture(scope="module")
def groups(model_path):
    """1 rank and 2 ranks of the same run, each with its adapter."""
    with connect(RayConfig(num_cpus=4)), groups_of(make_config(model_path)) as made:
        yield made


@contextmanager
def groups_of(config):
    pools = [ResourcePool(n, cpu_per_process=0.5) for n in (1, 2)]
    made = [WorkerGroup(BreakableWorker, pool, config, env_vars={"OMP_NUM_THREADS": "1"}) for pool in pools]
    for group in made:
        group.init_model()
    yield made
    for group, pool in zip(made, pools, strict=True):
        group.shutdown()
        pool.release()


def make_config(path, **model):
    actor = ActorConfig(
        ppo_mini_batch_size=B,
        ppo_max_token_len_per_gpu=30,  # several micro-batches, not as many on both ranks
        entropy_coeff=0.01,
        kl_loss_coef=0.1,
        optim=OptimConfig(lr=1e-2),
    )
    model = replace(LORA, path=path, **model)
    return Config(
        data=DataConfig(max_response_length=R),
        actor_rollout_ref=ActorRolloutRefConfig(model=model, actor=actor),
        agent_grpo=AgentGrpoConfig(n=1),
        trainer=TrainerConfig(deterministic=True),
    )


def episodes(seed=0):
    """Rows 4 and 5 failed: the second rank has less to do."""
    return tiny_episodes(B, slice(4, 6), seed)


def weights(group):
    return group.export_weights()["weights"]


def update(group, data):
    """The metrics of an update, without the machine's own (memory)."""
    metrics = group.update_actor(data).meta_info["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def restart(group, folder):
    """The adapter back to where ``folder`` was written."""
    group.load_checkpoint(str(folder))


@pytest.fixture
def start(groups, tmp_path):
    """Both groups at the same trained adapter (B is not 0), written by one rank."""
    groups[0].update_actor(episodes(99))
    groups[0].save_checkpoint(str(tmp_path))
    for group in groups:
        restart(group, tmp_path)
    return tmp_path


def assert_close(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_both_begin_with_the_same_adapter(groups):
    first, second = (group.export_weights() for group in groups)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert first["weights"][name].abs().sum() > 0 and len(first["weights"]) == 2 * 4 * 2
    assert_close(first["weights"], second["weights"], atol=0, rtol=0)
    assert first["peft_config"] == second["peft_config"] and first["peft_config"]["r"] == 4


def test_log_probs_are_those_of_transformers(groups, start, model_path):
    data = episodes()
    one, two = (group.compute_log_prob(data) for group in groups)
    for name in ("old_log_probs", "entropys"):
        torch.testing.assert_close(one.batch[name], two.batch[name], atol=1e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    reference = groups[1].compute_ref_log_prob(data).batch["ref_log_prob"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), start / "adapter")
    for model, got in ((base, reference), (adapted, one.batch["old_log_probs"])):
        for row in range(B):
            keep = data.batch["attention_mask"][row].bool()
            ids, prompt = data.batch["input_ids"][row][keep], int(keep[:P].sum())
            with torch.no_grad():
                log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0] / 0.7, -1)
            expected = log_p[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
            mask = data.batch["response_mask"][row, : len(expected)]
            torch.testing.assert_close(got[row, : len(expected)], expected * mask, atol=1e-4, rtol=1e-4)


def test_same_loss_gradient_and_weights_on_1_and_2_ranks(groups, start):
    before = weights(groups[0])
    for step in range(3):
        one, two = (update(group, episodes(step)) for group in groups)
        assert one["actor/grad_norm"] > 0.01
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6)
    after = weights(groups[0])
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    assert_close(weights(groups[1]), after, atol=1e-5, rtol=1e-3)


FORMS = {
    "gspo": {"policy_loss": PolicyLossConfig("gspo"), "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"policy_loss": PolicyLossConfig("cispo"), "loss_agg_mode": "seq-mean-token-sum-norm"},
    "llds": {"llds_coef": 0.5, "llds_after_update": True, "ppo_epochs": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_loss_is_the_same_on_1_and_2_ranks(groups, start, model_path, form):
    """With importance weights, and two mini-batches whose rows are dealt out as the trainer does it."""
    plain, correction = make_config(model_path).actor_rollout_ref.actor, RolloutCorrectionConfig("token", 1.2)
    before, found = weights(groups[0]), []
    for ranks, group in enumerate(groups, 1):
        group.reconfigure(replace(plain, **FORMS[form]), correction)
        data = episodes()
        data.batch["mini_batch"] = torch.arange(B) // 4
        order = (torch.arange(B) % ranks).argsort(stable=True)
        found.append(update(group, data.reorder(order)))
        group.reconfigure(plain, RolloutCorrectionConfig())
    one, two = found
    assert one["actor/grad_norm"] > 0.01
    assert two == pytest.approx(one, rel=1e-3, abs=1e-6)
    after = weights(groups[0])
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    assert_close(weights(groups[1]), after, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_is_bit_equal(groups, start, tmp_path, ranks):
    group, folder = groups[ranks - 1], tmp_path / "checkpoint"
    folder.mkdir()
    group.update_actor(episodes(0))
    group.save_checkpoint(str(folder))
    saved = weights(group)
    first = update(group, episodes(1))
    went_on = weights(group)
    restart(group, folder)
    assert_close(weights(group), saved, atol=0, rtol=0)
    assert update(group, episodes(1)) == first
    assert_close(weights(group), went_on, atol=0, rtol=0)


def test_resume_on_another_number_of_ranks(groups, start, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one, two = groups
    two.update_actor(episodes(0))
    two.save_checkpoint(str(folder))
    restart(one, folder)
    assert_close(weights(one), weights(two), atol=0, rtol=0)
    one.update_actor(episodes(1)), two.update_actor(episodes(1))
    assert_close(weights(one), weights(two), atol=1e-5, rtol=1e-3)


def test_full_fine_tuning_is_the_same_on_1_and_2_ranks(groups, model_path, tmp_path):
    """Gradients are reduced after each micro-batch. Written by 2 ranks after a pass without a backward, read by 1."""
    with groups_of(make_config(model_path, use_lora=False)) as (one, two):
        before = weights(one)
        for step in range(2):
            left, right = (update(group, episodes(step)) for group in (one, two))
            assert left["actor/grad_norm"] > 0.01 and right == pytest.approx(left, rel=1e-3, abs=1e-6)
        after = weights(one)
        assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
        assert_close(weights(two), after, atol=1e-5, rtol=1e-3)
        two.compute_log_prob(episodes())
        two.save_checkpoint(str(tmp_path))
        restart(one, tmp_path)
        assert_close(weights(one), weights(two), atol=0, rtol=0)
        assert update(one, episodes(2)) == pytest.approx(update(two, episodes(2)), rel=1e-3, abs=1e-6)
        assert_close(weights(one), weights(two), atol=1e-5, rtol=1e-3)


def test_nothing_in_a_checkpoint_is_pickled(start):
    files = {str(path.relative_to(start)) for path in start.rglob("*") if path.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "actor.json",
    }
    assert json.loads((start / "actor.json").read_text())["steps"] >= 1


def test_nan_logits_on_one_rank_skip_the_step_on_both(groups, start):
    before = weights(groups[1])
    data = episodes()
    groups[1].poison(1, "nan logits")
    metrics = update(groups[1], data)
    sampled = int(data.batch["response_mask"][4:].sum())  # the second rank's rows
    assert metrics["stability/skipped_steps"] == 1
    assert metrics["stability/logits_nonfinite"] >= sampled * V  # and the token of each empty micro-batch
    assert_close(weights(groups[1]), before, atol=0, rtol=0)
    groups[1].update_actor(data)
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row .* not finite is logits"):
        groups[1].update_actor(data)
    groups[1].poison(1, None)
    metrics = update(groups[1], data)
    assert metrics["stability/skipped_steps"] == 0 and metrics["actor/grad_norm"] > 0


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_both(groups, start):
    before = weights(groups[1])
    groups[1].poison(0, "inf gradient")
    metrics = update(groups[1], episodes())
    assert metrics["stability/skipped_steps"] == 1 and "actor/grad_norm" not in metrics
    assert metrics["stability/logits_nonfinite"] == 0
    assert_close(weights(groups[1]), before, atol=0, rtol=0)
    groups[1].poison(0, None)
    assert update(groups[1], episodes())["stability/skipped_steps"] == 0
