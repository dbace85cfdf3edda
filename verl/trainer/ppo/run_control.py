"""What a run needs around its steps: time by phase, work beside it, and an end at a safe point when asked to."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any


class StopNow(KeyboardInterrupt):
    """The second Ctrl-C: nothing more is saved."""


class Stopwatch:
    """Seconds by phase of one step. ``on_phase`` hears what begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def in_background(action: Callable[[], Any]) -> futures.Future:
    """``action()`` in a thread that doesn't keep the process alive (an executor's would, to the end of its work)."""
    future: futures.Future = futures.Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # Ctrl-C too: whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks the run to end at its next safe point, the second ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0

    def heed(self) -> None:
        """At a safe point: KeyboardInterrupt where the run was asked to end."""
        if self.asked:
            raise KeyboardInterrupt

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Listen, for the length of a ``with`` block."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, *_: Any) -> None:
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            print("\nstopping: saving the last whole step (again to stop at once)", flush=True)
        elif time.monotonic() - self._asked_at > 1:  # a group's signal and a script's are one Ctrl-C
            raise StopNow("stopped at once; the last checkpoint is the one to go on from")
