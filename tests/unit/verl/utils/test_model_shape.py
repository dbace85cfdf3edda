"""Figures from a model's shape against real models and against sums worked by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.trainer.config.schema import ModelConfig
from verl.utils.lora import attach_lora, count_parameters
from verl.utils.model_shape import SHAPES, ModelShape, find_shape

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 500,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config", "model"),
    [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM)],
)
def test_parameters_are_those_of_a_real_model(config, model, tied):
    made = config(**SMALL, tie_word_embeddings=tied)
    with torch.device("meta"):
        real = model(made)
    assert ModelShape.from_config(made.to_dict()).parameters == count_parameters(real)[1]


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_those_of_real_models_and_of_their_names(name):
    shape = SHAPES[name]
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        real = Qwen2ForCausalLM(config)
        assert count_parameters(real)[1] == shape.parameters
        adapted = attach_lora(real, ModelConfig(lora_rank=64))
    assert count_parameters(adapted)[0] == shape.lora_parameters(64, QKVO)
    published = {"Qwen2.5-0.5B": 0.49e9, "Qwen2.5-1.5B": 1.54e9, "Qwen2.5-3B": 3.09e9, "Qwen2.5-7B": 7.62e9}
    assert shape.parameters == pytest.approx(published[name], rel=0.01)


def test_the_recipe_by_hand():
    shape = find_shape("Qwen/Qwen2.5-3B-Instruct")
    assert shape.lora_parameters(64, QKVO) == 29_491_200
    assert shape.kv_bytes() == 2 * 36 * 2 * 128 * 2 == 36_864


def test_saved_bytes_are_what_autograd_keeps():
    """Of two layers more, on the bfloat16 model itself, storages counted once."""
    config = Qwen2Config(**{**SMALL, "head_dim": 16}, attn_implementation="sdpa")
    tokens = 256

    def kept(layers: int) -> int:
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        model = attach_lora(Qwen2ForCausalLM(config).bfloat16(), ModelConfig(lora_rank=8, lora_alpha=8)).bfloat16()
        owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, int] = {}
        alive = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                storages[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.get_base_model().model(torch.arange(tokens)[None], use_cache=False)
        return sum(storages.values())

    two_layers = kept(4) - kept(2)
    shape = ModelShape(96, 160, 2, 6, 2, 16, 500)
    assert two_layers == pytest.approx(2 * tokens * shape.saved_bytes(8, QKVO), rel=0.05)


def test_operations_are_those_that_torch_counts():
    """Products over whole squares are what torch counts of attention; ours are half of them."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = ModelShape(96, 160, 3, 6, 2, 16, 500)
    config = Qwen2Config(**{**SMALL, "head_dim": 16}, attn_implementation="eager")
    model, ids = Qwen2ForCausalLM(config), torch.arange(64)[None]
    attention = shape._attention([64])
    with FlopCounterMode(display=False) as counted:
        loss = model(ids).logits.sum()
    assert counted.get_total_flops() == shape.forward_flops([64], 64) + attention
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    assert counted.get_total_flops() == 2 * (shape.forward_flops([64], 64) + attention)
    assert shape.update_flops([64], 64) == 3 * shape.forward_flops([64], 64)
    # An adapter: base forward and the gradient of its input; the adapter all three.
    base, adapter = 3 * shape.layer_parameters, shape.lora_parameters(8, QKVO)
    assert shape.update_flops([1], 0, 8, QKVO) == pytest.approx(4 * base + 6 * adapter, rel=0.02)


def test_what_is_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only the layers of qwen2"):
        ModelShape.from_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="no intermediate_size"):
        ModelShape.from_config({"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 2})
    with pytest.raises(ValueError, match="no folder with a config.json"):
        find_shape(str(tmp_path))


def test_an_adapter_of_another_model_is_told_by_its_shapes():
    shape = ModelShape(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=128)
    prefix = "base_model.model.model.layers.0.self_attn"
    fitting = {f"{prefix}.k_proj.lora_A.weight": (4, 32), f"{prefix}.k_proj.lora_B.weight": (16, 4)}
    shape.check_adapter(fitting | {f"{prefix}.other.lora_A.weight": (4, 7)})
    for name, wrong in ((".k_proj.lora_A.weight", (4, 64)), (".k_proj.lora_B.weight", (32, 4))):
        with pytest.raises(ValueError, match="the adapter was trained on another model"):
            shape.check_adapter(fitting | {prefix + name: wrong})
