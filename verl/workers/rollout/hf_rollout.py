"""The transformers engine: batches whatever is asked for at the same time, in one thread."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl.workers.rollout.base import Completion, SamplingParams
from verl.workers.rollout.hf_generate import ATTENTION, Row, generate

logger = logging.getLogger(__name__)

_SETTLE_S = 0.01
_LORA_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.\w+)?\.weight")


@dataclass
class _Request:
    prompt_ids: list[int]
    params: SamplingParams
    future: "asyncio.Future[Completion]"


class HFEngine:
    """A RolloutEngine on a transformers model (decoders with full attention, such as Qwen2 and Llama).

    Requests are gathered and generated together. A round starts as soon as every living episode has asked; or, unless
    ``deterministic``, when nothing new has come for ``batch_window_s``, so that a slow tool holds back nobody. In
    deterministic mode a round holds all living episodes in the order of ``params.order``: the same batches every time.

    An episode's keys and values are kept between its turns (at most ``kept_bytes`` of them, oldest out), so that a
    later turn computes only its new tokens. They are found by ``params.order`` less its last part and used only where
    the prompt begins with the very tokens that they were computed from.

    An adapter is merged into a copy of the weights that it targets, which makes generation as fast as without one.
    """

    failed = False  # it runs in the worker's own process

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int = 256,
        deterministic: bool = False,
        batch_window_s: float = 0.03,
        kept_bytes: int = 1 << 30,
    ) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"rollout.name=hf can't generate from {model.config.model_type} with layers of {sorted(kinds)}; "
                "use a model with full attention only, or rollout.name=vllm"
            )
        model.set_attn_implementation(ATTENTION)
        self.version = 0
        self._model = model.eval()
        self._max_batch_size, self._deterministic = max_batch_size, deterministic
        self._batch_window_s, self._kept_bytes = batch_window_s, kept_bytes
        self._pending: list[_Request] = []
        self._alive = 0
        self._round: asyncio.Task | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        # The rest is touched by that thread alone.
        self._kept: OrderedDict[tuple, tuple[list[int], torch.Tensor]] = OrderedDict()
        self._base: dict[str, torch.Tensor] = {}  # weights that an adapter was merged into, as they were without it
        self._counts = dict.fromkeys(("completions", "batches", "sampled", "prompt", "computed", "busy_s"), 0.0)

    @classmethod
    def from_pretrained(cls, path: str, *, dtype: torch.dtype, device: str, **options: Any) -> "HFEngine":
        """The model in the folder (or of the name) ``path``; ``options`` as for the class."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(model.requires_grad_(False), **options)

    # -- episodes and rounds: on the event loop ------------------------------------------------------------------------

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        if not prompt_ids or params.max_new_tokens < 1:
            raise ValueError(
                f"a completion needs a prompt and room: {len(prompt_ids)} prompt tokens, "
                f"max_new_tokens={params.max_new_tokens}"
            )
        request = _Request(prompt_ids, params, asyncio.get_running_loop().create_future())
        self._pending.append(request)
        self._consider()
        return await request.future

    def begin_episode(self) -> None:
        self._alive += 1

    def end_episode(self) -> None:
        self._alive -= 1
        assert self._alive >= 0, "more episodes ended than began"
        if not self._alive:
            self._thread.submit(self._kept.clear)
        if self._pending:  # perhaps this was the last one that the others waited for
            self._consider()

    def _consider(self) -> None:
        # Not at once: whoever is about to ask, in this pass of the event loop or as the next group of a batch that is
        # being handed out, belongs to the same round.
        asyncio.get_running_loop().call_later(0 if self._deterministic else _SETTLE_S, self._start_if_due)

    def _start_if_due(self) -> None:
        self._pending = [request for request in self._pending if not request.future.done()]
        if self._timer is not None:
            self._timer.cancel()
        if self._round is not None or not self._pending:
            return
        if len(self._pending) >= self._alive:
            self._start()
        elif not self._deterministic:
            self._timer = asyncio.get_running_loop().call_later(self._batch_window_s, self._start)

    def _start(self) -> None:
        if self._round is not None or not self._pending:
            return
        requests, self._pending = self._pending, []
        if self._deterministic:
            requests.sort(key=lambda request: request.params.order)
        self._round = asyncio.get_running_loop().create_task(self._run_round(requests))

    async def _run_round(self, requests: list[_Request]) -> None:
        loop = asyncio.get_running_loop()
        try:
            for i in range(0, len(requests), self._max_batch_size):
                batch = requests[i : i + self._max_batch_size]
                try:
                    completions = await loop.run_in_executor(self._thread, self._generate, batch)
                except Exception as error:  # the batch's episodes end as errors; the engine goes on
                    logger.exception("a batch of %d completions failed", len(batch))
                    completions = [error] * len(batch)
                for request, completion in zip(batch, completions, strict=True):
                    if request.future.done():  # cancelled meanwhile
                        continue
                    if isinstance(completion, Exception):
                        request.future.set_exception(completion)
                    else:
                        request.future.set_result(completion)
        finally:
            self._round = None
            self._consider()

    async def update_weights(self, weights: dict[str, Any], version: int) -> None:
        """``weights``: what ``ActorRefWorker.export_weights`` gives, {"weights": name -> tensor, "peft_config"}.

        Waits for the batch that is being generated. Raises ValueError for names that the model doesn't have.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._load, weights["weights"], weights["peft_config"], version)

    def metrics(self) -> dict[str, float]:
        """Since the start: completions, batches, tokens, and sampled tokens per second of generating."""
        counts = {f"rollout/{name}": value for name, value in self._counts.items()}
        return counts | {"rollout/tokens_per_s": self._counts["sampled"] / max(self._counts["busy_s"], 1e-9)}

    def close(self) -> None:
        """Ends after the batch that is being generated, if any."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- generation and weights: on the engine's thread ----------------------------------------------------------------

    def _generate(self, requests: list[_Request]) -> list[Completion]:
        started = time.perf_counter()
        rows = [Row(r.prompt_ids, r.params, self._take_kept(r)) for r in requests]
        computed = generate(self._model, rows)
        self._keep(rows)
        for name, amount in (
            ("completions", len(rows)),
            ("batches", 1),
            ("sampled", sum(len(row.token_ids) for row in rows)),
            ("prompt", sum(len(row.prompt_ids) for row in rows)),
            ("computed", computed),
            ("busy_s", time.perf_counter() - started),
        ):
            self._counts[name] += amount
        return [Completion(row.token_ids, row.logprobs, row.finish_reason, self.version) for row in rows]

    def _take_kept(self, request: _Request) -> torch.Tensor | None:
        """Keys and values of the longest known beginning of the prompt; at least one token is left to compute."""
        ids, kept = self._kept.pop(request.params.order[:-1], ([], None))
        if kept is None or request.prompt_ids[: len(ids)] != ids:
            return None
        return kept[:, :, :, : len(request.prompt_ids) - 1]

    def _keep(self, rows: list[Row]) -> None:
        for row in rows:
            if row.params.order:
                self._kept[row.params.order[:-1]] = ((row.prompt_ids + row.token_ids)[:-1], row.cache)
        excess = sum(cache.nbytes for _, cache in self._kept.values()) - self._kept_bytes
        while excess > 0:
            excess -= self._kept.popitem(last=False)[1][1].nbytes

    @torch.no_grad()
    def _load(self, weights: dict[str, torch.Tensor], peft_config: dict[str, Any] | None, version: int) -> None:
        if peft_config is None:
            self._load_full(weights)
        else:
            self._merge_adapter(weights, peft_config)
        self._kept.clear()  # computed with the old weights
        self.version = version

    def _load_full(self, weights: dict[str, torch.Tensor]) -> None:
        parameters = dict(self._model.named_parameters())  # a tied weight once
        missing = parameters.keys() - weights.keys()
        unknown = weights.keys() - self._model.state_dict().keys()
        if missing or unknown:
            raise ValueError(f"weights of another model: {sorted(missing)[:3]} missing, {sorted(unknown)[:3]} unknown")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        self._base.clear()

    def _merge_adapter(self, weights: dict[str, torch.Tensor], peft_config: dict[str, Any]) -> None:
        """W <- W_base + scale * B A, computed in float32; exact where the model is float32."""
        factors: dict[str, dict[str, torch.Tensor]] = {}
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights.items():
            match = _LORA_NAME.fullmatch(name)
            if match is None or f"{match['module']}.weight" not in parameters:
                raise ValueError(
                    f"{name} is not a LoRA factor of this model; only plain LoRA on linear layers is known"
                )
            factors.setdefault(f"{match['module']}.weight", {})[match["factor"]] = tensor
        for name, pair in factors.items():
            parameter = parameters[name]
            base = self._base.setdefault(name, parameter.clone())
            rank = pair["A"].shape[0]
            scale = peft_config["lora_alpha"] / (rank**0.5 if peft_config.get("use_rslora") else rank)
            a, b = (pair[factor].to(parameter.device, torch.float32) for factor in "AB")
            parameter.copy_(base.float() + scale * (b @ a))
