"""Where search results come from: the engines by name, and the backend that a configuration asks for."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrl.handler.config import HandlerConfig
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.backend import SearchBackend, SearchError
from scrl.handler.web_search_agent.chain import ChainBackend
from scrl.handler.web_search_agent.corpus import fingerprint
from scrl.handler.web_search_agent.engines import (
    BaiduBackend,
    BingBackend,
    BraveBackend,
    GoogleBackend,
    ProxyBackend,
    RetrieverBackend,
    SearxngBackend,
    SerpApiBackend,
    TavilyBackend,
)
from scrl.handler.web_search_agent.local_index import FORMAT_VERSION, LocalIndex, Row
from scrl.handler.web_search_agent.remote import RemoteBackend

__all__ = ["BACKENDS", "FAMILY", "SearchBackend", "SearchError", "check_engines", "expand", "make_backend"]


class LocalBackend:
    """The index on this machine, built on first use. It takes about a millisecond, so it needs no deadline."""

    name = "local"

    def __init__(self, config: HandlerConfig, metrics: HandlerMetrics | None = None) -> None:
        if not config.index_corpus:
            raise ValueError(
                "search_engine=local needs a corpus, and search.index_corpus is empty; "
                "set it to a .jsonl or .parquet of {title, url, text}"
            )
        corpus = Path(config.index_corpus)
        self._index = LocalIndex.open(corpus, config.index_dir or corpus.parent / "index")
        self.cache_scope = f"local|{fingerprint([corpus], FORMAT_VERSION)}"

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        return self._index.search(query, topk)

    def close(self) -> None:
        pass


def _duckduckgo(*args: Any, **options: Any) -> RemoteBackend:
    from scrl.handler.web_search_agent.duckduckgo import DuckDuckGoBackend  # only here: it loads ddgs and lxml

    return DuckDuckGoBackend(*args, **options)


BACKENDS: dict[str, Callable[..., SearchBackend]] = {
    "local": LocalBackend,
    "retriever": RetrieverBackend,
    "searxng": SearxngBackend,
    "google": GoogleBackend,
    "serpapi": SerpApiBackend,
    "bing": BingBackend,
    "duckduckgo": _duckduckgo,
    "baidu": BaiduBackend,
    "tavily": TavilyBackend,
    "brave": BraveBackend,
    "proxy": ProxyBackend,
}


def _rag(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A corpus of one's own: a retrieval server where there is one, else the index on this machine."""
    return ("retriever",) if environ.get("RETRIEVER_URL") else ("local",)


def _online_search(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The web: first what was set up for the purpose, then the paid engines that there is a key for, cheapest a query
    first; DuckDuckGo, which asks for nothing, in the end."""
    own = [engine.name for engine in (ProxyBackend, SearxngBackend) if environ.get(engine.url_variable)]
    paid = [
        engine.name
        for engine in (GoogleBackend, BaiduBackend, BraveBackend, TavilyBackend, SerpApiBackend)
        if environ.get(engine.key_variable)
    ]
    return (*own, *paid, "duckduckgo")


# The family's names for what depends on the environment.
FAMILY: dict[str, Callable[[Mapping[str, str]], tuple[str, ...]]] = {"rag": _rag, "online_search": _online_search}


def expand(search_engine: str | Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names in BACKENDS that ``search_engine`` (one name, or several in order of preference) stands for.

    ValueError for an unknown name, or none at all.
    """
    names = [search_engine] if isinstance(search_engine, str) else list(search_engine)
    for name in names:
        if name not in BACKENDS and name not in FAMILY:
            raise ValueError(f"search_engine={name!r} is no engine; use {', '.join((*BACKENDS, *FAMILY))}, or a list")
    engines = [engine for name in names for engine in (FAMILY[name](environ) if name in FAMILY else (name,))]
    if not engines:
        raise ValueError("search_engine is an empty list; give one engine or more, such as search_engine=local")
    return tuple(dict.fromkeys(engines))


def check_engines(search_engine: str | Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """``expand``, after a look at keys and addresses: ValueError for what the environment lacks. Opens nothing."""
    names = expand(search_engine, environ)
    for name in names:
        engine = BACKENDS[name]
        if isinstance(engine, type) and issubclass(engine, RemoteBackend):
            engine.check(environ)
    return names


def make_backend(config: HandlerConfig, metrics: HandlerMetrics | None = None) -> SearchBackend:
    """The backend that ``config.search_engine`` names: an engine, or a chain of several.

    ``metrics`` takes what each engine counts. Raises ValueError for an unknown name, a corpus that can't be used, a
    missing key (naming its variable), or an address that is none.
    """
    backends: list[SearchBackend] = []
    try:
        for name in check_engines(config.search_engine):
            backends.append(BACKENDS[name](config, metrics))
    except BaseException:
        for backend in backends:
            backend.close()
        raise
    return backends[0] if len(backends) == 1 else ChainBackend(backends, metrics)
