"""Counters and latency histograms of the handler, in memory that doesn't grow."""

import bisect
import threading
from collections import Counter, defaultdict

from scrl.types import ToolResult


class LatencyHistogram:
    """Seconds in buckets whose bounds grow by sqrt(2) from 0.1 ms to over 200 s; a quantile is within that factor."""

    BOUNDS = tuple(1e-4 * 2 ** (i / 2) for i in range(43))

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self.count, self.total, self.max = 0, 0.0, 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
        self.count += 1
        self.total += seconds
        self.max = max(self.max, seconds)

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the q-quantile, at most the largest value seen; 0 when empty."""
        rank, seen = q * self.count, 0
        for count, bound in zip(self._counts, (*self.BOUNDS, self.max), strict=True):
            seen += count
            if count and seen >= rank:
                return min(bound, self.max)
        return 0.0


class HandlerMetrics:
    """Safe from many threads. Everything counts from the start of the handler."""

    COUNTERS = ("calls", "queries", "searches", "cache_hits", "shared", "empty", "expired_unsearched", "errors")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(self.COUNTERS, 0))
        self._latencies: defaultdict[str, LatencyHistogram] = defaultdict(LatencyHistogram)

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._latencies[name].add(seconds)

    def record(self, result: ToolResult, latency_s: float, run: int) -> None:
        """A call was answered. ``run``: its first so many queries were run.

        ``empty`` counts queries, of calls without an error, that brought nothing, however the answer came about: so it
        is the same whether the handler is in this process or behind servers.
        """
        if result.error_kind:
            self.count("errors")
            self.count(f"errors/{result.error_kind}")
        else:
            self.count("empty", sum(not rows for rows in result.items[:run]))
        self.observe("call", latency_s)

    def as_dict(self) -> dict[str, float]:
        """Flat: ``search/{counter}``, ``search/errors/{kind}``, ``search/{name}_s/{mean,p50,p99,max}``."""
        with self._lock:
            flat = {f"search/{name}": float(value) for name, value in self._counts.items()}
            for name, times in self._latencies.items():
                flat[f"search/{name}_s/mean"] = times.total / times.count
                flat[f"search/{name}_s/p50"] = times.quantile(0.5)
                flat[f"search/{name}_s/p99"] = times.quantile(0.99)
                flat[f"search/{name}_s/max"] = times.max
            return flat
