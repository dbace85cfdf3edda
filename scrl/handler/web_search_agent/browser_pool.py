"""A few worker processes that turn pages into text, each page under a deadline and a limit of memory."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from scrl.handler.web_search_agent.fetch import PageError, RawPage

_SCRIPT = Path(__file__).with_name("browser_extract.py")
_MAX_REPLY = 16 << 20  # bytes
_START_S = 60.0  # to import the parsers, on a machine that is busy
# What Python and its libraries need of the environment.
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "TMPDIR", "LANG")


@dataclass(frozen=True)
class ExtractedPage:
    """``plain``: the layout was too odd to tell the main text, so all of it is here."""

    title: str
    text: str
    plain: bool = False


class ExtractorPool:
    """At most ``size`` processes, started when first needed. Threads may share one; ``close`` ends the processes.

    A page may take ``cpu_seconds`` of one's CPU, which has ``memory`` bytes of address space.
    """

    def __init__(self, size: int | None = None, cpu_seconds: float = 5.0, memory: int = 768 << 20) -> None:
        self._arguments = (str(cpu_seconds), str(memory))
        size = size or max(1, min(4, (os.cpu_count() or 1) // 2))
        # Last in, first out, the live ones on top: a second process starts only when two pages come at once.
        self._workers: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._workers.put(None)
        self._closed = False
        self._lock = threading.Lock()

    def extract(self, page: RawPage, deadline: float) -> ExtractedPage:
        """The text of ``page`` by ``deadline`` (``time.monotonic()`` seconds). Raises PageError."""
        try:
            worker = self._workers.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise PageError("timeout", "no process was free to read the page in time", lasting=False) from None
        try:
            if self._closed:
                raise PageError("internal", "the browser is closed", lasting=False)
            worker = worker or _Worker(self._arguments)
            worker.wait_ready(deadline)
            reply = worker.run(page, deadline)
        except BaseException:  # one that is in the middle of a page would answer the next one with it
            if worker and not worker.is_idle:
                worker.kill()
                worker = None
            raise
        else:
            if reply.get("retire"):
                worker.kill()
                worker = None
        finally:
            self._give_back(worker)
        if "error" in reply:
            raise PageError("bad_reply", f"{page.url[:200]}: {reply['error']}")
        return ExtractedPage(reply["title"], reply["text"], reply["plain"])

    def close(self) -> None:
        """End the processes; a page that is being read when it is called ends its own."""
        with self._lock:
            self._closed = True
            idle = [self._workers.get_nowait() for _ in range(self._workers.qsize())]
        for worker in idle:
            if worker:
                worker.kill()
            self._workers.put(None)

    def _give_back(self, worker: "_Worker | None") -> None:
        with self._lock:
            if self._closed and worker:
                worker.kill()
                worker = None
            self._workers.put(worker)


class _Worker:
    """One process and our end of its socket. ``is_idle``: it waits for a page (or still starts)."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._channel, theirs = socket.socketpair()
        # It parses what strangers wrote, so it gets no secret to lose, under whatever name.
        environment = {k: v for k, v in os.environ.items() if k in _INHERITED or k.startswith("LC_")}
        with theirs:
            self._process = subprocess.Popen(
                # -P: the script's folder must not come before the standard library
                [sys.executable, "-P", str(_SCRIPT), *arguments],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )
        self._start_deadline = time.monotonic() + _START_S
        self._ready = False
        self.is_idle = True

    def wait_ready(self, deadline: float) -> None:
        if self._ready:
            return
        try:
            self._receive(min(deadline, self._start_deadline))
        except TimeoutError:
            self.is_idle = time.monotonic() < self._start_deadline  # else it hangs: not to be kept
            raise PageError("timeout", "the page reader is still starting", lasting=False) from None
        except OSError as error:
            self.is_idle = False
            message = f"the page reader does not start (exit status {self._process.wait(timeout=5)})"
            raise PageError("internal", message, lasting=False) from error
        self._ready = True

    def run(self, page: RawPage, deadline: float) -> dict:
        """Its reply. Raises PageError, after which it must be killed, when it dies or takes too long."""
        data = json.dumps({"kind": page.kind, "charset": page.charset, "size": len(page.body)}).encode()
        self.is_idle = False
        try:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
            self._channel.sendall(len(data).to_bytes(4, "big") + data + page.body)
            reply = self._receive(deadline)
        except TimeoutError:
            raise PageError("timeout", f"{page.url[:200]} was not read in time", lasting=False) from None
        except OSError as error:
            if self._process.wait(timeout=5) == -signal.SIGPROF:
                raise PageError("timeout", f"{page.url[:200]} takes too long to read") from error
            raise PageError("bad_reply", f"{page.url[:200]} broke its parser") from error
        self.is_idle = True
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _receive(self, limit: float) -> dict:
        size = int.from_bytes(self._exactly(4, limit), "big")
        if size > _MAX_REPLY:
            raise ConnectionResetError("the process is out of its mind")
        return json.loads(self._exactly(size, limit))

    def _exactly(self, size: int, limit: float) -> bytes:
        parts = []
        while size:
            self._channel.settimeout(max(limit - time.monotonic(), 0.001))
            part = self._channel.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionResetError("the process ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
