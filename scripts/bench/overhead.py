"""What is neither model nor search in a training step, and how it grows with the number of episodes.

    python scripts/bench/overhead.py [--episodes 64 512 4096] [--turns 4] [--repeats 3] [--json FILE]

The trainer's own ``train_step`` runs, whole, on episodes of ``--turns`` searches and an answer over the demo's
encyclopaedia; only engines and actor are replayed, so that no model computes and no Ray cluster runs. What would travel
is pickled and copied as Ray does it, both ways: episodes by group, batches by rank. What Ray adds to that (a call, a
look into shared memory: about a millisecond a group) isn't in here. One thread; processor seconds are what other
programs on the machine don't change. Of the repetitions the fastest counts.
"""

import argparse
import gc
import json
import logging
import math
import pickle
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from scrl.llm_agent.prompts import ChatFrame, encode_untrusted, render_observation  # noqa: E402
from scrl.types import Episode, EpisodeRequest, ToolCall, Turn  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.dispatch import DISPATCH, Dispatch  # noqa: E402
from verl.trainer.config import load_config  # noqa: E402
from verl.trainer.ppo.batch import group_requests  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.utils.tracking import Tracking  # noqa: E402

GROUP = 8
OBSERVATIONS = 256  # distinct ones; the texts are shared by the episodes, their records aren't
# What the table shows -> the trainer's method, or what of another's is measured apart.
PARTS = {
    "generate": "episodes in",
    "sample": "assemble",
    "reward": "reward",
    "advantage": "advantage",
    "update": "batch to workers",
    "learn": "metrics",
    "write_rollouts": "rollout rows",
    "_write_rows": "rollout file",
    "train_step": "rest",
}


class Clock:
    """Seconds by part, ``(processor, wall)``; what a part measured apart took is not its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self._inside: list[tuple[float, float]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._inside.append((0.0, 0.0))
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            inner = self._inside.pop()
            before = self.seconds.get(part, (0.0, 0.0))
            self.seconds[part] = (before[0] + cpu - inner[0], before[1] + wall - inner[1])
            if self._inside:
                self._inside[-1] = (self._inside[-1][0] + cpu, self._inside[-1][1] + wall)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Measure a method of one object."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(part):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def travel(value: Any) -> Any:
    """As through Ray: pickled, large buffers out of band and copied once, into shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(packed, buffers=[bytes(buffer.raw()) for buffer in buffers])


class ReplayedActor:
    """An actor of ``world_size`` ranks that answers without a model: the engine's log-probs, an entropy of 0.5."""

    broken = False

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def check(self) -> None: ...

    def _call(self, answer: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        into_calls, join = DISPATCH[Dispatch.DP_COMPUTE_PROTO]
        calls = into_calls(self.world_size, (data,), {})
        return join([travel(answer(travel(part))) for ((part,), _) in calls.per_rank], calls)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._call(lambda part: _answer(part, "ref_log_prob"), data)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self._call(lambda part: _answer(part, "old_log_probs", "entropys"), data)

    def update_actor(self, data: DataProto) -> DataProto:
        return self._call(lambda part: _answer(part, "old_log_probs"), data)


def _answer(part: DataProto, *names: str) -> DataProto:
    values = -0.5 * part.batch["response_mask"]
    return DataProto.from_dict({name: values for name in names}, {}, {"metrics": {"actor/grad_norm": 1.0}})


class ReplayedRollouts:
    """Workers that have played already: an answer a group, as it would come over the wire."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        groups = [episodes[start : start + GROUP] for start in range(0, len(episodes), GROUP)]
        self._answers = [pickle.dumps(group, protocol=5) for group in groups]

    def generate(
        self, requests: Sequence[EpisodeRequest], *, timeout_s: float, tick: Callable[[int], None]
    ) -> list[Episode]:
        episodes: list[Episode] = []
        for start, answer in zip(range(0, len(requests), GROUP), self._answers, strict=True):
            travel(requests[start : start + GROUP])
            episodes += pickle.loads(answer)
            tick(len(episodes))
        return episodes

    def update_weights(self, export: Callable[[], Any], version: int) -> None: ...

    def take_counts(self) -> dict[str, float]:
        return {}

    def step_metrics(self, gen_s: float) -> dict[str, float]:
        return {}


class Player:
    """Makes episodes: searches with pages of the demo's encyclopaedia, and an answer that is right every third time."""

    def __init__(self, tokenizer: Any, turns: int, seed: int = 1) -> None:
        self._tokenizer = tokenizer
        self._rng, self._turns = random.Random(seed), turns
        pages = [json.loads(line) for line in (ROOT / "data/demo/corpus.jsonl").read_text("utf-8").splitlines()]
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        frame = ChatFrame(tokenizer)
        self._end = frame.end_of_turn_id
        self._searches = []
        for _ in range(OBSERVATIONS):
            found = self._rng.sample(pages, 4)
            queries = [found[0]["title"], f"{found[1]['title']} born"]
            observation = render_observation(queries, [found[:2], found[2:]])
            ids = encode_untrusted(tokenizer, observation)
            think = f"I need to know more about {queries[0]}."
            call = json.dumps({"name": "web_search", "arguments": {"query": queries}})
            said = [*self._encode(f"{think}</think>\n<tool_call>{call}</tool_call>"), self._end]
            framed = [frame.wrap(ids, turn_ended=True, last=last) for last in (False, True)]
            self._searches.append((think, queries, observation, len(ids), said, framed))

    def play(self, request: EpisodeRequest) -> Episode:
        ids, mask = array("i"), array("b")
        turns: list[Turn] = []
        for number in range(self._turns):
            think, queries, observation, length, said, framed = self._rng.choice(self._searches)
            span = (len(ids), len(ids) + len(said))
            observed = framed[number == self._turns - 1]
            ids.extend(said + observed)
            mask.extend([1] * len(said) + [0] * len(observed))
            call = ToolCall("web_search", {"query": list(queries)})
            more = {"observation": observation, "observation_tokens": length, "span": span, "version": 0}
            turns.append(Turn("tool_call", think=think, tool_call=call, queries=list(queries), **more))
        answer = request.ground_truths[0] if self._rng.random() < 1 / 3 else "somewhere else"
        said = [*self._encode(f"Now I know.</think><answer>{answer}</answer>"), self._end]
        span = (len(ids), len(ids) + len(said))
        turns.append(Turn("answer", think="Now I know.", answer=answer, span=span, version=0))
        ids.extend(said)
        mask.extend([1] * len(said))
        return Episode(
            uid=request.uid,
            sample_index=request.sample_index,
            index=request.index,
            question=request.question,
            ground_truths=request.ground_truths,
            data_source=request.data_source,
            prompt_ids=request.prompt_ids,
            response_ids=ids,
            response_mask=mask,
            rollout_logprobs=array("d", [self._rng.uniform(-1, 0) if sampled else 0.0 for sampled in mask]),
            turns=turns,
            finish="answer",
            version=0,
            message_str=self._tokenizer.decode([*request.prompt_ids, *ids], skip_special_tokens=False),
        )


def build(episodes: int, turns: int, ranks: int, folder: Path) -> RayPPOTrainer:
    """A trainer that is ready for a first step of that many episodes, its workers replayed."""
    settings = {
        "profile": "cpu_demo",
        "data.train_batch_size": episodes // GROUP,
        "data.val_files": "[]",
        "data.max_response_length": 1 << 20,
        "actor_rollout_ref.rollout.max_model_len": 1 << 21,
        "actor_rollout_ref.actor.ppo_mini_batch_size": episodes // GROUP,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1 << 21,
        "agent_grpo.n": GROUP,
        "reward_model.use_pbrs": "true",
        "reward_model.use_repetition_penalty": "true",
        "algorithm.adv_estimator": "grpo_turn",
        "max_turns": turns,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": f"'{folder}'",
    }
    trainer = RayPPOTrainer(load_config([f"{key}={value}" for key, value in settings.items()]))
    trainer.tracking = Tracking(trainer.config, trainer.dir, total_steps=1, resume_step=0)
    trainer.actor = ReplayedActor(ranks)
    return trainer


def watched(trainer: RayPPOTrainer) -> Clock:
    """A clock that runs whenever a part of the trainer does."""
    clock = Clock()
    for method, part in PARTS.items():
        clock.watch(trainer, method, part)
    for method in ("compute_ref_log_prob", "update_actor"):
        clock.watch(trainer.actor, method, PARTS["update"])
    clock.watch(trainer.monitor, "observe", "monitor")
    clock.watch(trainer.curriculum, "update", "curriculum")
    for method in ("log", "log_samples", "alert"):
        clock.watch(trainer.tracking, method, "tracker")
    return clock


def total(parts: dict[str, tuple[float, float]]) -> float:
    """Processor seconds of all parts."""
    return sum(cpu for cpu, _ in parts.values())


def measure(episodes: int, turns: int, repeats: int, ranks: int) -> dict[str, Any]:
    """Seconds by part of a step, the fastest of ``repeats``."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(episodes, turns, ranks, Path(folder))
        start = trainer.stream.state_dict()
        questions = trainer.stream.next_batch()
        rollout = trainer.config.actor_rollout_ref.rollout
        sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "seed": None}
        player = Player(trainer.tokenizer, turns)
        requests = group_requests(questions, n=GROUP, step=1, max_turns=turns, **sampling)
        played = [player.play(request) for request in requests]
        trainer.rollouts = ReplayedRollouts(played)
        tokens = sum(len(episode.prompt_ids) + len(episode.response_ids) for episode in played)
        del requests, played
        clock = watched(trainer)
        best: dict[str, tuple[float, float]] = {}
        for _ in range(repeats):
            gc.collect()
            clock.seconds = {}
            trainer.stream.load_state_dict(start)
            trainer.step = 0
            trainer.tracking.log(1, trainer.train_step(1))
            best = min(filter(None, (best, clock.seconds)), key=total)
        size = sum(file.stat().st_size for file in (trainer.dir / "rollout").iterdir())
        trainer.tracking.close()
    return {"episodes": episodes, "tokens": tokens, "rollout_file_mb": size / 1e6, "parts": best}


def growth(rows: Sequence[dict[str, Any]], part: str | None = None) -> list[float]:
    """The exponent between each size and the next: 1 is linear, 2 quadratic. ``part`` None: of the whole."""
    seconds = [total(row["parts"]) if part is None else row["parts"][part][0] for row in rows]
    return [
        math.log(max(after, 1e-9) / max(before, 1e-9)) / math.log(larger["episodes"] / smaller["episodes"])
        for smaller, larger, before, after in zip(rows, rows[1:], seconds, seconds[1:], strict=False)
    ]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    largest = rows[-1]
    table = Table(title="processor seconds of a step beside model and search")
    table.add_column("part")
    for row in rows:
        table.add_column(f"{row['episodes']:,} episodes", justify="right")
    table.add_column("share", justify="right")
    table.add_column("growth", justify="right")
    whole = total(largest["parts"])
    for part in sorted(largest["parts"], key=lambda part: -largest["parts"][part][0]):
        cells = [f"{row['parts'][part][0]:.3f}" for row in rows]
        table.add_row(part, *cells, f"{largest['parts'][part][0] / whole:.0%}", _exponent(growth(rows, part)))
    table.add_section()
    table.add_row("all", *(f"{total(row['parts']):.3f}" for row in rows), "100%", _exponent(growth(rows)))
    walls = [f"{sum(wall for _, wall in row['parts'].values()):.3f}" for row in rows]
    table.add_row("wall clock", *walls, "", "")
    table.add_row("million tokens", *(f"{row['tokens'] / 1e6:.2f}" for row in rows), "", "")
    table.add_row("MB of rollout file", *(f"{row['rollout_file_mb']:.1f}" for row in rows), "", "")
    console.print(table)


def _exponent(values: Sequence[float]) -> str:
    return f"n^{values[-1]:.2f}" if values else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 4096], help=f"multiples of {GROUP}")
    parser.add_argument("--turns", type=int, default=4, help="searches an episode (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="actor ranks that a batch is cut for")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if any(count < GROUP or count % GROUP for count in args.episodes):
        parser.error(f"--episodes {args.episodes}: groups are of {GROUP}; give multiples of it")
    rows = [measure(count, args.turns, args.repeats, args.ranks) for count in sorted(args.episodes)]
    show(rows, Console())
    if args.json:
        known = {"turns": args.turns, "ranks": args.ranks, "growth": growth(rows), "sizes": rows}
        args.json.write_text(json.dumps(known, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("verl").setLevel(logging.ERROR)  # what the monitor thinks of these episodes
    sys.exit(main())
