"""LoRA through PEFT: attach, name, count, switch off (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from verl.trainer.config.schema import ModelConfig

ADAPTER = "default"  # PEFT's name for the only adapter; its files leave the name out


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of the model's linear layers, without the output embedding."""
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return sorted(names - {"lm_head"})


def attach_lora(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    """Freeze ``model`` and put a fresh float32 adapter (B = 0) on ``config.target_modules``.

    The initial A comes from torch's global generator: seed it alike on all ranks.

    Raises:
        ValueError: a target names no linear layer of the model, or the rank is not positive.
    """
    known = linear_names(model)
    if missing := [name for name in config.target_modules if name not in known]:
        raise ValueError(
            f"target_modules={list(config.target_modules)}: {', '.join(missing)} names no linear layer that can carry "
            f"an adapter in {type(model).__name__}; choose from {', '.join(known)}"
        )
    if config.lora_rank < 1:
        raise ValueError(f"lora_rank={config.lora_rank} is not positive; set it to 1 or more, or use_lora=false")
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(config.target_modules),
        lora_dropout=0.0,  # dropout would make the update's log-probs differ from the old ones
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora, adapter_name=ADAPTER, autocast_adapter_dtype=True)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """``(trainable, all)`` parameters; works on the meta device and on sharded models (global sizes)."""
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters()]
    return sum(size for trainable, size in sizes if trainable), sum(size for _, size in sizes)


def to_peft_name(name: str) -> str:
    """A live parameter's name as adapter files spell it: ``...lora_A.default.weight`` -> ``...lora_A.weight``."""
    return name.replace(f".{ADAPTER}.", ".")


def adapter_state(trainable: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter under PEFT's names, from the full trainable tensors by live name (relative to the PeftModel)."""
    return {to_peft_name(name): tensor for name, tensor in trainable.items()}


def peft_config_dict(model: PeftModel) -> dict[str, Any]:
    """The adapter's configuration in plain JSON types, as ``adapter_config.json`` has it."""
    config = model.peft_config[ADAPTER].to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    config["inference_mode"] = True
    return {
        key: getattr(value, "value", value)
        for key, value in config.items()
        if not isinstance(value, dict) or all(isinstance(item, str | int | float) for item in value.values())
    }


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """The base model's function inside, whatever adapter sits on it: the frozen reference policy, for free.

    PEFT's own ``disable_adapter`` also takes ``requires_grad`` from the adapter. FSDP reads that at the first forward
    to learn the gradients' dtype: were the reference first, the backward of a bfloat16 policy would fail.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "no adapter to switch off"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
