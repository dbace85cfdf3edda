"""Generation engines. Importing this package is cheap; an engine's library is imported when one is built."""

from typing import TYPE_CHECKING

from verl.workers.rollout.base import RolloutEngine

if TYPE_CHECKING:
    from verl.trainer.config.schema import Config


def build_engine(config: "Config", device: str) -> RolloutEngine:
    """The engine that ``actor_rollout_ref.rollout.name`` asks for, on ``device`` ("cpu", "cuda", "cuda:1").

    Raises ValueError for a name that can't be served.
    """
    name = config.actor_rollout_ref.rollout.name
    if name == "vllm":
        raise ValueError("rollout.name=vllm is not built yet in this version; use rollout.name=hf (or auto)")
    if name not in ("auto", "hf"):
        raise ValueError(f"rollout.name={name} is not an engine; use auto, hf or vllm")
    import torch

    from verl.workers.rollout.hf_rollout import HFEngine

    dtype = config.actor_rollout_ref.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return HFEngine.from_pretrained(
        config.actor_rollout_ref.model.path,
        dtype=getattr(torch, dtype),
        device=device,
        max_batch_size=config.actor_rollout_ref.rollout.max_batch_size,
        deterministic=config.trainer.deterministic,
    )
