"""The actor worker in this process, one rank on gloo: full fine-tuning, precisions, refusals."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny import LORA, tiny_model
from tests.tiny import VOCAB as V
from verl.protocol import DataProto
from verl.trainer.config.schema import ActorConfig, ActorRolloutRefConfig, Config, DataConfig, FsdpConfig, ModelConfig
from verl.workers.fsdp_workers import ActorRefWorker, attention_name, load_causal_lm

B, P, R = 4, 5, 8


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("model")
    tiny_model(std=None).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(model_path, monkeypatch, tmp_path):
    """A function that starts the worker with a model configuration. One process group a test."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # A file instead of MASTER_PORT: no port to fight for.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)

    def make(model=LORA, **actor):
        rollout = ActorRolloutRefConfig(replace(model, path=model_path), ActorConfig(**actor))
        worker = ActorRefWorker(Config(data=DataConfig(max_response_length=R), actor_rollout_ref=rollout))
        worker.counts = worker.init_model()
        return worker

    yield make
    dist.destroy_process_group()


def episodes():
    gen = torch.Generator().manual_seed(0)
    tensors = {
        "input_ids": torch.randint(1, V, (B, P + R), generator=gen),
        "attention_mask": torch.ones(B, P + R).long(),
        "response_mask": (torch.rand(B, R, generator=gen) < 0.6).float(),
        "advantages": torch.randn(B, R, generator=gen),
    }
    return DataProto.from_dict(tensors, {}, {"temperature": 1.0})


def with_log_probs(worker):
    """Episodes with the old log-probs and, where KL is used, the reference's."""
    data = episodes()
    data = data.union(worker.compute_log_prob(data))
    return data.union(worker.compute_ref_log_prob(data)) if worker.config.actor_rollout_ref.actor.use_kl_loss else data


def test_lora_trains_the_adapter_alone(start):
    worker = start()
    # 2 layers; A and B of rank 4 on q (32 -> 32), k and v (32 -> 16), o (32 -> 32).
    assert worker.counts["trainable_parameters"] == 2 * 4 * (64 + 48 + 48 + 64)
    data = with_log_probs(worker)
    assert torch.equal(data.batch["old_log_probs"], data.batch["ref_log_prob"]), "B = 0: still the base"
    worker.update_actor(data)
    after = worker.compute_log_prob(episodes()).batch["old_log_probs"]
    assert not torch.equal(after, data.batch["old_log_probs"])
    assert torch.equal(worker.compute_ref_log_prob(episodes()).batch["ref_log_prob"], data.batch["ref_log_prob"])


def test_the_reference_may_come_first(start):
    """FSDP learns the gradients' dtype at its first forward; the switched-off adapter must not hide from it."""
    worker = start(replace(LORA, dtype="bfloat16"))
    worker.compute_ref_log_prob(episodes())
    assert worker.update_actor(with_log_probs(worker)).meta_info["metrics"]["actor/grad_norm"] > 0


def test_full_fine_tuning(start, tmp_path):
    worker = start(ModelConfig(use_lora=False))
    assert worker.counts["trainable_parameters"] == worker.counts["parameters"]
    data = with_log_probs(worker)
    worker.update_actor(data)
    moved = worker.compute_log_prob(episodes()).batch["old_log_probs"]
    assert not torch.equal(moved, data.batch["old_log_probs"])
    assert torch.equal(worker.compute_ref_log_prob(episodes()).batch["ref_log_prob"], data.batch["ref_log_prob"])

    exported = worker.export_weights()
    assert exported["peft_config"] is None and "lm_head.weight" not in exported["weights"]
    worker.save_checkpoint(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == exported["weights"].keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in exported["weights"].items())

    worker.update_actor(data)
    worker.load_checkpoint(str(tmp_path))
    assert torch.equal(worker.compute_log_prob(episodes()).batch["old_log_probs"], moved)


def test_full_fine_tuning_without_kl_has_no_second_copy(start):
    worker = start(ModelConfig(use_lora=False), use_kl_loss=False)
    assert worker.reference is None
    assert worker.update_actor(with_log_probs(worker)).meta_info["metrics"]["actor/grad_norm"] > 0


def test_bfloat16_base_float32_adapter(start, tmp_path):
    worker = start(replace(LORA, dtype="bfloat16"))
    exact = start().compute_log_prob(episodes()).batch["old_log_probs"]
    data = with_log_probs(worker)
    torch.testing.assert_close(data.batch["old_log_probs"], exact, atol=0.05, rtol=0.05)
    assert not torch.equal(data.batch["old_log_probs"], exact)
    worker.update_actor(data)
    assert {p.dtype for p in worker._trained().values()} == {torch.float32}
    moments = [v for state in worker.actor.optimizer.state.values() for v in state.values() if v.dim()]
    assert moments and {moment.dtype for moment in moments} == {torch.float32}
    weights = worker.export_weights()["weights"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_gradient_checkpointing_changes_no_number(start):
    updates = []
    for checkpointing in (False, True):
        worker = start(replace(LORA, enable_gradient_checkpointing=checkpointing))
        worker.update_actor(with_log_probs(worker))
        updates.append(worker.export_weights()["weights"])
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in updates[0])


def test_offload_is_harmless_where_everything_is_on_the_cpu(start):
    plain, parked = start(), start(fsdp_config=FsdpConfig(param_offload=True, optimizer_offload=True))
    for worker in (plain, parked):
        worker.update_actor(with_log_probs(worker))
    left, right = (worker.export_weights()["weights"] for worker in (plain, parked))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_of_another_adapter_is_refused(start, tmp_path):
    first, second, full = start(), start(replace(LORA, lora_rank=2)), start(ModelConfig(use_lora=False))
    first.update_actor(with_log_probs(first))
    first.save_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="lora_rank=2, and the checkpoint was written with 4; resume with that"):
        second.load_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="use_lora=True"):
        full.load_checkpoint(str(tmp_path))
    louder = start(replace(LORA, lora_alpha=16))  # its weights would fit
    with pytest.raises(ValueError, match="lora_alpha=16, and the checkpoint was written with 8; resume with that"):
        louder.load_checkpoint(str(tmp_path))


def test_a_folder_that_only_the_driver_has_is_said(start, tmp_path):
    with pytest.raises(ValueError, match="default_local_dir must be a folder that all machines share"):
        start().save_checkpoint(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("model", [LORA, ModelConfig(use_lora=False)], ids=["lora", "full"])
def test_going_back_to_before_the_first_step_forgets_the_moments(start, tmp_path, model):
    worker, other = start(model), start(model)
    worker.save_checkpoint(str(tmp_path))
    data = with_log_probs(worker)
    worker.update_actor(data)
    worker.load_checkpoint(str(tmp_path))
    assert worker.actor.gather_state() == {"moments": {}, "steps": 0, "skipped": 0}
    worker.update_actor(data)
    other.update_actor(data)
    left, right = (one.export_weights()["weights"] for one in (worker, other))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("last", ["log-probs", "displacement"])
def test_a_pass_without_a_backward_leaves_the_whole_model_to_save(start, tmp_path, dtype, last):
    """FSDP keeps the root gathered after it: embedding and norm would be copies, in the precision of the pass."""
    actor = {"use_kl_loss": False, "llds_after_update": last == "displacement"}
    worker = start(ModelConfig(use_lora=False, dtype=dtype), **actor)
    worker.update_actor(with_log_probs(worker))
    if last == "log-probs":
        worker.compute_log_prob(episodes())
    assert {p.dtype for p in worker._trained().values()} == {torch.float32}
    trained = worker.actor.gather_state()["moments"]
    assert len(trained) == 3 * len(worker._trained()), "moments and step of every parameter"
    worker.save_checkpoint(str(tmp_path))
    saved = worker.export_weights()["weights"]
    worker.update_actor(with_log_probs(worker))
    if last == "log-probs":
        worker.compute_log_prob(episodes())
    worker.load_checkpoint(str(tmp_path))
    back = worker.export_weights()["weights"]
    assert all(torch.equal(back[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "sdpa"), ("auto", "flash_attention_2"), ("float16", "flash_attention_2")]
)
def test_flash_attention_is_taken_where_its_kernels_can_compute(monkeypatch, dtype, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    model = ModelConfig(dtype=dtype, use_remove_padding=False)
    assert attention_name(model, torch.device("cuda")) == name
    assert attention_name(model, torch.device("cpu")) == "sdpa"


def test_a_wrong_path_is_one_sentence():
    with pytest.raises(ValueError, match=r"model.path='no/such/model'.*give a folder") as caught:
        load_causal_lm("no/such/model", torch.float32, "sdpa")
    assert "\n" not in str(caught.value)


def test_a_folder_that_holds_something_else_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ValueError, match="can't be loaded as a causal language model") as caught:
        load_causal_lm(str(tmp_path), torch.float32, "sdpa")
    assert "\n" not in str(caught.value)
