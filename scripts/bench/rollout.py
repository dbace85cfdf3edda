"""Episodes per second under slow searches: lockstep against barrier-free, HF against vLLM, prefix cache on and off.

    python scripts/bench/rollout.py [--episodes 256] [--turns 4] [--engines hf vllm] [--median 1.0] [--json FILE]

A small policy is trained on the spot to search ``--turns`` times, for a word that it draws, and then to answer. A
search sleeps for a log-normal time (median ``--median`` seconds, 5 % above five times that), the same in every run, so
that the ratios hold on a busy machine too. Lockstep lets a turn begin when every living episode has asked for it. Seeds
are fixed: all runs of an engine should play the same episodes, token for token.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scrl.llm_agent import prompts  # noqa: E402
from scrl.llm_agent.generation import GenerationSettings, LLMGenerationManager  # noqa: E402
from scrl.types import Episode, EpisodeRequest, ToolCall, ToolResult  # noqa: E402
from verl.utils.tokenizer import load_tokenizer  # noqa: E402
from verl.workers.rollout import vllm_problem  # noqa: E402
from verl.workers.rollout.base import Completion, RolloutEngine, SamplingParams  # noqa: E402

GROUP, TRAIN_STEPS, ROOM, TURN = 8, 250, 2048, 64
SIGMA = math.log(5) / 1.6449  # of the logarithm: 5 % of all searches take more than five times the median
SEARCH = 'next</think>\n<tool_call>{"name": "web_search", "arguments": {"query": ["%s"]}}</tool_call>'
ANSWER = "enough</think><answer>done</answer>"
WORDS = (
    "river",
    "castle",
    "film",
    "poet",
    "mountain",
    "bridge",
    "opera",
    "king",
    "planet",
    "painter",
    "island",
    "song",
)
QUESTION = "What do these have in common?"


class SleepySearch:
    """A search that only takes its time: the n-th call of an episode the same time in every run."""

    def __init__(self, median_s: float) -> None:
        self._median_s, self._calls = median_s, Counter()

    def latency(self, uid: str, sample: int, call: int) -> float:
        return self._median_s * random.Random(f"{uid}/{sample}/{call}").lognormvariate(0.0, SIGMA)

    def submit(self, call: ToolCall, *, episode_id: str, question: str) -> "Future[ToolResult]":
        uid, sample, _ = episode_id.split("/")
        number, self._calls[episode_id] = self._calls[episode_id], self._calls[episode_id] + 1
        future: Future[ToolResult] = Future()
        result = ToolResult(items=[results(query) for query in call.arguments["query"]])
        loop = asyncio.get_running_loop()
        loop.call_later(self.latency(uid, int(sample), number), future.set_result, result)
        return future

    def release(self, episode_id: str) -> None:
        self._calls.pop(episode_id, None)


def results(query: str) -> list[dict[str, str]]:
    rng = random.Random(query)
    return [{"title": query, "url": "", "text": " ".join(rng.choices(WORDS, k=20))} for _ in range(2)]


class Lockstep:
    """An engine in which a turn begins when every living episode has asked for it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._alive = engine, 0
        self._waiting: list[asyncio.Future[None]] = []

    def begin_episode(self) -> None:
        self._engine.begin_episode()
        self._alive += 1

    def end_episode(self) -> None:
        self._engine.end_episode()
        self._alive -= 1
        self._go_if_all()

    def _go_if_all(self) -> None:
        if len(self._waiting) >= self._alive:
            for future in self._waiting:
                future.set_result(None)
            self._waiting = []

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._go_if_all()
        await turn
        return await self._engine.generate(prompt_ids, params)


# ----------------------------------------------------------------------------------------------------------- the policy
def make_policy(folder: Path, tokenizer: Any, turns: int) -> Qwen2ForCausalLM:
    """A model that has learned to search ``turns`` times, for any of WORDS, and then to answer; also in ``folder``."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=ROOM,
            tie_word_embeddings=True,
        )
    )
    optimizer, rng = torch.optim.Adam(model.parameters(), lr=3e-3), random.Random(0)
    for _ in range(TRAIN_STEPS):
        ids, labels = lesson(tokenizer, turns, rng)
        loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval().requires_grad_(False)


def lesson(tokenizer: Any, turns: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """(ids, labels) of one episode as it should go; only the policy's own tokens are labelled."""
    frame, ids, labels = prompts.ChatFrame(tokenizer), prompts.encode_prompt(tokenizer, QUESTION), []
    labels += [-100] * len(ids)
    for turn in range(turns + 1):
        word = rng.choice(WORDS)
        said = tokenizer.encode(SEARCH % word if turn < turns else ANSWER, add_special_tokens=False)
        said.append(frame.end_of_turn_id)
        ids, labels = ids + said, labels + said
        if turn < turns:
            seen = prompts.encode_untrusted(tokenizer, prompts.render_observation([word], [results(word)]))
            framed = frame.wrap(seen, turn_ended=True, last=turn == turns - 1)
            ids, labels = ids + framed, labels + [-100] * len(framed)
    return ids, labels


# ------------------------------------------------------------------------------------------------------------- the runs
@dataclass
class Row:
    """One run. ``idle``: share of the time in which the engine had nothing to do; ``computed``: share of the prompt
    tokens that were not found in the prefix cache; ``same``: share of episodes equal to the engine's first run's."""

    engine: str
    mode: str
    prefix_cache: bool
    seconds: float
    episodes_per_s: float
    to_lockstep: float
    idle: float
    computed: float
    tokens_per_s: float
    same: float
    searched: float


def build(name: str, folder: Path, prefix_cache: bool) -> RolloutEngine:
    if name == "vllm":
        from verl.workers.rollout.vllm_rollout import VLLMEngine

        return VLLMEngine(
            str(folder), dtype="float32", device="cpu", max_model_len=ROOM, lora_rank=None, prefix_cache=prefix_cache
        )
    from verl.workers.rollout.hf_rollout import HFEngine

    kept = {} if prefix_cache else {"kept_bytes": 0}
    return HFEngine.from_pretrained(str(folder), dtype=torch.float32, device="cpu", **kept)


async def play(
    engine: RolloutEngine, mode: str, requests: list[EpisodeRequest], tokenizer: Any, search: SleepySearch
) -> tuple[list[Episode], float, dict[str, float]]:
    """(episodes, seconds, what the engine counted meanwhile)"""
    limits = GenerationSettings(ROOM, ROOM - 500, TURN, 256, tool_timeout_s=600.0)
    used = Lockstep(engine) if mode == "lockstep" else engine
    before, began = engine.metrics(), time.perf_counter()
    episodes = await LLMGenerationManager(used, tokenizer, search, limits).run(requests)
    seconds = time.perf_counter() - began
    return episodes, seconds, {name: value - before[name] for name, value in engine.metrics().items()}


async def measure(name: str, folder: Path, weights: dict, requests: list, tokenizer: Any, median_s: float) -> list[Row]:
    rows: list[Row] = []
    first: list[list[int]] = []
    for prefix_cache, modes in ((True, ("lockstep", "barrier-free")), (False, ("barrier-free",))):
        engine = build(name, folder, prefix_cache)
        await play(engine, "barrier-free", requests[:GROUP], tokenizer, SleepySearch(0.0))  # what is only slow once
        for version, mode in enumerate(modes, start=1):
            await engine.update_weights({"weights": weights, "peft_config": None}, version)  # empties the cache
            episodes, seconds, did = await play(engine, mode, requests, tokenizer, SleepySearch(median_s))
            ids = [episode.response_ids for episode in episodes]
            first = first or ids
            rows.append(
                Row(
                    name,
                    mode,
                    prefix_cache,
                    seconds,
                    len(requests) / seconds,
                    seconds / (rows[0].seconds if rows else seconds),
                    1 - did["rollout/busy_s"] / seconds,
                    did["rollout/computed"] / did["rollout/prompt"],
                    did["rollout/sampled"] / seconds,
                    sum(a == b for a, b in zip(ids, first, strict=True)) / len(ids),
                    sum(episode.search_depth for episode in episodes) / len(episodes),
                )
            )
        if name == "vllm":
            engine.close()
    return rows


def simulated(requests: list[EpisodeRequest], turns: int, median_s: float) -> tuple[float, float]:
    """(lockstep, barrier-free) seconds of searching alone: sum of each turn's slowest, slowest episode's sum."""
    search = SleepySearch(median_s)
    waits = [[search.latency(r.uid, r.sample_index, call) for call in range(turns)] for r in requests]
    return sum(map(max, zip(*waits, strict=True))), max(map(sum, waits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--median", type=float, default=1.0, help="median seconds of a search")
    parser.add_argument("--engines", nargs="+", choices=["hf", "vllm"], default=["hf", "vllm"])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    if "vllm" in args.engines and (problem := vllm_problem()):
        parser.error(f"{problem} (or: bash scripts/env.sh vllm)")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the engine's own process
    torch.set_num_threads(1)

    tokenizer = load_tokenizer(str(ROOT / "data" / "demo" / "policy"))
    ask = EpisodeRequest("", 0, 0, QUESTION, ["done"], "bench", prompts.encode_prompt(tokenizer, QUESTION), args.turns)
    requests = [
        replace(ask, uid=f"g{place // GROUP}", sample_index=place % GROUP, temperature=0.5, seed=1)
        for place in range(args.episodes)
    ]
    lockstep, free = simulated(requests, args.turns, args.median)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = dict(make_policy(Path(folder), tokenizer, args.turns).named_parameters())
        for name in args.engines:
            rows += asyncio.run(measure(name, Path(folder), weights, requests, tokenizer, args.median))
    show(rows, args, lockstep, free)


def show(rows: list[Row], args: argparse.Namespace, lockstep: float, free: float) -> None:
    ideal = f"searching alone: lockstep {lockstep:.1f} s, barrier-free {free:.1f} s ({free / lockstep:.2f}x)"
    table = Table(title=f"{args.episodes} episodes of {args.turns} searches; {ideal}")
    for name in ("engine", "mode", "prefix cache"):
        table.add_column(name)
    for name in ("s", "episodes/s", "of lockstep", "idle", "prompt computed", "tokens/s", "same", "searches"):
        table.add_column(name, justify="right")
    for r in rows:
        cells = (f"{r.seconds:.1f}", f"{r.episodes_per_s:.1f}", f"{r.to_lockstep:.2f}x", f"{r.idle:.0%}")
        cells += (f"{r.computed:.0%}", f"{r.tokens_per_s:.0f}", f"{r.same:.1%}", f"{r.searched:.2f}")
        table.add_row(r.engine, r.mode, "on" if r.prefix_cache else "off", *cells)
    Console(width=max(130, Console().width)).print(table)
    if args.json:
        known = {"episodes": args.episodes, "turns": args.turns, "median_s": args.median, "simulated": [lockstep, free]}
        args.json.write_text(json.dumps(known | {"rows": [asdict(row) for row in rows]}, indent=2), encoding="utf-8")


if __name__ == "__main__":  # the engine's process imports this file again
    main()
