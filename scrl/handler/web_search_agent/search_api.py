"""Where search results come from: one small class a backend, all behind ``SearchBackend``."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from scrl.handler.config import HandlerConfig
from scrl.handler.web_search_agent.local_index import LocalIndex, Row


class SearchError(Exception):
    """A search that failed. ``kind`` is one of ToolResult's error kinds, the message one sentence for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SearchBackend(Protocol):
    """One search engine. Many threads call ``search`` at once."""

    name: str

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        """The best ``topk`` rows {title, url, text}, best first.

        Must return or raise by ``deadline`` (``time.monotonic()`` seconds). Raises SearchError.
        """
        ...

    def close(self) -> None:
        """Let go of connections; no search follows."""
        ...


class LocalBackend:
    """The index on this machine, built on first use. It takes about a millisecond, so it needs no deadline."""

    name = "local"

    def __init__(self, config: HandlerConfig) -> None:
        if not config.index_corpus:
            raise ValueError(
                "search_engine=local needs a corpus, and search.index_corpus is empty; "
                "set it to a .jsonl or .parquet of {title, url, text}"
            )
        corpus = Path(config.index_corpus)
        self._index = LocalIndex.open(corpus, config.index_dir or corpus.parent / "index")

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        return self._index.search(query, topk)

    def close(self) -> None:
        pass


BACKENDS: dict[str, Callable[[HandlerConfig], SearchBackend]] = {
    "local": LocalBackend,
    "rag": LocalBackend,  # the family's name for search over a corpus of one's own
}


def make_backend(config: HandlerConfig) -> SearchBackend:
    """The backend that ``config.search_engine`` names. ValueError for another name, or a corpus that can't be used."""
    if config.search_engine not in BACKENDS:
        raise ValueError(
            f"search_engine={config.search_engine!r} is not one that this version has; use {' or '.join(BACKENDS)}"
        )
    return BACKENDS[config.search_engine](config)
