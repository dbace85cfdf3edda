"""Browsing: a URL in, what its page says about the episode's question out.

A page comes from the local corpus or from the web, is kept by URL, and is split into viewports; a reader goes through
them and gives notes. Pages are shared by all episodes, notes belong to one.
"""

import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scrl.handler.config import HandlerConfig
from scrl.handler.contexts import EpisodeContexts, url_key
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.reading_agent.reader import Reader, ReadTask, make_reader
from scrl.handler.web_search_agent.browser_cache import SingleFlightCache
from scrl.handler.web_search_agent.browser_pool import ExtractorPool
from scrl.handler.web_search_agent.corpus import iter_rows
from scrl.handler.web_search_agent.fetch import PageError, PageFetcher
from scrl.handler.web_search_agent.local_index import Row
from scrl.handler.web_search_agent.search_api import expand

NOTHING_NEW = "Nothing new on this page."
_CACHED_CHARS = 64_000_000
_PAGE_TTL_S, _FAILURE_TTL_S = 3600.0, 60.0
_LOOKUP_BYTES = 256 << 20  # a larger corpus isn't held in memory by URL
_SEEN_ROWS = 16_384


@dataclass(frozen=True)
class Page:
    title: str
    text: str


class PageSource(Protocol):
    """Where pages come from. Many threads call ``load`` at once."""

    def load(self, url: str, deadline: float) -> Page:
        """The page by ``deadline`` (``time.monotonic()`` seconds). Raises PageError."""
        ...

    def remember(self, rows: Iterable[Row]) -> None:
        """A search returned ``rows``."""

    def close(self) -> None: ...


class WebPages(PageSource):
    """The open web, behind PageFetcher's checks. Its processes start at the first page."""

    def __init__(self, metrics: HandlerMetrics, fetcher: PageFetcher | None = None) -> None:
        self._metrics = metrics
        self._fetcher, self._extractors = fetcher or PageFetcher(), ExtractorPool()

    def load(self, url: str, deadline: float) -> Page:
        """See PageSource."""
        started = time.monotonic()
        raw = self._fetcher.fetch(url, deadline)
        fetched = time.monotonic()
        self._metrics.observe("browse/fetch", fetched - started)
        extracted = self._extractors.extract(raw, deadline)
        self._metrics.observe("browse/extract", time.monotonic() - fetched)
        if extracted.plain:
            self._metrics.count("browse/plain")
        if not extracted.text:
            raise PageError("bad_reply", f"{url[:200]} holds no text")
        return Page(extracted.title, extracted.text)

    def close(self) -> None:
        self._extractors.close()


class CorpusPages(PageSource):
    """The pages of a local corpus, by URL; rows that share one are one page. No network.

    The corpus is read when the first page is asked for. One of more than 256 MB is not; then the rows that searches
    returned lately (``remember``) are what there is.
    """

    def __init__(self, corpus: Path) -> None:
        self._corpus = corpus
        self._whole = corpus.stat().st_size <= _LOOKUP_BYTES
        self._lock = threading.Lock()
        self._pages: dict[str, Page] | None = None
        self._seen: OrderedDict[str, Page] = OrderedDict()

    def load(self, url: str, deadline: float) -> Page:
        """See PageSource. Reading the corpus takes about a second for 30 MB, once, whatever the deadline."""
        key = url_key(url)
        with self._lock:
            if self._whole and self._pages is None:
                self._pages = _by_url(row for row, _ in iter_rows([self._corpus]))
            page = self._pages.get(key) if self._pages is not None else self._seen.get(key)
        if page is None:
            raise PageError("bad_request", f"{url[:200]} is not in the corpus")
        return page

    def remember(self, rows: Iterable[Row]) -> None:
        """See PageSource."""
        if self._whole:
            return
        with self._lock:
            for key, page in _by_url(rows).items():
                self._seen[key] = page
                self._seen.move_to_end(key)
            while len(self._seen) > _SEEN_ROWS:
                self._seen.popitem(last=False)


def _by_url(rows: Iterable[Row]) -> dict[str, Page]:
    parts: dict[str, tuple[str, list[str]]] = {}
    for row in rows:
        if row["url"]:
            parts.setdefault(url_key(row["url"]), (row["title"], []))[1].append(row["text"])
    return {key: Page(title, "\n".join(texts)) for key, (title, texts) in parts.items()}


class ChainedPages(PageSource):
    """For a chain of engines with the local one: a page of the corpus where it has the URL, else the web's."""

    def __init__(self, corpus: CorpusPages, web: PageSource) -> None:
        self._corpus, self._web = corpus, web

    def load(self, url: str, deadline: float) -> Page:
        """See PageSource."""
        try:
            return self._corpus.load(url, deadline)
        except PageError:  # it isn't in there
            return self._web.load(url, deadline)

    def remember(self, rows: Iterable[Row]) -> None:
        """See PageSource."""
        self._corpus.remember(rows)

    def close(self) -> None:
        self._web.close()


class NoPages(PageSource):
    """Nothing to read from; says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def load(self, url: str, deadline: float) -> Page:
        """Raises PageError."""
        raise PageError("no_backend", self._reason)


def make_source(config: HandlerConfig, metrics: HandlerMetrics) -> PageSource:
    """Pages from where search results come from: a local index's from its corpus alone, an online engine's from the
    web, those of a chain with both from whichever has them. A replay goes online for nothing."""
    engines, file = expand(config.search_engine), Path(config.index_corpus)
    corpus = CorpusPages(file) if "local" in engines and file.is_file() else None
    if engines == ("local",):
        return corpus or NoPages(f"there is no corpus {config.index_corpus!r} to read")
    if config.cache_mode == "replay":
        web: PageSource = NoPages("search.cache_mode=replay repeats searches, and has no recording of web pages")
    else:
        web = WebPages(metrics)
    return ChainedPages(corpus, web) if corpus else web


@dataclass(frozen=True)
class Visit:
    """See ``Browser.visit``. ``allowed``: ``url_key`` -> the query that found it, "" where that isn't known."""

    episode_id: str
    question: str
    allowed: Mapping[str, str]
    known: frozenset[str]


class Browser:
    """Reads pages for episodes. Many threads share one; ``close`` it. ValueError for a reading model without a URL.

    Counts ``browse/pages`` asked for, ``browse/loads`` that no cache spared, ``browse/plain`` pages of odd layout, and
    of a reading model ``browse/read_requests, read_retries, read_cut, read_fallbacks``.
    """

    def __init__(
        self,
        config: HandlerConfig,
        contexts: EpisodeContexts,
        metrics: HandlerMetrics,
        source: PageSource | None = None,
        reader: Reader | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._config, self._contexts, self._metrics = config, contexts, metrics
        count = lambda name: metrics.count(f"browse/{name}")  # noqa: E731
        self._reader = reader or make_reader(environ, count)
        self._source = source or make_source(config, metrics)
        self._pages: SingleFlightCache[str, Page | PageError] = SingleFlightCache(
            _CACHED_CHARS,
            lambda page: len(page.text) if isinstance(page, Page) else 100,
            is_passing=lambda error: isinstance(error, PageError),
        )

    def remember(self, rows: Iterable[Row]) -> None:
        """A search returned ``rows``; where the corpus is too large to look up a URL in, they are its pages."""
        self._source.remember(rows)

    def visit(self, episode_id: str, question: str, allowed_urls: Mapping[str, str] | None = None) -> Visit:
        """What an episode's call may read and knows, as it stands now: the call's pages don't wait for one another,
        and what they say must not depend on which was faster.

        ``allowed_urls``: what its searches found, by which query, where its client keeps that.
        """
        if allowed_urls is None:
            allowed = self._contexts.allowed(episode_id)
        else:
            allowed = {url_key(url): query for url, query in allowed_urls.items()}
        return Visit(episode_id, question, allowed, self._contexts.known(episode_id))

    def read(self, url: str, visit: Visit, deadline: float) -> Row:
        """``{title, url, text}``: what the page says that the episode hasn't been told yet.

        ``deadline`` is ``time.monotonic()`` seconds. Raises PageError, also for a page that no search of the episode
        found, unless ``search.browse_any_url``.
        """
        self._metrics.count("browse/pages")
        key = url_key(url)
        if key not in visit.allowed and not self._config.browse_any_url:
            raise PageError("bad_request", f"{url[:200]} is not among this episode's search results")
        page = self._page(key, url, deadline)
        views = itertools.islice(split_views(page.text, self._config.page_view_port_size), self._config.max_page_views)
        query = visit.allowed.get(key, "")
        started = time.monotonic()
        notes = self._reader.read(ReadTask(page.title, tuple(views), visit.question, query, visit.known, deadline))
        self._metrics.observe(f"browse/{self._reader.name}", time.monotonic() - started)
        self._contexts.learn(visit.episode_id, notes)
        return {"title": page.title, "url": url, "text": " ".join(notes) or NOTHING_NEW}

    def close(self) -> None:
        self._reader.close()
        self._source.close()

    def _page(self, key: str, url: str, deadline: float) -> Page:
        def load() -> tuple[Page | PageError, float]:
            self._metrics.count("browse/loads")
            try:
                return self._source.load(url, deadline), _PAGE_TTL_S
            except PageError as error:
                if not error.lasting:
                    raise
                return error, _FAILURE_TTL_S

        try:
            page = self._pages.get(key, load, deadline)
        except TimeoutError:
            raise PageError("timeout", f"{url[:200]} took too long", lasting=False) from None
        if isinstance(page, PageError):
            raise PageError(page.kind, str(page))  # a new one: an exception keeps the traceback of who raised it
        return page


def split_views(text: str, size: int) -> Iterable[str]:
    """``text`` in viewports of at most ``size`` characters, cut at the end of a line, else of a word, where there is
    one in a viewport's last quarter."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            least = end - size // 4
            cut = max(text.rfind("\n", least, end), 0) or max(text.rfind(" ", least, end), 0)
            end = cut + 1 if cut else end
        view = text[start:end].strip()
        if view:
            yield view
        start = end
