"""A cache whose values are made once, however many ask for one at the same time."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlightCache(Generic[K, V]):
    """Keeps values of at most ``max_weight`` together (``weigh`` each, plus 1), those used last. Threads share one.

    ``is_passing``: an error that says nothing about the key, only about who ran into it, such as too little time.
    """

    def __init__(
        self,
        max_weight: int,
        weigh: Callable[[V], int],
        is_passing: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._max_weight, self._weigh, self._is_passing = max_weight, weigh, is_passing
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[float, V]] = OrderedDict()  # until when, value
        self._weight = 0
        self._flights: dict[K, Future[V]] = {}

    def get(self, key: K, make: Callable[[], tuple[V, float]], deadline: float) -> V:
        """The value of ``key``: kept, or being made by another thread, or made here and now.

        ``make`` gives the value and the seconds that it counts (0: not kept), and keeps ``deadline``
        (``time.monotonic()`` seconds) itself; what it raises goes to all who wait for it, but where the error is a
        passing one they try again. Who waits does so until its own deadline, then TimeoutError.
        """
        while True:
            with self._lock:
                until, value = self._kept.get(key, (0.0, None))
                if until > time.monotonic():
                    self._kept.move_to_end(key)
                    return value  # type: ignore[return-value]
                flight = self._flights.get(key)
                if flight is None:
                    flight = self._flights[key] = Future()
                    break
            try:
                return flight.result(timeout=max(deadline - time.monotonic(), 0))
            except Exception as error:
                if not (flight.done() and self._is_passing(error)):
                    raise
        return self._make(key, make, flight)

    def _make(self, key: K, make: Callable[[], tuple[V, float]], flight: "Future[V]") -> V:
        try:
            made, seconds = make()
        except BaseException as error:
            with self._lock:
                del self._flights[key]
            flight.set_exception(error)
            raise
        with self._lock:
            del self._flights[key]
            self._keep(key, made, seconds)
        flight.set_result(made)
        return made

    def _keep(self, key: K, value: V, seconds: float) -> None:
        if key in self._kept:
            self._weight -= self._weigh(self._kept.pop(key)[1]) + 1
        if seconds <= 0:
            return
        self._kept[key] = (time.monotonic() + seconds, value)
        self._weight += self._weigh(value) + 1
        while self._weight > self._max_weight:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._weight -= self._weigh(dropped) + 1
