"""LoRA: the right parameters under PEFT's names, the reference without copying, clear refusals."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny import LORA, tiny_model, with_adapter
from verl.utils.fsdp_utils import lora_wrap_policy, trainable_parameters
from verl.utils.lora import adapter_disabled, adapter_state, attach_lora, count_parameters, peft_config_dict

QWEN_3B = Qwen2Config(  # Qwen2.5-3B's published config.json
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def tiny(config=LORA):
    return with_adapter(tiny_model(std=None).eval(), config)


def test_qwen_3b_rank_64_has_29_491_200_parameters():
    with torch.device("meta"):
        model = attach_lora(Qwen2ForCausalLM(QWEN_3B), replace(LORA, lora_rank=64, lora_alpha=128))
    trainable, total = count_parameters(model)
    assert trainable == 29_491_200 == 36 * 819_200
    assert trainable / total == pytest.approx(0.0095, abs=1e-4)


def test_wrong_target_lists_the_linear_layers():
    with pytest.raises(ValueError, match=r"query_proj names no linear.*down_proj.*k_proj.*q_proj"):
        attach_lora(tiny_model(std=None), replace(LORA, target_modules=("q_proj", "query_proj")))


def test_output_embedding_is_no_target():
    with pytest.raises(ValueError, match="lm_head"):
        attach_lora(tiny_model(std=None), replace(LORA, target_modules=("lm_head",)))


def test_rank_must_be_positive():
    with pytest.raises(ValueError, match="lora_rank=0"):
        attach_lora(tiny_model(std=None), replace(LORA, lora_rank=0))


def test_a_bfloat16_base_carries_a_float32_adapter():
    model = attach_lora(tiny_model(std=None).bfloat16(), LORA)
    assert {p.dtype for p in trainable_parameters(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_adapter_disabled_is_the_base_and_leaves_no_trace():
    model, ids = tiny(), torch.arange(10)[None]
    base = tiny_model(std=None).eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with adapter_disabled(model):
            assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
            assert trainable_parameters(model), "FSDP reads requires_grad at the first forward"
        assert torch.equal(model(input_ids=ids).logits, adapted)
        assert not torch.allclose(adapted, base(input_ids=ids).logits)


def test_peft_loads_what_we_write(tmp_path):
    model, ids = tiny(), torch.arange(10)[None]
    state = {name: p.detach().clone() for name, p in adapter_state(trainable_parameters(model)).items()}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in state
    save_file(state, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config_dict(model)))
    loaded = PeftModel.from_pretrained(tiny_model(std=None).eval(), tmp_path)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_wrap_policy_picks_the_layers_and_they_hold_every_adapter():
    model = tiny()
    wrap = lora_wrap_policy(model.get_base_model()._no_split_modules)
    units = [module for module in model.modules() if wrap(module)]
    assert units == list(model.get_base_model().model.layers)
    inside = {id(p) for unit in units for p in unit.parameters()}
    assert all(id(p) in inside for p in trainable_parameters(model).values())
