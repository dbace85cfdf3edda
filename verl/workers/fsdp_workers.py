"""The actor and reference policy as a Ray worker: wiring only. What it computes is in ``actor/dp_actor.py``."""

import importlib.util
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.trainer.config.schema import Config, ModelConfig
from verl.utils.checkpoint import load_json, rng_state, save_json, set_rng_state
from verl.utils.fsdp_utils import (
    copy_full_state,
    gather_full_state,
    init_process_group,
    lora_wrap_policy,
    make_deterministic,
    move_model,
    move_optimizer,
    shard_model,
    trainable_parameters,
    world_size,
)
from verl.utils.hub import model_folder
from verl.utils.lora import adapter_disabled, adapter_state, attach_lora, count_parameters, peft_config_dict
from verl.workers.actor.dp_actor import DataParallelPPOActor, PolicyModel
from verl.workers.actor.packing import PACKED_SDPA


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The precision of forward and backward; what is trained is kept in float32 whatever it is."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def attention_name(config: ModelConfig, device: torch.device) -> str:
    """The attention that transformers should use: flash attention where it is installed, else SDPA, packed or not."""
    name = config.attn_implementation
    if name == "auto":
        halves = compute_dtype(config, device) in (torch.bfloat16, torch.float16)  # its kernels take nothing else
        flash = device.type == "cuda" and halves and importlib.util.find_spec("flash_attn") is not None
        name = "flash_attention_2" if flash else "sdpa"
    return PACKED_SDPA if name == "sdpa" and config.use_remove_padding else name


def load_causal_lm(path: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A causal language model from a folder, a Hugging Face name or a ModelScope one (``modelscope://...``).

    Raises:
        ValueError: there is no such model, or it isn't one of these.
    """
    folder = model_folder(path)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"actor_rollout_ref.model.path={path!r} can't be loaded as a causal language model ({reason}); "
            "give a folder that holds config.json and *.safetensors, or a Hugging Face name"
        ) from error


class ActorRefWorker(Worker):
    """One rank of the policy that is trained and of the reference it is held to.

    With LoRA the reference is the base under the switched-off adapter. In full fine-tuning it is a frozen second copy,
    made only where ``use_kl_loss`` asks for it.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> dict[str, int]:
        """Load, attach the adapter, shard, make the optimizer.

        Returns:
            ``trainable_parameters`` and ``parameters``.

        Raises:
            ValueError: the model path or the adapter's targets are wrong.
        """
        trainer, model = self.config.trainer, self.config.actor_rollout_ref.model
        if trainer.deterministic:
            make_deterministic()
        self.device, self.mesh = init_process_group()
        torch.manual_seed(trainer.seed)  # every rank must draw the same adapter
        self.dtype = compute_dtype(model, self.device)
        base = self._load(self.dtype if model.use_lora else torch.float32)
        self.layer_names = base._no_split_modules
        self.policy = attach_lora(base, model) if model.use_lora else base
        trainable, total = count_parameters(self.policy)
        self.actor = self._actor(self.policy, trained=True)
        needs_copy = not model.use_lora and self.config.actor_rollout_ref.actor.use_kl_loss
        self.reference = self._actor(self._load(self.dtype).requires_grad_(False)) if needs_copy else None
        self._rest()
        return {"trainable_parameters": trainable, "parameters": total}

    def _load(self, dtype: torch.dtype) -> PreTrainedModel:
        config = self.config.actor_rollout_ref.model
        model = load_causal_lm(config.path, dtype, attention_name(config, self.device))
        if config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def _actor(self, model: torch.nn.Module, trained: bool = False) -> DataParallelPPOActor:
        config = self.config.actor_rollout_ref
        policy, optim = PolicyModel(model), config.actor.optim
        shard_model(policy, self.mesh, lora_wrap_policy(self.layer_names), self.dtype)
        optimizer = None
        if trained:
            optimizer = torch.optim.AdamW(
                trainable_parameters(policy).values(),
                lr=optim.lr,
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
            )
        return DataParallelPPOActor(
            policy,
            config.actor,
            self.config.stability,
            max_response_length=self.config.data.max_response_length,
            correction=self.config.algorithm.rollout_correction,
            packed=config.model.use_remove_padding,
            optimizer=optimizer,
        )

    # ---------------------------------------------------------------------------------------------- the step's parts
    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys``, each (B, R) float32, of the policy as it is."""
        with self._at_work():
            log_probs, entropies = self.actor.compute_log_prob(data.to(self.device))
        return DataProto.from_dict({"old_log_probs": log_probs.cpu(), "entropys": entropies.cpu()}, {}, {})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R) float32 of the frozen reference."""
        actor = self.reference or self.actor
        without = nullcontext() if self.reference else adapter_disabled(self.actor.model)
        with self._at_work(actor), without:
            log_probs, _ = actor.compute_log_prob(data.to(self.device), with_entropy=False)
        return DataProto.from_dict({"ref_log_prob": log_probs.cpu()}, {}, {})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Optimizer steps on the episodes. Gives ``old_log_probs`` (B, R) float32, those before the step (as given, or
        computed on the way), and ``meta_info["metrics"]``, the same on every rank."""
        with self._at_work(optimizer=True):
            metrics, log_probs = self.actor.update_policy(data.to(self.device))
        if self.device.type == "cuda":
            metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        metrics["perf/max_memory_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of KiB
        old = data.batch["old_log_probs"] if "old_log_probs" in data.batch.keys() else log_probs
        return DataProto.from_dict({"old_log_probs": old.cpu()}, {}, {"metrics": metrics})

    # -------------------------------------------------------------------------------------------------- weights, state
    def _trained(self) -> dict[str, torch.Tensor]:
        """Trained parameters by the name that adapter files, or the model's own files, give them."""
        trained = trainable_parameters(self.policy)
        return adapter_state(trained) if self.config.actor_rollout_ref.model.use_lora else trained

    @register(Dispatch.RANK_ZERO)
    def export_weights(self) -> dict[str, Any]:
        """What a generation engine needs: ``weights`` (name -> whole CPU tensor, as computed with) and ``peft_config``.

        Gathering takes all ranks; the controller keeps rank 0's answer. Tied weights go once.
        """
        weights = gather_full_state(self._trained(), self.dtype)
        use_lora = self.config.actor_rollout_ref.model.use_lora
        return {"weights": weights, "peft_config": peft_config_dict(self.policy) if use_lora else None}

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Write the adapter (PEFT's layout) or the model (transformers'), the optimizer and the generators' states.

        Tensors are whole, so that any number of ranks resumes. ``path`` exists and is empty; who calls renames it.
        """
        weights, state = gather_full_state(self._trained()), self.actor.gather_state()
        generators: list[Any] = [None] * world_size()
        dist.all_gather_object(generators, rng_state())
        if dist.get_rank() == 0:
            folder, model = Path(path), self.config.actor_rollout_ref.model
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} was made by the trainer and isn't there on the machine of actor rank 0; "
                    "trainer.default_local_dir must be a folder that all machines share"
                )
            if model.use_lora:
                (folder / "adapter").mkdir()
                save_file(weights, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
                text = json.dumps(peft_config_dict(self.policy), indent=2)
                (folder / "adapter" / "adapter_config.json").write_text(text, encoding="utf-8")
            else:
                self.policy.config.save_pretrained(folder / "model")
                save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
                AutoTokenizer.from_pretrained(model_folder(model.path)).save_pretrained(folder / "model")
            save_file(state.pop("moments"), folder / "optimizer.safetensors")
            save_json(folder / "actor.json", state | {"generators": generators})

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Resume from what ``save_checkpoint`` wrote, at any number of ranks (generators' states: at the same one).

        Raises:
            ValueError: it was written for another model or adapter.
        """
        folder = Path(path)
        use_lora = self.config.actor_rollout_ref.model.use_lora
        file = folder / ("adapter/adapter_model.safetensors" if use_lora else "model/model.safetensors")
        if not file.is_file():
            raise ValueError(f"{folder} holds no {file.relative_to(folder)}; resume with use_lora={not use_lora}")
        if use_lora:
            self._check_adapter(load_json(file.with_name("adapter_config.json")))
        copy_full_state(self._trained(), load_file(file))
        state = load_json(folder / "actor.json")
        self.actor.load_state({"moments": load_file(folder / "optimizer.safetensors")} | state)
        self._rest()
        if len(state["generators"]) == world_size():
            set_rng_state(state["generators"][dist.get_rank()])

    def _check_adapter(self, saved: dict[str, Any]) -> None:
        """Weights may fit where what they mean doesn't: another alpha scales the whole adapter."""
        own = peft_config_dict(self.policy)
        for key, name in {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}.items():
            before = sorted(saved[key]) if key == "target_modules" else saved[key]
            if before != own[key]:
                raise ValueError(
                    f"actor_rollout_ref.model.{name}={own[key]}, and the checkpoint was written with {before}; resume "
                    "with that, or start afresh with trainer.resume_mode=disable"
                )

    # --------------------------------------------------------------------------------------------------------- offload
    @contextmanager
    def _at_work(self, actor: DataParallelPPOActor | None = None, optimizer: bool = False) -> Iterator[None]:
        """Bring what is parked on the CPU to the device for as long as it is used (``fsdp_config.*_offload``)."""
        move_model((actor or self.actor).model, self.device)
        if optimizer:
            move_optimizer(self.actor.optimizer, self.device)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        fsdp = self.config.actor_rollout_ref.actor.fsdp_config
        if fsdp.param_offload:
            for actor in filter(None, (self.actor, self.reference)):
                move_model(actor.model, torch.device("cpu"))
        if fsdp.optimizer_offload:
            move_optimizer(self.actor.optimizer, torch.device("cpu"))
