"""A Qwen2 small enough for a test, with and without an adapter."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.trainer.config.schema import ModelConfig
from verl.utils.fsdp_utils import trainable_parameters
from verl.utils.lora import attach_lora

VOCAB = 128
LORA = ModelConfig(lora_rank=4, lora_alpha=8)


def tiny_config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def tiny_model(attention: str = "sdpa", std: float | None = 0.2) -> Qwen2ForCausalLM:
    """The same weights at every call. ``std``: of its matrices; None: transformers' own, which says nearly nothing."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(tiny_config(), attn_implementation=attention)
    for parameter in model.parameters() if std else ():
        torch.nn.init.normal_(parameter, std=std) if parameter.dim() == 2 else None
    return model


def with_adapter(model: Qwen2ForCausalLM, config: ModelConfig = LORA):
    """``model`` under an adapter as it is after some training: B is not 0."""
    model = attach_lora(model, config)
    for name, parameter in trainable_parameters(model).items():
        torch.nn.init.normal_(parameter, std=0.1) if "lora_B" in name else None
    return model
