"""Load on the search servers: many calls from many clients through the proxy and some servers, over slow searches.

    python scripts/bench/handler_load.py [--calls 4096] [--clients 64] [--servers 2] [--kill] [--scale 1] [--json FILE]

A search sleeps for a log-normal time (median 0.3 s, 5 % above 3 s) that depends on its query alone, so the ideal wall
time for so many clients can be simulated: each takes the next call as soon as its last one is answered. ``--kill``
ends one server with SIGKILL when half of the calls are answered. ``--scale`` shortens or stretches all latencies.
Exit code 1 where an answer was lost or belongs to another call.
"""

import argparse
import heapq
import json
import math
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scrl.handler.client import HttpSearchHandler  # noqa: E402
from scrl.handler.config import HandlerConfig  # noqa: E402
from scrl.handler.handler import SearchHandler  # noqa: E402
from scrl.handler.http_service import serve  # noqa: E402
from scrl.handler.server_handler import create_app  # noqa: E402
from scrl.types import ToolCall  # noqa: E402

MEDIAN_S, TAIL_S, TAIL_SHARE_Z = 0.3, 3.0, 1.6449  # 5 % of a normal lie above 1.6449 deviations
START_TIMEOUT_S = 240.0


def latency(query: str, scale: float) -> float:
    """Seconds that the search for ``query`` takes."""
    sigma = math.log(TAIL_S / MEDIAN_S) / TAIL_SHARE_Z
    return scale * random.Random(query).lognormvariate(math.log(MEDIAN_S), sigma)


def ideal_wall(latencies: list[float], clients: int) -> float:
    """Seconds until the last answer, were there nothing but the searches themselves."""
    free = [0.0] * clients
    for seconds in latencies:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


class LatencyBackend:
    name = "latency"

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        time.sleep(min(latency(query, self._scale), max(deadline - time.monotonic(), 0)))
        return [{"title": query, "url": f"https://bench.example/{query}", "text": f"This answers {query}. " * 40}]

    def close(self) -> None:
        pass


def serve_latency(clients: int, scale: float, timeout_s: float) -> int:
    """One server's process. It may get the calls of all clients, and remembers nothing: every query is new."""
    # As an engine on the network would be: the results of a corpus are kept (the last 16,384) as its pages.
    config = HandlerConfig(search_engine="searxng", max_workers=clients, timeout_s=timeout_s, cache_size=0)
    return serve(create_app(config, SearchHandler(config, LatencyBackend(scale))), "127.0.0.1", 0, "latency server")


@dataclass
class Service:
    """A server or the proxy, in a process of its own."""

    process: subprocess.Popen
    url: str = ""

    @classmethod
    def start(cls, *arguments: str) -> "Service":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
        return cls(process)

    def wait_ready(self) -> "Service":
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(START_TIMEOUT_S):
                raise TimeoutError(f"{self.process.args} did not start within {START_TIMEOUT_S:g} s")
        self.url = self.process.stdout.readline().split()[-1]
        return self

    def usage(self) -> tuple[float, float]:
        """(resident MB, processor seconds) so far."""
        process = psutil.Process(self.process.pid)
        times = process.cpu_times()
        return process.memory_info().rss / 1e6, times.user + times.system

    def metric(self, name: str) -> float:
        lines = httpx.get(self.url + "/metrics", trust_env=False, timeout=30).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@dataclass
class Load:
    """What the clients see. ``marks``: usage of each living service when so many calls were answered."""

    services: dict[str, Service]
    calls: int
    kill: bool
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    swapped: int = 0
    marks: dict[float, dict[str, tuple[float, float]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, handler: HttpSearchHandler, clients: int) -> float:
        """Play all calls; the wall time in seconds."""
        started = time.monotonic()
        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(lambda index: self._one(handler, index), range(self.calls)))
        return time.monotonic() - started

    def _one(self, handler: HttpSearchHandler, index: int) -> None:
        query = f"call {index}"
        (result,) = handler.handle([ToolCall("web_search", {"query": [query]})])
        with self.lock:
            self.answered += 1
            if not result.ok:
                self.failed.append(result.error)
            elif [row["title"] for rows in result.items for row in rows] != [query]:
                self.swapped += 1
            if self.kill and self.answered == self.calls // 2:
                self.services["server 1"].process.send_signal(signal.SIGKILL)
                del self.services["server 1"]
            for share in (0.25, 1.0):
                if self.answered == int(share * self.calls):
                    self.marks[share] = {name: service.usage() for name, service in self.services.items()}


def measure(calls: int, clients: int, servers: int, kill: bool, scale: float) -> dict[str, float | str]:
    latencies = [latency(f"call {index}", scale) for index in range(calls)]
    timeout_s = max(latencies) + 60.0
    worker = (__file__, "--serve", f"--clients={clients}", f"--scale={scale}", f"--timeout={timeout_s}")
    started = {f"server {number}": Service.start(*worker) for number in range(1, servers + 1)}
    services = dict(started)
    try:
        urls = ",".join(service.wait_ready().url for service in started.values())
        options = (f"server_url_list=[{urls}]", f"timeout_s={timeout_s}", "proxy_port=0")
        started["proxy"] = services["proxy"] = Service.start(str(ROOT / "scrl/handler/handler.py"), *options)
        proxy = services["proxy"].wait_ready()
        load = Load(services, calls, kill)
        cpu_before = time.process_time()
        with HttpSearchHandler(proxy.url, HandlerConfig(max_workers=clients, timeout_s=timeout_s)) as handler:
            wall = load.run(handler, clients)
        early, late = load.marks[0.25], load.marks[1.0]
        searches = sum(service.metric("scrl_search_searches") for name, service in services.items() if name != "proxy")
        report: dict[str, float | str] = {
            "calls": calls,
            "clients": clients,
            "servers": f"{servers}, one killed" if kill else servers,
            "lost": len(load.failed),
            "swapped": load.swapped,
            "searches (of living servers)": searches,
            "wall_s": wall,
            "ideal_s": ideal_wall(latencies, clients),
        }
        report["wall/ideal"] = wall / report["ideal_s"]
        for name in late:
            report[f"{name}: MB at 25 % of the calls"] = early[name][0]
            report[f"{name}: MB at the end"] = late[name][0]
            report[f"{name}: CPU ms a call"] = 1e3 * (late[name][1] - early[name][1]) / (0.75 * calls)
        report["clients: CPU ms a call"] = 1e3 * (time.process_time() - cpu_before) / calls
        if load.failed:
            report["first failure"] = load.failed[0]
        return report
    finally:
        for service in started.values():
            service.process.kill()
            service.process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of all latencies")
    parser.add_argument("--kill", action="store_true", help="kill -9 one server in the middle")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_latency(args.clients, args.scale, args.timeout)
    if args.calls < 4 or args.clients < 1 or args.servers < 1 + args.kill or not args.scale > 0:
        parser.error("it takes 4 calls, a client, a server (two with --kill) and a scale above 0 at least")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    report = measure(args.calls, args.clients, args.servers, args.kill, args.scale)
    table = Table(title="Search servers under load")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in report.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return int(bool(report["lost"] or report["swapped"]))


if __name__ == "__main__":
    sys.exit(main())
