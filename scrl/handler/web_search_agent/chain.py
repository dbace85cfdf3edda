"""Several backends in order of preference, as one: the next is asked where one is down, failing or finds nothing."""

import time
from collections.abc import Callable, Sequence

from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.backend import SearchBackend, SearchError
from scrl.handler.web_search_agent.local_index import Row


class ChainBackend:
    """Owns ``backends`` and closes them. Observes the latency of each as ``backend/{name}``, and counts
    ``chain/moved_on`` each time that the next one is asked."""

    def __init__(
        self,
        backends: Sequence[SearchBackend],
        metrics: HandlerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends = tuple(backends)
        self._metrics = metrics or HandlerMetrics()
        self._clock = clock
        self.name = "+".join(backend.name for backend in backends)
        self.cache_scope = "+".join(backend.cache_scope for backend in backends)

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        """The first backend's rows that has any; [] where one found nothing and none found any.

        Each gets an equal share of the time that is left, so that one that stalls can't spend the others'. Raises
        SearchError where all fail, with what each said.
        """
        failures: list[SearchError] = []
        for position, backend in enumerate(self._backends):
            if position:
                self._metrics.count("chain/moved_on")
            started = self._clock()
            share = (deadline - started) / (len(self._backends) - position)
            try:
                rows = backend.search(query, topk, started + share)
            except SearchError as error:
                failures.append(error)
                continue
            finally:
                self._metrics.observe(f"backend/{backend.name}", self._clock() - started)
            if rows:
                return rows
        if len(failures) < len(self._backends):
            return []
        raise SearchError(failures[-1].kind, "; ".join(map(str, failures)), fault=any(e.fault for e in failures))

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
