"""Does the actor work on this GPU, how fast, and in how much memory? Random weights, nothing is downloaded.

    python scripts/gpu_check.py [--json FILE] [--markdown FILE]            # under 8 minutes on a data-centre card
    python scripts/gpu_check.py --device cpu --shape tiny                  # the same on a CPU, in seconds

Needs torch, transformers and peft alone. In the shape of Qwen2.5-3B with the recipe's adapter, as training has it (FSDP
of one rank, bfloat16 base, packed): log-probs and an optimizer step at 4k, 8k and 16k tokens, with gradient
checkpointing and without; flash attention and packed SDPA against float32; chunked against full logits. A part that
runs out of memory, or has nothing to run, is a line in the table. Compare with scripts/plan_memory.py.
"""

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.trainer.config.schema import ActorConfig, ModelConfig, StabilityConfig  # noqa: E402
from verl.utils.fsdp_utils import (  # noqa: E402
    init_process_group,
    lora_wrap_policy,
    shard_model,
    trainable_parameters,
)
from verl.utils.lora import attach_lora  # noqa: E402
from verl.utils.model_shape import SHAPES, ModelShape  # noqa: E402
from verl.utils.torch_functional import ValueGuard, log_probs_from_hidden  # noqa: E402
from verl.workers.actor.dp_actor import DataParallelPPOActor, PolicyModel  # noqa: E402
from verl.workers.actor.packing import PACKED_SDPA  # noqa: E402

LORA = ModelConfig(lora_rank=64, lora_alpha=128)
TINY = ModelShape(64, 128, 2, 4, 2, 16, 512)
EPISODE, SAMPLED = 4096, 5  # tokens an episode at most; one token in so many was sampled


@dataclass
class Row:
    """One line of the table. ``peak_gb``: most that was allocated (GB of 2^30), None on a CPU; ``result``: a word."""

    part: str
    tokens: int
    seconds: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_gb: float | None = None
    result: str = "done"


class Check:
    """One run on one device: what all parts share."""

    def __init__(self, device: torch.device, shape: ModelShape, deadline: float) -> None:
        self.device, self.shape, self.deadline = device, shape, deadline
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        self.attention = "flash_attention_2" if self.flash else PACKED_SDPA
        self.rate = self._matmul_rate()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    # ------------------------------------------------------------------------------------------------------- measuring
    def measure(self, action: Callable[[], Any], repeats: int = 1) -> tuple[float, float | None, Any]:
        """(seconds of the last of ``repeats``, peak GB, its result)"""
        for _ in range(repeats):
            self._wait(reset=True)
            began = time.perf_counter()
            result = action()
            self._wait()
            seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None
        return seconds, peak, result

    def _wait(self, reset: bool = False) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if reset:
                torch.cuda.reset_peak_memory_stats(self.device)

    def _matmul_rate(self) -> float:
        """Operations a second of a square matrix product in the dtype of the base."""
        side = 8192 if self.device.type == "cuda" else 512
        a, b = torch.randn(2, side, side, device=self.device, dtype=self.dtype)
        seconds, _, _ = self.measure(lambda: [a @ b for _ in range(5)], repeats=3)
        return 5 * 2 * side**3 / seconds

    def guarded(self, row: Row, part: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """The rows of ``part``; ``row`` with the reason where it can't run, or not to its end."""
        if time.monotonic() > self.deadline:
            yield replace(row, result="skipped: out of time (--minutes)")
            return
        try:
            yield from part()
        except (RuntimeError, ImportError) as error:  # torch.OutOfMemoryError and what a driver or kernel refuses
            memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
            yield replace(row, result="out of memory" if memory else f"failed: {reason}")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------------------- what is used
    def model(self, shape: ModelShape, dtype: torch.dtype, attention: str, checkpointing: bool = False) -> Any:
        config = Qwen2Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=32768,
            tie_word_embeddings=shape.tied,
        )
        torch.manual_seed(0)
        with self.device:
            model = Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def actor(self, tokens: int, checkpointing: bool, mesh: Any) -> DataParallelPPOActor:
        """As ``fsdp_workers.ActorRefWorker`` builds it, but for the weights."""
        base = self.model(self.shape, self.dtype, self.attention, checkpointing)
        policy = PolicyModel(attach_lora(base, LORA))
        shard_model(policy, mesh, lora_wrap_policy(base._no_split_modules), self.dtype)
        return DataParallelPPOActor(
            policy,
            ActorConfig(use_kl_loss=False, ppo_max_token_len_per_gpu=tokens),
            StabilityConfig(),
            max_response_length=EPISODE,
            optimizer=torch.optim.AdamW(trainable_parameters(policy).values(), lr=1e-5, eps=1e-4),
        )

    def batch(self, tokens: int, longest: int = EPISODE) -> tuple[Any, list[int], int]:
        """(episodes of ``tokens`` tokens in all, their lengths, how many tokens of them were sampled)"""
        length = min(longest, tokens)
        count, prompt = tokens // length, max(1, length // 16)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, self.shape.vocab, (count, length), generator=generator)
        mask = (torch.arange(length - prompt) % SAMPLED == 0).float().expand(count, -1).clone()
        mask[:, -1] = 1  # so that the forward reads to the end
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": mask,
            "advantages": torch.linspace(-1, 1, count)[:, None] * mask if count > 1 else mask,
        }
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        data = SimpleNamespace(batch=on_device, meta_info={"temperature": 1.0})
        return data, [length] * count, int(mask.sum())


# ------------------------------------------------------------------------------------------------------------ the parts
def speed(check: Check, sizes: list[int], checkpointing: bool, mesh: Any) -> Iterator[Row]:
    """Log-probs and an update of ``sizes`` tokens, from small to large, until one doesn't fit."""
    actor = check.actor(max(sizes), checkpointing, mesh)
    for tokens in sizes:
        batch = check.batch(tokens)
        # The log-prob pass keeps no activations, so one series of it is enough.
        for part in ["log-probs", "update, checkpointing"] if checkpointing else ["update, no checkpointing"]:
            row = Row(part, sum(batch[1]))
            (made,) = check.guarded(row, partial(timed, check, row, actor, *batch))
            yield made
            if made.result == "out of memory":  # in the middle of a layer: FSDP's state is of no use any more
                return


def timed(
    check: Check, row: Row, actor: DataParallelPPOActor, data: Any, lengths: list[int], scored: int
) -> Iterator[Row]:
    """``row`` with what its pass over ``data`` took."""
    update = row.part.startswith("update")
    work = actor.update_policy if update else actor.compute_log_prob
    count = check.shape.update_flops if update else check.shape.forward_flops
    flops = count(lengths, scored, LORA.lora_rank, LORA.target_modules)
    seconds, peak, _ = check.measure(lambda: work(data), repeats=2)
    mfu = flops / seconds / check.rate
    yield replace(row, seconds=seconds, tokens_per_s=row.tokens / seconds, mfu=mfu, peak_gb=peak)


def equality(check: Check, tokens: int) -> Iterator[Row]:
    """Mean |difference| of log-probs in the base's dtype from float32 ones, by attention: packed, padded, flash."""
    shape = replace(check.shape, layers=min(4, check.shape.layers))
    data, lengths, _ = check.batch(tokens, max(16, tokens // 4))
    for row, length in enumerate(lengths):  # prompts of different lengths, or nothing is padded
        data.batch["attention_mask"][row, : row * length // 64] = 0

    def log_probs(dtype: torch.dtype, attention: str, packed: bool) -> torch.Tensor:
        policy = PolicyModel(check.model(shape, dtype, attention))
        config = ActorConfig(use_kl_loss=False, ppo_max_token_len_per_gpu=2 * tokens)
        actor = DataParallelPPOActor(policy, config, StabilityConfig(), max_response_length=EPISODE, packed=packed)
        return actor.compute_log_prob(data, with_entropy=False)[0]

    exact = log_probs(torch.float32, "sdpa", False)
    ways = {"padded SDPA": ("sdpa", False), "packed SDPA": (PACKED_SDPA, True)}
    errors: dict[str, float] = {}
    for name in [*ways, "flash attention"]:
        if name == "flash attention" and not check.flash:
            reason = "flash-attn is not installed" if check.device.type == "cuda" else "it needs a GPU"
            yield Row(name, tokens, result=f"skipped: {reason}")
            continue
        attention, packed = ways.get(name, ("flash_attention_2", True))
        seconds, peak, found = check.measure(lambda a=attention, p=packed: log_probs(check.dtype, a, p))
        errors[name] = float((found - exact).abs().sum() / data.batch["response_mask"].sum())
        good = errors[name] <= 2 * errors["padded SDPA"] + 1e-5
        yield Row(
            name, tokens, peak_gb=peak, result=f"{'equal' if good else 'DIFFERENT'}: {errors[name]:.1e} from float32"
        )


def logits(check: Check, tokens: int, chunked: bool) -> Iterator[Row]:
    """Log-probs of ``tokens`` hidden states, forward and backward."""
    shape, generator = check.shape, torch.Generator(check.device).manual_seed(0)
    kind = {"device": check.device, "dtype": check.dtype, "generator": generator}
    hidden = torch.randn(tokens, shape.hidden, **kind).requires_grad_()
    weight = 0.02 * torch.randn(shape.vocab, shape.hidden, **kind)
    targets = torch.randint(0, shape.vocab, (tokens,), device=check.device, generator=generator)

    def run() -> tuple[float, float]:
        hidden.grad = None
        if chunked:
            log_probs, _ = log_probs_from_hidden(hidden, weight, targets, 1.0, ValueGuard())
        else:
            log_probs = F.log_softmax(F.linear(hidden, weight).float(), dim=1).gather(1, targets[:, None])[:, 0]
        log_probs.mean().backward()
        return log_probs.mean().item(), hidden.grad.float().norm().item()

    seconds, peak, (mean, norm) = check.measure(run, repeats=2)
    part = "chunked logits" if chunked else "full logits"
    yield Row(part, tokens, seconds, tokens / seconds, None, peak, f"mean {mean:.5f}, gradient {norm:.4e}")


def run(check: Check, sizes: list[int]) -> list[Row]:
    """All parts, each printed as it ends."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if check.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    _, mesh = init_process_group()
    rows: list[Row] = []
    parts: list[tuple[Row, Callable[[], Iterator[Row]]]] = [
        (Row("attention", sizes[0]), lambda: equality(check, sizes[0])),
        (Row("chunked logits", sizes[0]), lambda: logits(check, sizes[0], True)),
        (Row("full logits", sizes[0]), lambda: logits(check, sizes[0], False)),
        (Row("update, checkpointing", sizes[0]), lambda: speed(check, sizes, True, mesh)),
        (Row("update, no checkpointing", sizes[0]), lambda: speed(check, sizes, False, mesh)),
    ]
    try:
        for row, part in parts:
            for made in check.guarded(row, part):
                rows.append(made)
                print("| " + " | ".join(cells(made)) + " |", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()
    return rows


# ----------------------------------------------------------------------------------------------------------- the report
def cells(row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        row.part,
        f"{row.tokens:,}",
        number(row.seconds, ".2f"),
        number(row.tokens_per_s, ",.0f"),
        number(row.mfu, ".0%"),
        number(row.peak_gb, ".1f"),
        row.result,
    ]


def markdown(check: Check, rows: list[Row]) -> str:
    flash = "flash-attn" if check.flash else "packed SDPA"
    lines = [
        f"**{check.name}**, torch {torch.__version__}, {flash}, matrix product {check.rate / 1e12:.2f} TFLOP/s "
        f"({str(check.dtype).removeprefix('torch.')}), {check.shape.parameters:,} parameters",
        "",
        "| part | tokens | s | tokens/s | of the matrix product | peak GB | result |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join(lines + ["| " + " | ".join(cells(row)) + " |" for row in rows]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where two ways that must agree don't, or 2 without the device."""
    shapes = {**SHAPES, "tiny": TINY}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=shapes, default="Qwen2.5-3B")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 4096 8192 16384; tiny: 64 128 256")
    parser.add_argument("--minutes", type=float, default=7.0, help="no part begins later than this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU; try --device cpu --shape tiny", file=sys.stderr)
        return 2
    sizes = sorted(args.tokens or ([64, 128, 256] if args.shape == "tiny" else [4096, 8192, 16384]))
    check = Check(torch.device(args.device), shapes[args.shape], time.monotonic() + 60 * args.minutes)
    rows = run(check, sizes)
    table = markdown(check, rows)
    print(table)
    if args.markdown:
        args.markdown.write_text(table, encoding="utf-8")
    if args.json:
        report = {"device": check.name, "torch": torch.__version__, "matmul_flops_per_s": check.rate}
        report["rows"] = [asdict(row) for row in rows]
        args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 1 if any(row.result.startswith("DIFFERENT") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
