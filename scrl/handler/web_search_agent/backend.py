"""What a search engine looks like to the rest: the ``SearchBackend`` interface and the error it may raise."""

from typing import Protocol

from scrl.handler.web_search_agent.local_index import Row


class SearchError(Exception):
    """A search that failed. ``kind`` is one of ToolResult's error kinds, the message one sentence for people.

    ``retryable``: the same request may succeed a moment later, not before ``retry_after_s`` where the server said so.
    ``fault``: it speaks against the backend, and so counts for its circuit breaker; a bad query or a call that left no
    time doesn't.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
        fault: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.fault = kind != "bad_request" if fault is None else fault


class SearchBackend(Protocol):
    """One search engine. Many threads call ``search`` at once.

    ``cache_scope`` names all that decides what a query finds (engine, corpus or server, region, language): a cache may
    give one backend's rows to another only if the two have the same scope.
    """

    name: str
    cache_scope: str

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        """The best ``topk`` rows {title, url, text}, best first.

        Must return or raise by ``deadline`` (``time.monotonic()`` seconds). Raises SearchError.
        """
        ...

    def close(self) -> None:
        """Let go of connections, and end with an error what is still under way."""
        ...
