"""What an episode has found and read so far, by episode id, until it is released."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit


@dataclass
class _Context:
    urls: dict[str, str] = field(default_factory=dict)  # url_key -> the query that found it last; oldest first
    notes: OrderedDict[str, None] = field(default_factory=OrderedDict)


class EpisodeContexts:
    """By episode id: the URLs that its searches returned, and the notes that its reading made. Threads may share one.

    Bounded on its own, for episodes that nobody releases (a client that died): beyond ``max_episodes`` the one unused
    for longest goes, and within an episode the oldest URLs and notes do. An id is never used again after its release,
    so a search that lands late brings nothing back. The id "" stands for no episode: nothing is kept for it.
    """

    def __init__(self, max_episodes: int = 8192, max_urls: int = 512, max_notes: int = 256) -> None:
        assert min(max_episodes, max_urls, max_notes) > 0
        self._max_episodes, self._max_urls, self._max_notes = max_episodes, max_urls, max_notes
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()

    def record(self, episode_id: str, urls: Iterable[str], query: str = "") -> None:
        """A search of the episode, for ``query``, returned ``urls``: it may browse them."""
        with self._lock:
            context = self._touch(episode_id)
            if context is None:
                return
            for url in urls:
                key = url_key(url)
                context.urls.pop(key, None)  # seen again: the newest
                context.urls[key] = query
            while len(context.urls) > self._max_urls:
                del context.urls[next(iter(context.urls))]

    def allowed(self, episode_id: str) -> dict[str, str]:
        """The ``url_key`` of each URL that the episode may browse -> the query that found it last."""
        with self._lock:
            context = self._contexts.get(episode_id)
            return dict(context.urls) if context else {}

    def known(self, episode_id: str) -> frozenset[str]:
        """The notes that the episode has been given."""
        with self._lock:
            context = self._contexts.get(episode_id)
            return frozenset(context.notes) if context else frozenset()

    def learn(self, episode_id: str, notes: Iterable[str]) -> None:
        """The episode is given ``notes``."""
        with self._lock:
            context = self._touch(episode_id)
            if context is None:
                return
            context.notes.update(dict.fromkeys(notes))
            while len(context.notes) > self._max_notes:
                context.notes.popitem(last=False)

    def release(self, episode_id: str) -> None:
        """The episode has ended: forget it. Harmless when it is unknown or was released before."""
        if not episode_id:
            return
        with self._lock:
            self._contexts.pop(episode_id, None)
            self._released[episode_id] = None
            if len(self._released) > self._max_episodes:
                self._released.popitem(last=False)

    def __len__(self) -> int:
        return len(self._contexts)

    def _touch(self, episode_id: str) -> _Context | None:
        """The episode's context, as the one used last; None where nothing is to be kept."""
        if not episode_id or episode_id in self._released:
            return None
        context = self._contexts.setdefault(episode_id, _Context())
        self._contexts.move_to_end(episode_id)
        if len(self._contexts) > self._max_episodes:
            self._contexts.popitem(last=False)
        return context


def url_key(url: str) -> str:
    """What two spellings of a URL have in common: scheme and host in lower case, no fragment, no bare final slash.

    Text that is no URL is its own key.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    path = "" if parts.path == "/" and not parts.query else parts.path
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), path, parts.query, ""))
