"""How a backend is treated so that neither it nor the run suffers: a rate limit, retries, a circuit breaker.

All three take their clock and their sleep from outside, so that tests count instead of waiting.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_any, wait_random_exponential

from scrl.handler.web_search_agent.backend import SearchError

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Limits:
    """``rate``: requests a second on average, ``burst`` at once. A search makes at most ``attempts`` requests, waiting
    up to ``backoff_s``, twice that, … ``max_backoff_s`` between them. ``failures`` failed searches in a row open the
    breaker for ``cooldown_s``."""

    rate: float
    burst: float = 4.0
    attempts: int = 4
    backoff_s: float = 0.5
    max_backoff_s: float = 8.0
    failures: int = 5
    cooldown_s: float = 30.0


class TokenBucket:
    """``rate`` tokens a second, at most ``burst`` kept. Who finds none reserves the next, first come first served."""

    MAX_HOLD_S = 600.0  # a server that says "in a day" is asked again sooner: it may have meant one client

    def __init__(self, rate: float, burst: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, max(burst, 1.0), clock
        self._lock = threading.Lock()
        self._tokens, self._updated, self._held_until = self._burst, clock(), float("-inf")

    def reserve(self, deadline: float) -> float:
        """Take a token; the seconds to wait before using it. Raises SearchError when that is past ``deadline``."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
            self._updated = now
            turn, held = max((1.0 - self._tokens) / self._rate, 0.0), self._held_until - now
            if now + max(turn, held) >= deadline:
                within = f"{max(deadline - now, 0):.1f} s"
                message = (
                    f"wants no requests for {held:.0f} s"
                    if held > turn
                    else f"is asked at most {self._rate:g} times a second, and has no turn free within {within}; "
                    "raise search.rate_limit if your plan allows more"
                )
                raise SearchError("rate_limited", message, fault=False)
            self._tokens -= 1.0
            return max(turn, held)

    def hold(self, seconds: float) -> None:
        """No token before ``seconds`` from now: the server asked one request to wait, so the others wait too."""
        with self._lock:
            self._held_until = max(self._held_until, self._clock() + min(seconds, self.MAX_HOLD_S))


class CircuitBreaker:
    """After ``failures`` faults in a row nobody asks for ``cooldown_s``; then one call probes, and its end decides.

    M. Nygard, Release It!, 2nd ed. 2018, ch. 5.
    """

    def __init__(
        self,
        failures: int,
        cooldown_s: float,
        clock: Clock = time.monotonic,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._threshold, self._cooldown, self._clock, self._on_open = failures, cooldown_s, clock, on_open
        self._lock = threading.Lock()
        self._failures = 0
        self._opened: float | None = None  # when; None while closed
        self._probing = False
        self._reason = ""

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Run a call inside. Raises SearchError ``no_backend`` at once, while open."""
        probe = self._admit()
        try:
            yield
        except SearchError as error:
            self._settle(probe, reason=str(error) if error.fault else None)
            raise
        except BaseException:
            self._settle(probe, reason=None)
            raise
        self._settle(probe, reason="")

    def _admit(self) -> bool:
        with self._lock:
            if self._opened is None:
                return False
            wait = self._opened + self._cooldown - self._clock()
            if wait <= 0 and not self._probing:
                self._probing = True
                return True
            when = f"asked again in {wait:.0f} s" if wait > 0 else "being tried"
            raise SearchError(
                "no_backend", f"failed {self._failures} times in a row and is {when}; last: {self._reason}", fault=False
            )

    def _settle(self, probe: bool, reason: str | None) -> None:
        """``reason``: "" for a success, None for an end that says nothing about the backend, else the fault."""
        with self._lock:
            if probe:
                self._probing = False
            if reason is None:
                return
            if not reason:
                # Only a probe closes it: a success that began before it opened may be from a better time.
                if probe or self._opened is None:
                    self._failures, self._opened = 0, None
                return
            self._failures += 1
            self._reason = reason
            opens = probe or (self._opened is None and self._failures >= self._threshold)
            if opens:
                self._opened = self._clock()
        if opens:
            self._on_open()


class Guard:
    """One backend's rate limit, retries and breaker. ``count`` is told of what happens, by name."""

    def __init__(
        self,
        limits: Limits,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._limits, self._count, self._clock = limits, count, clock
        self._closed = threading.Event()
        self._sleep = self._closed.wait if sleep is None else sleep  # so that closing wakes who waits
        self._bucket = TokenBucket(limits.rate, limits.burst, clock)
        self._breaker = CircuitBreaker(limits.failures, limits.cooldown_s, clock, lambda: count("breaker_opened"))
        self._backoff = wait_random_exponential(multiplier=limits.backoff_s, max=limits.max_backoff_s)

    def run(self, request: Callable[[float], T], deadline: float) -> T:
        """``request(seconds left)``, tried again where its SearchError is retryable and time is left.

        Raises the last SearchError, or ``no_backend`` without a request while the breaker is open.
        """
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, SearchError) and error.retryable),
            wait=self._wait,
            # tenacity has worked out the next wait before it asks whether to stop.
            stop=stop_any(
                stop_after_attempt(self._limits.attempts),
                lambda state: self._clock() + state.upcoming_sleep >= deadline,
            ),
            before_sleep=lambda state: self._count("retries"),
            sleep=self._pause,
            reraise=True,
        )
        with self._breaker.guarding():
            return retrying(self._request, request, deadline)

    def close(self) -> None:
        """End every wait; whoever waited gets an error."""
        self._closed.set()

    def _request(self, request: Callable[[float], T], deadline: float) -> T:
        wait = self._bucket.reserve(deadline)
        if wait > 0:
            self._count("throttled")
            self._pause(wait)
        self._count("requests")
        try:
            return request(deadline - self._clock())
        except SearchError as error:
            if error.retry_after_s is not None:
                self._bucket.hold(error.retry_after_s)
            raise

    def _pause(self, seconds: float) -> None:
        self._sleep(seconds)
        if self._closed.is_set():
            raise SearchError("internal", "the search backend was closed", fault=False)

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after_s if isinstance(error, SearchError) else None
        return (asked or 0.0) + self._backoff(state)
