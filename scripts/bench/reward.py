"""Time of reward and advantages for one large batch: 1,024 episodes of 8 turns and 8,000 tokens, on one core.

    python scripts/bench/reward.py [--episodes 1024] [--turns 8] [--tokens 8000] [--aliases 8] [--json FILE]

Observations are prose in the form the policy reads, a fifth of them with letters beyond ASCII; four characters count
as a token. Every component of the reward is switched on. Prints processor seconds of one thread, the best of three.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scrl.llm_agent.prompts import render_observation  # noqa: E402
from scrl.types import Episode, ToolCall, Turn  # noqa: E402
from verl.trainer.config.schema import RewardConfig  # noqa: E402
from verl.trainer.ppo.core_algos import ADVANTAGE_ESTIMATORS  # noqa: E402
from verl.workers.reward_manager.naive import NaiveRewardManager  # noqa: E402

GROUP = 8
SAMPLED = 60  # tokens a turn
REPEATS = 3


def make_episodes(count: int, turns: int, tokens: int, aliases: int, seed: int = 1) -> list[Episode]:
    """``count`` episodes in groups of 8 that end in an answer, each about ``tokens`` tokens long."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)]
    observed = (tokens - turns * SAMPLED) // (turns - 1)

    def prose(characters: int, accent: bool) -> str:
        text = " ".join(rng.choices(words, k=characters // 6))[:characters]
        return text + " – é." if accent else text + "."

    def title(golds: list[str]) -> str:
        """One page in twenty is about the answer."""
        return rng.choice(golds) if rng.random() < 0.05 else " ".join(rng.choices(words, k=3))

    episodes = []
    for row in range(count):
        if row % GROUP == 0:
            golds = [" ".join(rng.choices(words, k=3)) for _ in range(aliases)]
        mask: list[int] = []
        made: list[Turn] = []
        for k in range(turns):
            span = (len(mask), len(mask) + SAMPLED)
            mask += [1] * SAMPLED
            if k == turns - 1:
                made.append(Turn("answer", answer=" ".join(rng.choices(words, k=3)), span=span))
                break
            queries = [" ".join(rng.choices(words, k=6)) for _ in range(3)]
            page = observed * 4 // 9
            items = [
                [{"title": title(golds), "text": prose(page, rng.random() < 0.2 / 9)} for _ in range(3)]
                for _ in queries
            ]
            call = ToolCall("web_search", {"query": queries})
            text = render_observation(queries, items)
            made.append(Turn("tool_call", tool_call=call, queries=queries, observation=text, span=span))
            mask += [0] * observed
        episode = Episode(str(row // GROUP), row % GROUP, row, "?", golds, "bench", [1], mask, mask, turns=made)
        episodes.append(replace(episode, finish="answer"))
    return episodes


def best_of(action: Callable[[], object]) -> float:
    """Processor seconds of the fastest of three calls: what else the machine does is not counted."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--aliases", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the seconds here")
    args = parser.parse_args()
    torch.set_num_threads(1)

    episodes = make_episodes(args.episodes, args.turns, args.tokens, args.aliases)
    manager = NaiveRewardManager(RewardConfig(use_pbrs=True, use_repetition_penalty=True, min_turns=2))
    seconds = {"reward": best_of(lambda: manager(episodes, args.tokens))}

    scores, _ = manager(episodes, args.tokens)
    mask = torch.zeros_like(scores)
    turn_index = torch.full(scores.shape, -1)
    for row, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            mask[row, slice(*turn.span)] = 1
            turn_index[row, slice(*turn.span)] = k
    group = torch.arange(args.episodes) // GROUP
    options = {"turn_index": turn_index, "gamma": 1.0, "baselines": torch.zeros(args.episodes)}
    for name, estimate in ADVANTAGE_ESTIMATORS.items():
        seconds[f"advantage {name}"] = best_of(lambda estimate=estimate: estimate(scores, mask, group, **options))

    table = Table(title=f"{args.episodes} episodes, {args.turns} turns, {args.tokens} tokens, one thread")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": str(args.json), "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()
