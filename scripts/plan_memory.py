"""Does a run fit on a card, and how long will a step take? From the model's config.json and the run's own settings.

    python scripts/plan_memory.py [--model FOLDER|NAME] [--card a100-80g | --memory-gb 48 --tflops 150 --bandwidth 900]
                                  [profile=a100_80g] [key=value ...]

Settings are read as training reads them (profile=a100_80g where none is given). No weights are loaded. Memory is in GB
of 2^30 bytes, of the fullest card. What is marked "assumed" is a round figure of ours, all else follows from shapes;
nothing of it has been measured on a card. Exit code: 0 it fits, 1 it doesn't, 2 a mistake in the command line.

Seconds are operations / (peak rate x a share of it) where the card computes, bytes / (bandwidth x a share of it) where
it waits for its memory: each token that is sampled reads all weights once, shared by the episodes that run together,
and the keys and values of its own episode.
"""

import argparse
import math
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.trainer.config import Config, load_config  # noqa: E402
from verl.utils.model_shape import ModelShape, find_shape  # noqa: E402
from verl.utils.torch_functional import LOGITS_PER_CHUNK  # noqa: E402

GB = 2**30
BYTES_PER_LOGIT = 16  # of a chunk at once: bf16, float32, over temperature, its softmax, the gradient in bf16
EPISODES_TOGETHER = 8  # that an engine should hold when advice is given: with fewer, generating is a queue
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Card:
    """Memory that a process can have (GB of 2^30), dense bf16 TFLOP/s and memory bandwidth in GB/s (10^9)."""

    name: str
    memory_gb: float
    tflops: float
    bandwidth: float


CARDS = {  # vendors' data sheets; of the memory what the driver leaves
    "a100-80g": Card("a100-80g", 79.2, 312, 2039),
    "a100-40g": Card("a100-40g", 39.4, 312, 1555),
    "h100-80g": Card("h100-80g", 79.1, 989, 3350),
    "h200": Card("h200", 139.8, 989, 4800),
    "4090-24g": Card("4090-24g", 23.6, 165, 1008),
}


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says. Shares are of the card's peak."""

    prompt_tokens: int = 300  # system prompt, tool and question
    turn_tokens: int = 160  # a thought and a call, or an answer
    search_s: float = 1.0  # a call
    mfu: float = 0.25  # of log-probs and update; prime-rl reports 22 % on an H100, verl 12 % in all
    prefill_mfu: float = 0.4  # of reading prompts and observations
    bandwidth_share: float = 0.6  # of decoding
    context_gb: float = 0.6  # a process: CUDA context, cuBLAS and NCCL workspaces
    engine_work_gb: float = 1.5  # vLLM's activations, CUDA graphs and sampler
    fragmentation: float = 0.1  # of what the actor allocates and frees


@dataclass(frozen=True)
class Line:
    name: str
    value: float  # GB, or seconds
    how: str


@dataclass(frozen=True)
class Plan:
    """``memory`` in GB and ``left`` of the card; ``time`` in seconds and the ``step`` that they make."""

    memory: list[Line]
    left: float
    kv_tokens: int
    time: list[Line]
    step: float
    problem: str | None


# --------------------------------------------------------------------------------------------------------------- memory
def actor_memory(shape: ModelShape, config: Config, assumed: Assumptions) -> list[Line]:
    """What an actor rank holds at the worst moment of the update."""
    model = config.actor_rollout_ref.model
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    width = 4 if model.dtype == "float32" else 2
    rank, targets = (model.lora_rank, model.target_modules) if model.use_lora else (0, LINEARS)
    trained = shape.lora_parameters(rank, targets) if model.use_lora else shape.parameters
    held = {"base weights": (width, f"{shape.parameters:,} parameters x {width} bytes")}
    if not model.use_lora:
        held = {"weights": (4, f"{shape.parameters:,} parameters x 4 bytes, trained in float32")}
        if config.actor_rollout_ref.actor.use_kl_loss:
            held["reference"] = (width, f"a frozen copy in {width} bytes (use_kl_loss)")
    lines = [
        Line(name, shape.parameters * size / ranks / GB, how + (f" / {ranks} ranks" if ranks > 1 else ""))
        for name, (size, how) in held.items()
    ]
    if model.use_lora:
        lines.append(Line("adapter", trained * 4 / ranks / GB, f"rank {rank}: {trained:,} parameters x 4 bytes"))
        lines.append(Line("gradients", trained * 4 / GB, "the adapter's, float32, whole until they are reduced"))
    else:
        lines.append(Line("gradients", trained * 4 / ranks / GB, "float32, reduced after each micro-batch"))
    lines.append(Line("optimizer", trained * 8 / ranks / GB, "Adam's two moments, float32"))
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    gathered = (embeddings + 2 * shape.layer_parameters) * width
    working = [Line("gathered", gathered / GB, "FSDP's whole copies: embeddings and two layers")]
    working += activations(shape, config, rank, targets, width)
    logits = LOGITS_PER_CHUNK["cuda"]
    working.append(Line("logits chunk", logits * BYTES_PER_LOGIT / GB, f"{logits:,} logits x {BYTES_PER_LOGIT} bytes"))
    if not model.use_lora:
        working.append(Line("head's gradient", shape.vocab * shape.hidden * 8 / GB, "summed in float32, then as used"))
    spare = assumed.fragmentation * sum(line.value for line in working)
    working.append(
        Line("fragmentation", spare, f"assumed: {assumed.fragmentation:.0%} of the {len(working)} lines above")
    )
    return [*lines, *working, Line("actor's context", assumed.context_gb, "assumed: CUDA, cuBLAS, NCCL")]


def activations(shape: ModelShape, config: Config, rank: int, targets: Any, width: int) -> list[Line]:
    """What the backward needs of a micro-batch, in one or two lines."""
    tokens = micro_batch_tokens(config)
    layer = tokens * shape.saved_bytes(rank, targets, width)
    work = tokens * (2 * shape.intermediate + 4 * shape.hidden) * width  # gradients on their way through one layer
    each = f"{shape.saved_bytes(rank, targets, width):,} bytes a token and layer"
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        return [
            Line("activations", shape.layers * layer / GB, f"{tokens:,} tokens x {shape.layers} layers x {each}"),
            Line("layer at work", work / GB, "its gradients"),
        ]
    inputs = tokens * shape.layers * shape.hidden * width
    return [
        Line("activations", inputs / GB, f"{tokens:,} tokens x {shape.layers} layers' inputs (checkpointing)"),
        Line("layer at work", (layer + work) / GB, f"computed again: {each}, and its gradients"),
    ]


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch: an episode longer than the limit gets one of its own."""
    actor, longest = config.actor_rollout_ref.actor, config.data.max_prompt_length + config.data.max_response_length
    longest = min(longest, config.actor_rollout_ref.rollout.max_model_len)
    if actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None:
        return max(actor.ppo_max_token_len_per_gpu, longest)
    return actor.ppo_micro_batch_size_per_gpu * longest


def engine_memory(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> tuple[list[Line], int]:
    """(what an engine holds on each of its cards, tokens of its KV cache)"""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    cards, width = rollout.tensor_model_parallel_size, 4 if model.dtype == "float32" else 2
    whole = rollout.gpu_memory_utilization * card.memory_gb
    weights = shape.parameters * width / cards / GB
    adapter = shape.lora_parameters(model.lora_rank, model.target_modules) * width / GB if model.use_lora else 0.0
    cache = max(0.0, whole - weights - adapter - assumed.engine_work_gb)
    tokens = int(cache * GB * cards / shape.kv_bytes(width))
    lines = [
        Line("engine's weights", weights, f"{width} bytes a parameter" + (f" / {cards} cards" if cards > 1 else "")),
        Line("engine's adapter", adapter, "its one slot"),
        Line("engine's work", assumed.engine_work_gb, "assumed: activations, CUDA graphs, sampler"),
        Line("KV cache", cache, f"the rest of {rollout.gpu_memory_utilization:g} of the card: {tokens:,} tokens"),
        Line("engine's context", assumed.context_gb, "assumed, on top of its share"),
    ]
    return lines, tokens


# ----------------------------------------------------------------------------------------------------------------- time
def step_time(
    shape: ModelShape, config: Config, card: Card, kv_tokens: int, assumed: Assumptions
) -> tuple[list[Line], float]:
    """(lines, seconds of a step) in which every episode makes all its searches and observations are full."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    episodes = config.data.train_batch_size * config.agent_grpo.n
    turns, prompt = config.max_turns, min(assumed.prompt_tokens, config.data.max_prompt_length)
    sampled = (turns + 1) * assumed.turn_tokens
    response = min(sampled + turns * config.search.max_obs_length, config.data.max_response_length)
    sampled = min(sampled, response)
    length = prompt + response
    engines, cards = rollout.num_workers, rollout.tensor_model_parallel_size
    peak, width = card.tflops * 1e12, 4 if model.dtype == "float32" else 2

    own = math.ceil(episodes / engines)
    together = max(1, min(own, rollout.max_batch_size, kv_tokens // max(length, 1)))
    prefill = own * shape.forward_flops([length], 0) / (cards * peak * assumed.prefill_mfu)
    moved = shape.parameters * width + together * length / 2 * shape.kv_bytes(width)
    decode = own * sampled / together * moved / (cards * card.bandwidth * 1e9 * assumed.bandwidth_share)
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rank, targets = (model.lora_rank, model.target_modules) if model.use_lora else (0, ())
    rate = ranks * peak * assumed.mfu
    forward = episodes * shape.forward_flops([length], sampled, rank, targets)
    update = episodes * shape.update_flops([length], sampled, rank, targets)
    actor = config.actor_rollout_ref.actor
    again = forward if model.enable_gradient_checkpointing else 0.0
    on_policy = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    passes = int(actor.use_kl_loss) + int(not on_policy)
    lines = [
        Line("decoding", decode, f"{own * sampled:,} tokens an engine, {together} episodes together"),
        Line("reading", prefill, f"{own * length:,} tokens an engine: prompts, observations (a prefix once)"),
        Line("search", turns * assumed.search_s, f"{turns} x {assumed.search_s:g} s (assumed) of the last episode"),
        Line("log-probs", passes * forward / rate, f"{passes} forward pass(es) over {episodes * length:,} tokens"),
        Line("update", (update + again) / rate, "forward, backward" + (", forward again" if again else "")),
    ]
    made, learned = sum(line.value for line in lines[:3]), sum(line.value for line in lines[3:])
    return lines, max(made, learned) if config.trainer.async_rollout else made + learned


# -------------------------------------------------------------------------------------------------------------- verdict
def make_plan(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> Plan:
    """Both plans for one card; ``problem`` says in a sentence why it doesn't fit."""
    rollout = config.actor_rollout_ref.rollout
    engine, kv_tokens = engine_memory(shape, config, card, assumed)
    actor = actor_memory(shape, config, assumed)
    shared = rollout.tensor_model_parallel_size == 1
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    guests = math.ceil(rollout.num_workers / ranks) if shared else 0
    memory = actor + [replace(line, value=line.value * guests) for line in engine if guests]
    left = card.memory_gb - sum(line.value for line in memory)
    time, step = step_time(shape, config, card, kv_tokens, assumed)
    problem = None
    if kv_tokens < rollout.max_model_len:
        problem = f"the KV cache of {kv_tokens:,} tokens holds no episode of {rollout.max_model_len:,}"
    elif left < 0:
        problem = f"{-left:.1f} GB are missing"
    return Plan(memory, left, kv_tokens, time, step, problem)


def changed(config: Any, key: str, value: Any) -> Any:
    """``config`` with ``key`` (dotted) set to ``value``."""
    name, _, rest = key.partition(".")
    assert is_dataclass(config) and name in {field.name for field in fields(config)}, key
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def remedies(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> list[tuple[str, Any]]:
    """Settings that would make a difference, the cheapest first, each (key, value) another than now."""
    model, actor, rollout = (getattr(config.actor_rollout_ref, name) for name in ("model", "actor", "rollout"))
    found: list[tuple[str, Any]] = []
    if rollout.tensor_model_parallel_size == 1:
        engine, _ = engine_memory(shape, config, card, assumed)
        cache = EPISODES_TOGETHER * rollout.max_model_len * shape.kv_bytes() / GB
        needed = math.ceil(100 * (sum(line.value for line in engine[:3]) + cache) / card.memory_gb) / 100
        free = card.memory_gb - sum(line.value for line in actor_memory(shape, config, assumed)) - assumed.context_gb
        share = math.floor(100 * free / card.memory_gb - 2) / 100  # and 2 % of the card to spare
        if needed <= share < 1 and share != rollout.gpu_memory_utilization:
            found.append(("actor_rollout_ref.rollout.gpu_memory_utilization", share))
    if not model.enable_gradient_checkpointing:
        found.append(("actor_rollout_ref.model.enable_gradient_checkpointing", True))
    longest = min(config.data.max_prompt_length + config.data.max_response_length, rollout.max_model_len)
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu > longest:
        found.append(("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", longest))
    if not model.use_lora:
        found.append(("actor_rollout_ref.model.use_lora", True))
    return found


def advice(shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> list[tuple[str, Any]]:
    """The first single change that makes it fit; else several that do so together; [] where ours don't."""
    made: list[tuple[str, Any]] = []
    while options := remedies(shape, config, card, assumed):
        for key, value in options:
            if make_plan(shape, changed(config, key, value), card, assumed).problem is None:
                return [*made, (key, value)]
        made.append(options[0])
        config = changed(config, *options[0])
    return []


def verdict(plan: Plan, shape: ModelShape, config: Config, card: Card, assumed: Assumptions) -> str:
    """One or two plain sentences."""
    length = config.actor_rollout_ref.rollout.max_model_len
    if plan.problem is None:
        full = plan.kv_tokens // length
        return f"It fits: {plan.left:.1f} GB are left, and the KV cache holds {full} episodes of {length:,} tokens."
    changes = advice(shape, config, card, assumed)
    if not changes:
        return (
            f"It doesn't fit: {plan.problem}. No setting of ours helps: take a smaller model, a larger card or several."
        )
    said = ", then ".join(f"{key}={str(value).lower()}" for key, value in changes)
    return f"It doesn't fit: {plan.problem}. Change first: {said}."


def show(plan: Plan, said: str, title: str) -> None:
    console = Console(width=max(120, Console().width))
    memory = Table(title=f"memory of {title}", title_justify="left")
    time = Table(title="time of a step in which every episode makes all its searches", title_justify="left")
    for table, unit in ((memory, "GB"), (time, "s")):
        table.add_column("what")
        table.add_column(unit, justify="right")
        table.add_column("how", no_wrap=False)
    for line in plan.memory:
        memory.add_row(line.name, f"{line.value:.2f}", line.how)
    memory.add_section()
    memory.add_row(
        "left", f"{plan.left:.2f}", "actor and engine hold theirs all the time; the engine idles in the update"
    )
    for line in plan.time:
        time.add_row(line.name, f"{line.value:.0f}", line.how)
    time.add_section()
    time.add_row("step", f"{plan.step:.0f}", "all computed, with assumed shares of the card's peak")
    console.print(memory, time, said)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Assumptions]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with config.json, or a name; default: actor_rollout_ref.model.path")
    parser.add_argument("--card", choices=CARDS, default="a100-80g")
    parser.add_argument("--memory-gb", type=float, help="GB of 2^30 that a process can have, instead of the card's")
    parser.add_argument("--tflops", type=float, help="dense bf16 TFLOP/s")
    parser.add_argument("--bandwidth", type=float, help="GB/s (10^9) of the card's memory")
    group = parser.add_argument_group("assumptions")
    for field in fields(Assumptions):
        kind = type(field.default)
        group.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default, help="%(default)s")
    parser.add_argument("overrides", nargs="*", help="key=value, as for train_grpo.sh")
    args = parser.parse_intermixed_args(arguments)
    return args, Assumptions(**{field.name: getattr(args, field.name) for field in fields(Assumptions)})


def main(arguments: list[str] | None = None) -> int:
    args, assumed = parse(arguments)
    named = any(text.startswith("profile=") for text in args.overrides)
    try:
        config = load_config(args.overrides if named else ["profile=a100_80g", *args.overrides])
        path = args.model or config.actor_rollout_ref.model.path
        shape = find_shape(path if Path(path).is_dir() or not (ROOT / path).is_dir() else str(ROOT / path))
    except ValueError as error:
        print(f"plan_memory: {error}", file=sys.stderr)
        return 2
    card = CARDS[args.card]
    given = {name: getattr(args, name) for name in ("memory_gb", "tflops", "bandwidth") if getattr(args, name)}
    card = replace(card, name="own card", **given) if given else card
    plan = make_plan(shape, config, card, assumed)
    title = f"{path} on {card.name} ({card.memory_gb:g} GB), profile={config.profile or 'none'}"
    show(plan, verdict(plan, shape, config, card, assumed), title)
    return 1 if plan.problem else 0


if __name__ == "__main__":
    sys.exit(main())
