"""The rollout workers as the driver sees them: who generates which group, and whose weights they hold."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from scrl.types import Episode, EpisodeRequest
from verl.single_controller import wait_all
from verl.trainer.config.schema import Config
from verl.workers.rollout_worker import RolloutWorker


class RolloutPool:
    """Some ``RolloutWorker`` Ray actors. Every wait has a deadline."""

    def __init__(self, config: Config, options: dict[str, Any], start_timeout_s: float = 600.0) -> None:
        """``options``: of each Ray actor (num_cpus, num_gpus, runtime_env)."""
        worker = ray.remote(RolloutWorker).options(max_concurrency=1000, **options)
        self.size = config.actor_rollout_ref.rollout.num_workers
        self._workers = [worker.remote(config, index) for index in range(self.size)]
        self._before: dict[str, float] = {}
        self._ready = [actor.ready.remote() for actor in self._workers]
        self._start_timeout_s = start_timeout_s

    def wait_ready(self) -> list[dict[str, Any]]:
        """Raises ValueError where a worker can't be built for a reason of the user's: a wrong path, a search engine."""
        named = {f"worker {index}": ready for index, ready in enumerate(self._ready)}
        return list(wait_all(named, "RolloutWorker.ready", self._start_timeout_s).values())

    def generate(
        self, requests: Sequence[EpisodeRequest], *, timeout_s: float, interrupted: Callable[[], bool]
    ) -> list[Episode]:
        """The requests' episodes, in their order. A group stays on one worker, whose engine shares its prompt.

        Raises TimeoutError after ``timeout_s``, WorkerDied, and KeyboardInterrupt as soon as ``interrupted()``.
        """
        shares: list[list[int]] = [[] for _ in self._workers]
        owner: dict[str, int] = {}
        for place, request in enumerate(requests):
            if request.uid not in owner:
                owner[request.uid] = min(range(self.size), key=lambda index: len(shares[index]))
            shares[owner[request.uid]].append(place)
        pending = {
            actor.generate.remote([requests[place] for place in share]): share
            for actor, share in zip(self._workers, shares, strict=True)
            if share
        }
        episodes: list[Any] = [None] * len(requests)
        deadline = time.monotonic() + timeout_s
        while pending:
            done, _ = ray.wait(list(pending), timeout=0.5)
            if interrupted():
                raise KeyboardInterrupt
            if not done and time.monotonic() > deadline:
                left = sum(map(len, pending.values()))
                raise TimeoutError(f"{left} of {len(requests)} episodes were not done after {timeout_s:.0f} s")
            for reference in done:
                answer = wait_all({"a worker": reference}, "RolloutWorker.generate", 600.0)["a worker"]
                for place, episode in zip(pending.pop(reference), answer, strict=True):
                    episodes[place] = episode
        return episodes

    def update_weights(self, exported: Any, version: int, timeout_s: float = 600.0) -> None:
        """Give every worker the weights in the object reference ``exported``, as those of step ``version``."""
        updates = {
            f"worker {index}": actor.update_weights.remote(exported, version)
            for index, actor in enumerate(self._workers)
        }
        held = wait_all(updates, "RolloutWorker.update_weights", timeout_s).values()
        assert set(held) == {version}, f"engines hold the weights of steps {held}, not of {version}"

    def step_metrics(self, gen_s: float) -> dict[str, float]:
        """What the workers did since the last call: ``search/{calls,empty,errors}``, and ``perf/engine_busy_share``,
        the share of ``gen_s`` seconds in which an engine was generating (the mean over the engines)."""
        total: dict[str, float] = {}
        asked = {f"worker {index}": actor.metrics.remote() for index, actor in enumerate(self._workers)}
        for one in wait_all(asked, "RolloutWorker.metrics", 60.0).values():
            for name, value in one.items():
                total[name] = total.get(name, 0.0) + value
        done = {name: value - self._before.get(name, 0.0) for name, value in total.items()}
        self._before = total
        counts = {name: done.get(name, 0.0) for name in ("search/calls", "search/empty", "search/errors")}
        return counts | {"perf/engine_busy_share": done["rollout/busy_s"] / self.size / max(gen_s, 1e-9)}
