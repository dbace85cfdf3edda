"""The rollout workers as the driver sees them: who generates which group, whose weights they hold, who has died."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from scrl.types import Episode, EpisodeRequest
from verl.single_controller import WorkerDied, wait_all
from verl.trainer.config.schema import Config
from verl.workers.rollout_worker import RolloutWorker

log = logging.getLogger(__name__)

_ALIVE = 2  # episodes a worker plays at once, in engine batches: while some wait for a search, others generate
_MAX_REPLACED = 3  # workers that may die while one batch is generated; more is no accident
_POLL_S = 0.5
_CACHE_COUNTS = tuple(f"search/{name}" for name in ("cache_hits", "cache_fuzzy_hits", "cache_errors", "replay_misses"))

Job = list[int]  # places of the requests that one call plays


@dataclass(eq=False)
class _Member:
    """One worker. ``ready`` is its pending start; ``counters`` what it had counted when it was last asked."""

    index: int
    actor: Any
    ready: ray.ObjectRef | None
    episodes: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"worker {self.index}"


class RolloutPool:
    """``rollout.num_workers`` ``RolloutWorker`` Ray actors. Every wait has a deadline.

    A worker whose process dies is replaced: the new one gets the weights of the last ``update_weights``, and the
    groups that the dead one was playing are played again.

    ``options``: of worker i's Ray actor (where it runs, what it takes, its environment).
    """

    def __init__(
        self, config: Config, options: Callable[[int], dict[str, Any]], start_timeout_s: float = 600.0
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.size = rollout.num_workers
        self._config, self._options, self._start_timeout_s = config, options, start_timeout_s
        self._most_episodes = _ALIVE * rollout.max_batch_size
        self._weights: tuple[Any, int] | None = None
        self._replaced = self._reported = self._losses = 0
        self._members = [self._new(index) for index in range(self.size)]

    def _new(self, index: int) -> _Member:
        worker = ray.remote(RolloutWorker).options(max_concurrency=1000, **self._options(index))
        actor = worker.remote(self._config, index)
        return _Member(index, actor, actor.ready.remote(*(self._weights or ())))

    def wait_ready(self) -> None:
        """Raises ValueError where a worker can't be built for a reason of the user's: a wrong path, a search engine."""
        while starting := [member for member in self._members if member.ready is not None]:
            for member in starting:
                self._finish_start(member, self._start_timeout_s)

    def _finish_start(self, member: _Member, timeout_s: float) -> None:
        if member.ready is None:
            return
        try:
            wait_all({member.name: member.ready}, "RolloutWorker.ready", timeout_s)
            member.ready = None
        except WorkerDied as error:
            self._replace(member, error)

    def _replace(self, member: _Member, error: WorkerDied) -> None:
        """Start a worker in the place of a dead one; once, though each of its calls reports the death."""
        if self._members[member.index] is not member:
            return
        self._replaced += 1
        self._losses += 1
        if self._losses > _MAX_REPLACED:
            raise WorkerDied(f"{self._losses} rollout workers died within one batch; the last one: {error}") from error
        log.warning("rollout %s died and is replaced (%s)", member.name, error)
        ray.kill(member.actor)  # it may only be out of reach
        self._members[member.index] = self._new(member.index)

    # ------------------------------------------------------------------------------------------------------ generation
    def generate(
        self, requests: Sequence[EpisodeRequest], *, timeout_s: float, tick: Callable[[int], None]
    ) -> list[Episode]:
        """The requests' episodes, in their order. A group stays on one worker, whose engine shares its prompt, and goes
        to the one with the fewest episodes once there is room for it.

        ``tick`` hears twice a second, and whenever a group is done, how many episodes are; what it raises ends this.
        Raises TimeoutError after ``timeout_s`` and WorkerDied when workers go on dying.
        """
        jobs = deque(self._jobs(requests))
        playing: dict[ray.ObjectRef, tuple[_Member, Job]] = {}
        episodes: list[Any] = [None] * len(requests)
        deadline = time.monotonic() + timeout_s
        self._losses = done = 0
        while jobs or playing:
            self._hand_out(jobs, playing, requests)
            starting = {member.ready: member for member in self._members if member.ready is not None}
            finished, _ = ray.wait([*playing, *starting], timeout=_POLL_S)
            for reference in finished:
                if reference in starting:
                    self._finish_start(starting[reference], self._start_timeout_s)
                    continue
                member, job = playing.pop(reference)
                member.episodes -= len(job)
                try:
                    answer = wait_all({member.name: reference}, "RolloutWorker.generate", 600.0)[member.name]
                except WorkerDied as error:
                    self._replace(member, error)
                    jobs.appendleft(job)
                    continue
                for place, episode in zip(job, answer, strict=True):
                    episodes[place] = episode
                done += len(job)
            tick(done)
            if time.monotonic() > deadline:
                late = len(requests) - done
                raise TimeoutError(f"{late} of {len(requests)} episodes were not done after {timeout_s:.0f} s")
        return episodes

    def _jobs(self, requests: Sequence[EpisodeRequest]) -> list[Job]:
        """One job a group. In deterministic mode one a worker, handed out before any is done: which requests meet in
        an engine's batch must not depend on the clock."""
        groups: dict[str, Job] = {}
        for place, request in enumerate(requests):
            groups.setdefault(request.uid, []).append(place)
        if not self._config.trainer.deterministic:
            return list(groups.values())
        shares: list[Job] = [[] for _ in self._members]
        for job in groups.values():
            min(shares, key=len).extend(job)
        return [share for share in shares if share]

    def _hand_out(
        self,
        jobs: deque[Job],
        playing: dict[ray.ObjectRef, tuple[_Member, Job]],
        requests: Sequence[EpisodeRequest],
    ) -> None:
        while jobs:
            size = len(jobs[0])
            room = [m for m in self._members if m.ready is None and m.episodes + size <= self._most_episodes]
            room = room or [m for m in self._members if m.ready is None and not m.episodes]
            if not room:
                return
            member, job = min(room, key=lambda m: m.episodes), jobs.popleft()
            member.episodes += size
            playing[member.actor.generate.remote([requests[place] for place in job])] = (member, job)

    # ------------------------------------------------------------------------------------------------ weights, metrics
    def update_weights(self, export: Callable[[], Any], version: int, timeout_s: float = 600.0) -> None:
        """Give every worker the weights in the object reference that ``export()`` returns, as those of ``version``."""
        self._weights, self._losses = None, 0  # whole models are large: the old weights are let go before the new come
        self.wait_ready()
        self._weights = (export(), version)
        held = self._each("update_weights", timeout_s, *self._weights)
        assert set(held) <= {version}, f"engines hold the weights of steps {held}, not of {version}"
        self.wait_ready()  # a worker that died meanwhile: the one in its place starts with these weights

    def _each(self, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """The answers of all workers but those that have died, which are replaced."""
        asked = [(member, getattr(member.actor, method).remote(*arguments)) for member in self._ready()]
        answers = []
        for member, reference in asked:
            try:
                answers += wait_all({member.name: reference}, f"RolloutWorker.{method}", timeout_s).values()
            except WorkerDied as error:
                self._replace(member, error)
        return answers

    def _ready(self) -> list[_Member]:
        return [member for member in self._members if member.ready is None]

    def step_metrics(self, gen_s: float) -> dict[str, float]:
        """What the workers did since counts were last taken: ``search/{calls,empty,errors}``, what the search cache did
        where there is one, and ``perf/engine_busy_share``, the share of ``gen_s`` seconds in which an engine was
        generating (their mean). And ``rollout/workers_replaced`` since the last call."""
        done = self.take_counts()
        counts = {name: done.get(name, 0.0) for name in ("search/calls", "search/empty", "search/errors")}
        counts |= {name: done[name] for name in _CACHE_COUNTS if name in done}
        replaced, self._reported = self._replaced - self._reported, self._replaced
        return counts | {
            "rollout/workers_replaced": float(replaced),
            "perf/engine_busy_share": done.get("rollout/busy_s", 0.0) / self.size / max(gen_s, 1e-9),
        }

    def take_counts(self) -> dict[str, float]:
        """What all workers have counted since this was last asked."""
        done: dict[str, float] = {}
        for member in self._ready():
            try:
                now = wait_all({member.name: member.actor.metrics.remote()}, "RolloutWorker.metrics", 60.0)[member.name]
            except WorkerDied as error:
                self._replace(member, error)
                continue
            for name, value in now.items():
                done[name] = done.get(name, 0.0) + value - member.counters.get(name, 0.0)
            member.counters = now
        return done
