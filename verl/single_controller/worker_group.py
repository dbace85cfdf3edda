"""The driver's handle on a group of worker processes."""

import difflib
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import cloudpickle

from verl.single_controller.dispatch import DISPATCH, Dispatch, registered_methods
from verl.single_controller.resource_pool import ResourcePool
from verl.single_controller.waiting import WorkerDied, wait_all
from verl.single_controller.worker import Worker


class WorkerGroup:
    """``pool.world_size`` processes, each with one ``worker_cls(*args, **kwargs)``.

    Registered methods of ``worker_cls`` are called on the group as on a worker: ``group.update_actor(batch)`` goes to
    the ranks as the method's ``@register`` says, waits, and returns the joined answer.

    ``env_vars`` are set when the processes start (OMP_NUM_THREADS is read once, when a library loads).
    ``start_timeout_s`` and ``timeout_s`` are the deadlines of the start and of each call.

    Raises what the worker raised, with its type and message; ``WorkerDied``; or ``TimeoutError``. After the latter two
    ranks may hang in a collective, and the group only repeats that error: shut it down.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        pool: ResourcePool,
        *args: Any,
        env_vars: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        timeout_s: float = 3600.0,
        **kwargs: Any,
    ) -> None:
        self.world_size = pool.world_size
        self._methods = registered_methods(worker_cls)
        self._name = worker_cls.__name__
        self._timeout_s = timeout_s
        self._broken: Exception | None = None
        if pool.holder is not None:
            raise ValueError(f"the pool is filled by a {pool.holder} group; shut that down, or make another pool")
        self._pool, pool.holder = pool, self._name
        # Ray labels a process and its log lines with the actor's class: name it after the worker it hosts.
        host = ray.remote(type(self._name, (_Host,), {}))
        runtime_env = {"env_vars": dict(env_vars or {})}
        self._hosts = [
            host.options(runtime_env=runtime_env, max_restarts=0, max_task_retries=0, **pool.options(rank)).remote()
            for rank in range(self.world_size)
        ]
        try:
            self._start(pool, cloudpickle.dumps((worker_cls, args, kwargs)), start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, pool: ResourcePool, recipe: bytes, timeout_s: float) -> None:
        places = self._wait([host.place.remote() for host in self._hosts], "start", timeout_s)
        shared = {
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": places[0]["address"],
            "MASTER_PORT": str(places[0]["port"]),
        }
        building = []
        for rank, host in enumerate(self._hosts):
            # Ray shows each GPU worker its own card only, which is then device 0.
            local_rank = 0 if pool.use_gpu else rank % pool.n_per_node
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            building.append(host.build.remote(env, recipe))
        self._wait(building, "__init__", timeout_s)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._mode(name)
        return partial(self.call, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def call(
        self, method: str, *args: Any, blocking: bool = True, timeout_s: float | None = None, **kwargs: Any
    ) -> Any | list[ray.ObjectRef]:
        """Call a registered method, with a deadline of its own.

        With ``blocking=False`` returns at once one ObjectRef a rank, of the ranks' own answers: not joined, rows that
        were added to make equal parts not taken off. Where the mode is RANK_ZERO only the first is more than None.
        """
        mode = self._mode(method)
        if self._broken is not None:
            raise RuntimeError(f"this {self._name} group is broken since: {self._broken}") from self._broken
        into_calls, join = DISPATCH[mode]
        calls = into_calls(self.world_size, args, kwargs)
        keep_answer = [rank == 0 or mode is not Dispatch.RANK_ZERO for rank in range(self.world_size)]
        refs = [
            host.call.remote(method, keep, *rank_args, **rank_kwargs)
            for host, keep, (rank_args, rank_kwargs) in zip(self._hosts, keep_answer, calls.per_rank, strict=True)
        ]
        if not blocking:
            return refs
        return join(self._wait(refs, method, self._timeout_s if timeout_s is None else timeout_s), calls)

    @property
    def broken(self) -> bool:
        """A rank died or hangs: no call will be answered any more."""
        return self._broken is not None

    def check(self, timeout_s: float = 5.0) -> None:
        """Raise ``WorkerDied`` if a process is gone. One that is busy, or slow to answer, passes."""
        asked = {f"rank {rank}": host.ping.remote() for rank, host in enumerate(self._hosts)}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        self._wait_named({who: ref for who, ref in asked.items() if ref in answered}, "ping", timeout_s)

    def shutdown(self) -> None:
        """End the processes. The pool stays reserved until it is released."""
        hosts, self._hosts = self._hosts, []
        if hosts:
            self._pool.holder = None
        self._broken = self._broken or RuntimeError("it was shut down")
        for host in hosts:
            if ray.is_initialized():
                ray.kill(host)

    def _mode(self, method: str) -> Dispatch:
        if method in self._methods:
            return self._methods[method]
        near = difflib.get_close_matches(method, self._methods, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise AttributeError(
            f"{self._name} registers no method {method!r}{hint} it registers {', '.join(self._methods)}"
        )

    def _wait(self, refs: Sequence[ray.ObjectRef], method: str, timeout_s: float) -> list[Any]:
        return self._wait_named({f"rank {rank}": ref for rank, ref in enumerate(refs)}, method, timeout_s)

    def _wait_named(self, ranks: Mapping[str, ray.ObjectRef], method: str, timeout_s: float) -> list[Any]:
        refs = list(ranks.values())
        try:
            return list(wait_all(ranks, f"{self._name}.{method}", timeout_s).values())
        except (WorkerDied, TimeoutError) as error:
            self._broken = error
            raise
        except Exception as error:
            # The other ranks may wait for the one that raised, in a collective that it will never join.
            _, hanging = ray.wait(refs, num_returns=len(refs), timeout=_GRACE_S)
            if hanging:
                self._broken = error
            raise


# Seconds for the other ranks to end their part of a call that failed on one.
_GRACE_S = 2.0


class _Host:
    """The Ray actor around a worker. It starts before the worker's class is known, so that the environment of rank,
    rendezvous and threads is complete when that class is imported (and with it torch)."""

    def place(self) -> dict[str, Any]:
        """An address for rank 0's rendezvous, should this be rank 0."""
        return {"address": ray.util.get_node_ip_address(), "port": _free_port()}

    def ping(self) -> None: ...

    def build(self, env: dict[str, str], recipe: bytes) -> None:
        os.environ.update(env)
        worker_cls, args, kwargs = cloudpickle.loads(recipe)
        self._worker = worker_cls(*args, **kwargs)

    def call(self, method: str, keep_answer: bool, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self._worker, method)(*args, **kwargs)
        return answer if keep_answer else None


def _free_port() -> int:
    """A port outside of the range from which the system hands out ports by itself: between this moment and rank 0's
    ``init_process_group`` nobody gets it by accident."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 30000 for the workers' rendezvous")
