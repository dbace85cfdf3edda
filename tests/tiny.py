"""A Qwen2 small enough for a test, with and without an adapter."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.protocol import DataProto
from verl.trainer.config.schema import ModelConfig
from verl.utils.fsdp_utils import trainable_parameters
from verl.utils.lora import attach_lora

VOCAB = 128
P, R = 6, 12  # of the episodes: prompt and response length
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


def tiny_episodes(count: int, failed: slice, seed: int = 0) -> DataProto:
    """Ragged prompts and responses with observations in between; of the ``failed`` rows nothing was sampled."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, P + R), generator=gen)
    prompt = torch.randint(1, P + 1, (count, 1), generator=gen)
    response = torch.randint(4, R + 1, (count, 1), generator=gen)
    columns = torch.arange(P + R)
    attention = (columns >= P - prompt) & (columns < P + response)
    mask = attention[:, P:] & (torch.rand(count, R, generator=gen) < 0.6)
    mask[:, 0], mask[failed] = True, False
    noise = torch.randn(4, count, R, generator=gen)
    tensors = {
        "input_ids": ids * attention,
        "attention_mask": attention.long(),
        "response_mask": mask.float(),
        "old_log_probs": (-5 + 0.1 * noise[0]) * mask,
        "ref_log_prob": (-5 + 0.1 * noise[1]) * mask,
        "advantages": noise[2] * mask,
        "rollout_log_probs": (-5 + 0.3 * noise[3]) * mask,
    }
    return DataProto.from_dict(tensors, {}, {"temperature": 0.7})
