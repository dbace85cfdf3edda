"""Tokens a second and peak memory of the update: packed or padded, full or chunked logits, and TRL on the same batch.

    python scripts/bench/train_step.py [--sizes 2M 30M 135M] [--vocabularies 1792 151936] [--trl] [--json FILE]

The actor is the project's own, with the recipe's adapter on random weights. The batch has the demo's length mix: how
often its episodes searched 0 to 4 times in training (EPISODES). Seconds are processor seconds of one thread, the better
of ``--repeats``, so that what else the machine does isn't counted; each case is a process of its own, with the peak of
its memory over what it held before. MFU is the model's operations (of tokens that a loss needs; padding and what is
computed again don't count) over the rate of this machine's matrix product, measured in the same run. ``--trl`` makes an
environment for TRL under the user's cache folder at its first use; TRL gets the same batch, adapter, optimizer and loss
(no KL, no gradient checkpointing) through ``GRPOTrainer.train``, its own padding and its own fused log-probs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verl.trainer.config.schema import ActorConfig, ModelConfig, StabilityConfig  # noqa: E402
from verl.utils.fsdp_utils import trainable_parameters  # noqa: E402
from verl.utils.lora import attach_lora  # noqa: E402
from verl.utils.model_shape import ModelShape  # noqa: E402
from verl.utils.torch_functional import ValueGuard, log_probs_from_hidden  # noqa: E402
from verl.workers.actor import dp_actor  # noqa: E402
from verl.workers.actor.packing import PACKED_SDPA  # noqa: E402

SIZES = {  # without the embedding of a large vocabulary: the demo's policy, one between, SmolLM2-135M
    "2M": ModelShape(192, 512, 4, 6, 3, 32, 0),
    "30M": ModelShape(512, 1408, 10, 8, 4, 64, 0),
    "135M": ModelShape(576, 1536, 30, 9, 3, 64, 0),
}
EPISODES = {"2M": 32, "30M": 8, "135M": 4}  # of a batch: what a core can take
SEARCHES = {0: 147, 1: 102, 2: 390, 3: 105, 4: 24}  # episodes of a demo training, by how often they searched
PROMPT, CALL, OBSERVATION, ANSWER = 271, 62, 165, 26  # tokens, the demo's means
LORA = ModelConfig(lora_rank=64, lora_alpha=128)
TRL = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "peft==0.21.2")
IDS = 1700  # of the demo's tokenizer, which TRL decodes with; their values cost nothing


# ------------------------------------------------------------------------------------------------------- the same batch
def searches(count: int) -> list[int]:
    """How often each of ``count`` episodes searches: evenly spaced quantiles of the demo's histogram."""
    pool = [depth for depth, number in SEARCHES.items() for _ in range(number)]
    return [pool[int((k + 0.5) * len(pool) / count)] for k in range(count)]


def make_episodes(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, response, mask) of each episode; the mask is 1 where the policy sampled."""
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for depth in searches(count):
        mask = ([1] * CALL + [0] * OBSERVATION) * depth + [1] * ANSWER
        ids = torch.randint(1, IDS, (PROMPT + len(mask),), generator=generator).tolist()
        episodes.append((ids[:PROMPT], ids[PROMPT:], mask))
    return episodes


def make_batch(episodes: list[tuple[list[int], list[int], list[int]]]) -> Any:
    """The actor's ``DataProto`` of these episodes."""
    from verl.protocol import (
        DataProto,
    )  # not at the top: TRL's environment, which runs this file too, has no tensordict

    longest = max(len(response) for _, response, _ in episodes)
    ids, attention = torch.zeros(2, len(episodes), PROMPT + longest, dtype=torch.long)
    mask = torch.zeros(len(episodes), longest)
    for row, (prompt, response, sampled) in enumerate(episodes):
        ids[row, : PROMPT + len(response)] = torch.tensor(prompt + response)
        attention[row, : PROMPT + len(response)] = 1
        mask[row, : len(response)] = torch.tensor(sampled)
    advantages = torch.linspace(-1, 1, len(episodes))[:, None] * mask
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "advantages": advantages}
    return DataProto.from_dict(tensors, {}, {"temperature": 1.0})


def make_model(size: str, vocabulary: int, attention: str) -> Qwen2ForCausalLM:
    shape = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=attention)


# ------------------------------------------------------------------------------------------------------------- one case
@dataclass(frozen=True)
class Case:
    """``what``: "update" of the actor, "logprobs" (the log-probs alone, forward and backward) or "trl"."""

    what: str
    size: str
    vocabulary: int
    packed: bool = True
    chunked: bool = True
    episodes: int = 0
    tokens: int = 0  # of "logprobs"

    @property
    def name(self) -> str:
        layout = {"update": "packed" if self.packed else "padded", "trl": "TRL", "logprobs": "log-probs alone"}
        return layout[self.what] + ("" if self.chunked else ", full logits")


def full_log_probs(hidden, weight, targets, temperature, guard, with_entropy=False, entropy_gradient=False):
    """``log_probs_from_hidden`` as it is usually written: the (N, V) float32 logits; entropies have no gradient."""
    assert not entropy_gradient
    logits = F.linear(hidden, weight).float()
    guard(logits.detach())
    log_p = F.log_softmax(logits / temperature, dim=1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(1) if with_entropy else torch.zeros(len(hidden))
    return log_p.gather(1, targets[:, None])[:, 0], entropy


class PeakMemory:
    """MB that the process held at most inside, over what it held before; None where the system doesn't tell."""

    megabytes: float | None = None

    @staticmethod
    def _held(key: str) -> float:
        return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    def __enter__(self) -> "PeakMemory":
        self._linux = Path("/proc/self/clear_refs").exists()
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            self._before = self._held("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._linux:
            self.megabytes = self._held("VmHWM") - self._before


def best_of(repeats: int, action: Any) -> tuple[float, float | None]:
    """(processor seconds, MB): the best time, the peak of the first call."""
    times, peaks = [], []
    for _ in range(repeats):
        with PeakMemory() as memory:
            started = time.process_time()
            action()
            times.append(time.process_time() - started)
        peaks.append(memory.megabytes)
    return min(times), peaks[0]


def measure_update(case: Case, repeats: int) -> dict[str, Any]:
    model = attach_lora(make_model(case.size, case.vocabulary, PACKED_SDPA if case.packed else "sdpa"), LORA)
    policy = dp_actor.PolicyModel(model)
    if not case.chunked:
        dp_actor.log_probs_from_hidden = full_log_probs
    actor = dp_actor.DataParallelPPOActor(
        policy,
        ActorConfig(use_kl_loss=False),
        StabilityConfig(),
        max_response_length=4096,
        packed=case.packed,
        optimizer=torch.optim.AdamW(trainable_parameters(policy).values(), lr=1e-6, eps=1e-4),
    )
    batch = make_batch(make_episodes(case.episodes))
    norms: list[float] = []
    seconds, peak = best_of(repeats, lambda: norms.append(actor.update_policy(batch)[0]["actor/grad_norm"]))
    return {"seconds": seconds, "peak_mb": peak, "grad_norm": norms[0]}


def measure_logprobs(case: Case, repeats: int) -> dict[str, Any]:
    """Of ``case.tokens`` hidden states, log-probs and entropies and the gradient of the hidden states."""
    shape = SIZES[case.size]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, shape.hidden, generator=generator).requires_grad_()
    weight = 0.02 * torch.randn(case.vocabulary, shape.hidden, generator=generator)
    targets = torch.randint(0, case.vocabulary, (case.tokens,), generator=generator)
    compute = log_probs_from_hidden if case.chunked else full_log_probs
    sums: list[float] = []

    def run() -> None:
        hidden.grad = None
        log_probs, _ = compute(hidden, weight, targets, 1.0, ValueGuard(), True, entropy_gradient=False)
        log_probs.mean().backward()
        sums.append(log_probs.double().sum().item() + hidden.grad.double().norm().item())

    seconds, peak = best_of(repeats, run)
    return {"seconds": seconds, "peak_mb": peak, "checksum": sums[0]}


def measure_trl(case: Case, repeats: int) -> dict[str, Any]:
    """Runs in TRL's own environment. From the rewards (all that comes before is a replay) to the end of the step."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    episodes, group = make_episodes(case.episodes), 4
    marks: dict[str, Any] = {"times": [], "peaks": []}

    def rollout(prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        return {
            "prompt_ids": [prompt for prompt, _, _ in episodes],
            "completion_ids": [response for _, response, _ in episodes],
            "logprobs": [[0.0] * len(response) for _, response, _ in episodes],
            "env_mask": [mask for _, _, mask in episodes],
        }

    def reward(completions: list, **_: Any) -> list[float]:
        marks["memory"] = PeakMemory().__enter__()
        marks["began"] = time.process_time()
        return torch.linspace(-1, 1, len(completions)).tolist()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks["times"].append(time.process_time() - marks["began"])
            marks["memory"].__exit__()
            marks["peaks"].append(marks["memory"].megabytes)

    micro = min(8, case.episodes)
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=case.episodes // micro,
            num_generations=group,
            max_completion_length=4096,
            beta=0.0,
            temperature=1.0,
            max_steps=repeats,
            learning_rate=1e-6,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=make_model(case.size, case.vocabulary, "sdpa"),
            reward_funcs=reward,
            args=options,
            train_dataset=Dataset.from_list([{"prompt": "?"}] * case.episodes * repeats),
            processing_class=AutoTokenizer.from_pretrained(ROOT / "data" / "demo" / "policy", padding_side="left"),
            peft_config=LoraConfig(
                r=LORA.lora_rank,
                lora_alpha=LORA.lora_alpha,
                target_modules=list(LORA.target_modules),
                task_type="CAUSAL_LM",
            ),
            callbacks=[Clock()],
            rollout_func=rollout,
        )
        trainer.train()
    norm = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return {"seconds": min(marks["times"]), "peak_mb": marks["peaks"][0], "grad_norm": norm}


MEASURES = {"update": measure_update, "logprobs": measure_logprobs, "trl": measure_trl}


def matmul_rate(repeats: int = 5) -> float:
    """Operations a second of this machine's float32 matrix product (1,024 cubed), one thread, the best of some."""
    a, b = torch.randn(2, 1024, 1024)
    return 2 * 1024**3 / best_of(repeats, lambda: a @ b)[0]


# ------------------------------------------------------------------------------------------------------------- the runs
def trl_python() -> Path:
    """The interpreter of TRL's environment, made when it isn't there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "miniresearcher" / f"bench-{TRL[0].replace('==', '-')}"
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        Console(stderr=True).print(f"installing {' '.join(TRL)} into {folder} (once, some minutes)")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL], check=True)
        done.touch()
    return python


def run_case(case: Case, repeats: int, timeout_s: float) -> dict[str, Any]:
    """What a process of its own measured, or ``{"error": its last line}``."""
    python = trl_python() if case.what == "trl" else sys.executable
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), __file__, "--case", json.dumps(vars(case)), "--repeats", str(repeats)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:.0f} s (--case-timeout)"}
    if done.returncode < 0:
        return {"error": f"killed by signal {-done.returncode}" + (": out of memory?" if done.returncode == -9 else "")}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def logits_tokens(wanted: int, vocabulary: int) -> int:
    """``wanted``, halved until four copies of full logits take at most 60 % of the free memory."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        pages = int(re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text())[1]) * 1024
    while wanted > 1 and 4 * 4 * wanted * vocabulary > 0.6 * pages:
        wanted //= 2
    return wanted


def plan(args: argparse.Namespace) -> list[Case]:
    cases = []
    for vocabulary in args.vocabularies:
        for size in args.sizes:
            case = Case("update", size, vocabulary, episodes=args.episodes or EPISODES[size])
            cases += [case, replace(case, packed=False), replace(case, chunked=False)]
            if args.trl:
                cases.append(replace(case, what="trl"))
        tokens = logits_tokens(args.logits_tokens, vocabulary)
        alone = Case("logprobs", args.sizes[0], vocabulary, tokens=tokens)
        cases += [alone, replace(alone, chunked=False)]
    return cases


def to_row(case: Case, measured: dict[str, Any], rate: float) -> dict[str, Any]:
    """The case's figures with tokens a second and MFU."""
    row = vars(case) | {"name": case.name} | measured
    if "seconds" not in measured:
        return row
    shape = replace(SIZES[case.size], vocab=case.vocabulary)
    if case.what == "logprobs":
        tokens, flops = case.tokens, 4.0 * case.tokens * shape.hidden * shape.vocab
    else:
        lengths = [PROMPT + len(mask) for _, _, mask in make_episodes(case.episodes)]
        scored = sum(sum(mask) for _, _, mask in make_episodes(case.episodes))
        tokens, flops = sum(lengths), shape.update_flops(lengths, scored, LORA.lora_rank, LORA.target_modules)
    return row | {
        "tokens": tokens,
        "tokens_per_s": tokens / row["seconds"],
        "mfu": flops / row["seconds"] / rate,
    }


def show(rows: list[dict[str, Any]], rate: float) -> None:
    table = Table(title=f"update on one thread; matrix product {rate / 1e9:.0f} GFLOP/s; MFU is of that")
    for name in ("vocabulary", "size", "episodes", "case"):
        table.add_column(name)
    for name in ("tokens", "s", "tokens/s", "of packed", "peak MB", "of packed", "MFU"):
        table.add_column(name, justify="right")
    first: dict[str, Any] = {}
    for row in rows:
        if row["chunked"] and row["packed"] and row["what"] != "trl":
            first = row
        head = (f"{row['vocabulary']:,}", row["size"], str(row["episodes"] or "–"), row["name"])
        if "error" in row:
            table.add_row(*head, row["error"])
            continue
        peak, base = row["peak_mb"], first.get("peak_mb")
        table.add_row(
            *head,
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}x" if "tokens_per_s" in first else "–",
            "–" if peak is None else f"{peak:,.0f}",
            f"{peak / base:.2f}x" if peak is not None and base else "–",
            f"{row['mfu']:.0%}",
        )
    Console(width=max(140, Console().width)).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[1792, 151_936])
    parser.add_argument("--episodes", type=int, help=f"of each batch; default: {EPISODES}")
    parser.add_argument(
        "--logits-tokens", type=int, default=8192, help="of the log-probs alone; fewer if memory is short"
    )
    parser.add_argument("--trl", action="store_true", help="also the same batch through TRL's GRPOTrainer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case-timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)  # what a case's own process is given
    args = parser.parse_args(arguments)
    if small := [size for size in args.vocabularies if size <= IDS]:
        parser.error(f"--vocabularies {small[0]}: the batch holds ids up to {IDS}; give more than that")
    torch.set_num_threads(1)
    if args.case:
        case = Case(**args.case)
        print(json.dumps(MEASURES[case.what](case, args.repeats)))
        return
    rate, rows, cases = matmul_rate(), [], plan(args)
    for number, case in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)}] {case.vocabulary:,} {case.size} {case.name} ...", file=sys.stderr, flush=True)
        rows.append(to_row(case, run_case(case, args.repeats, args.case_timeout), rate))
        if args.json:  # after each case: a run that is stopped keeps what it has
            args.json.write_text(json.dumps({"matmul_flops_per_s": rate, "rows": rows}, indent=2), encoding="utf-8")
    show(rows, rate)


if __name__ == "__main__":
    main()
