"""What searches found, kept: in memory, and where ``search.cache_path`` names a file, there for every process and run.

Three modes. ``reuse``: results count for ``ttl_s``, empty ones only for ``empty_ttl_s``, since they may be the engine's
bad moment; failures are never kept. ``record``: what came back first for a query is its answer from then on, in all
processes, whatever its age; failures are written down, though never served. ``replay``: the recording is all there is:
what it has is served, its failures too, and anything else is an error, so that a run is repeated offline exactly.

A search never fails because of its cache: a disk that fails while running is counted, logged, and left alone for a
while, and searches go on without it; what was to be recorded waits for it in memory. Only at the start does it raise.
"""

import logging
import sqlite3
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

from scrl.handler.cache_file import BUSY_S, CacheFile, Entry, Failure
from scrl.handler.config import HandlerConfig
from scrl.handler.web_search_agent.local_index import Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

OFF_S = 30.0  # seconds that a file which failed is left alone
_PAUSE_S = 0.005  # between two batches: SQLite's lock isn't fair, and other processes only poll for it


@dataclass(frozen=True)
class Outcome:
    """What became of one query: rows, or an error. ``fuzzy``: these are a similar query's rows."""

    rows: list[Row] = field(default_factory=list)
    error_kind: str = ""
    error: str = ""
    cached: bool = False
    fuzzy: bool = False


def normalise_query(query: str) -> str:
    """What makes two queries the same: NFKC, case and runs of spaces folded. Can be encoded, whatever ``query`` is."""
    folded = " ".join(unicodedata.normalize("NFKC", query).casefold().split())
    return folded if folded.isascii() else folded.encode("utf-8", "backslashreplace").decode()


class SearchCache:
    """Results by normalised query, of one scope: what searched, its region and language.

    ``recall`` looks into memory only and takes microseconds, ``look_up`` reads the file, and a thread of its own writes
    it; only ``settle`` in ``record`` mode waits for that. Threads may share one. Raises ValueError for a file that
    can't be used.
    """

    def __init__(self, config: HandlerConfig, scope: str, clock: Callable[[], float] = time.time) -> None:
        """``scope`` is not used in a replay, where the recording has but one. ``clock``: seconds since 1970."""
        self._config, self._clock = config, clock
        self._mode = config.cache_mode
        self._memory: OrderedDict[str, tuple[Outcome, Entry]] = OrderedDict()
        self._lock = threading.Lock()
        self._errors = self._misses = 0
        self._off_until = 0.0
        self._unwritten: list[Entry | Failure] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="search-cache-writer")
        self._file: CacheFile | None = None
        if config.cache_path:
            kind = {"reuse": "cache", "record": "recording", "replay": None}[self._mode]
            self._file = CacheFile(config.cache_path, None if self._mode == "replay" else scope, kind)

    @property
    def has_file(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        """Write what is unwritten, and close the file."""
        self._off_until = 0.0  # the last chance for what waits
        self._writer.submit(self._write_batch)
        self._writer.shutdown(wait=True)
        if self._unwritten:
            lost = f"THE RECORDING IS INCOMPLETE: it lacks {len(self._unwritten)} results"
            logger.error("search cache %s could not be written to the end; %s", self._file.path, lost)
        if self._file is not None:
            self._file.close()

    def metrics(self) -> dict[str, float]:
        """``search/cache_errors``: times that the file failed; ``search/replay_misses``. Empty without a file."""
        if self._file is None:
            return {}
        counts = {"search/cache_errors": float(self._errors)}
        return counts | {"search/replay_misses": float(self._misses)} if self._mode == "replay" else counts

    def recall(self, key: str) -> Outcome | None:
        """What memory has for ``key``."""
        with self._lock:
            outcome, entry = self._memory.get(key, (None, None))
            if outcome is None or not self._usable(entry):
                return None
            self._memory.move_to_end(key)
            return outcome

    def look_up(self, key: str) -> Outcome | None:
        """What the file has for ``key``: the same query, else (if asked for) a similar one. In a replay never None."""
        found = self._guarded(lambda file: self._find(file, key)) if self._file is not None else None
        if found is not None or self._mode != "replay":
            return found
        with self._lock:
            self._misses += 1
        message = f"the recording has no results for {key[:200]!r}, and a replay searches nothing"
        return Outcome(error_kind="not_recorded", error=message)

    def settle(self, key: str, outcome: Outcome) -> Outcome:
        """Take in what a search came to; what to answer with. In ``record`` mode that is what was found first."""
        if outcome.error_kind:
            if self._mode == "record":
                self._write(Failure(key, outcome.error_kind, outcome.error))
            return outcome
        entry = Entry(key, self._config.topk, self._clock(), outcome.rows)
        if self._mode == "record":
            wait([self._write(entry)], timeout=3 * BUSY_S)  # a batch may be under way, and has its own wait
            entry = self._guarded(lambda file: file.get(key)) or entry
        return replace(self.remember(entry), cached=False)

    def save(self, key: str, outcome: Outcome) -> None:
        """Have it written to the file, soon: nobody waits for the disk. A recording has it already."""
        if self._file is not None and self._mode == "reuse" and not outcome.error_kind:
            self._write(Entry(key, self._config.topk, self._clock(), outcome.rows))

    def _write(self, item: Entry | Failure) -> "Future[None]":
        """Done when ``item`` is on disk, or the disk has failed."""
        with self._lock:
            self._unwritten.append(item)
        return self._writer.submit(self._write_batch)

    def _write_batch(self) -> None:
        """Write what has come together: one transaction for many, since each must wait for the other processes'."""
        with self._lock:
            batch, self._unwritten = self._unwritten, []
        if batch:
            first = self._mode == "record"
            expired = None if first else self._clock() - self._config.cache_ttl_s
            written = self._guarded(lambda file: file.write(batch, keep_first=first, expired_before=expired))
            if written is None and first:
                with self._lock:
                    self._unwritten[:0] = batch
            time.sleep(_PAUSE_S)

    def remember(self, entry: Entry, fuzzy_for: str = "") -> Outcome:
        """Keep ``entry`` in memory, under its own key or that of the similar query it is to answer."""
        outcome = Outcome(entry.rows[: self._config.topk], cached=True, fuzzy=bool(fuzzy_for))
        with self._lock:
            key = fuzzy_for or entry.key
            self._memory[key] = (outcome, entry)
            self._memory.move_to_end(key)
            if len(self._memory) > self._config.cache_size:
                self._memory.popitem(last=False)
        return outcome

    def _find(self, file: CacheFile, key: str) -> Outcome | None:
        entry = file.get(key)
        if entry is not None and self._usable(entry):
            return self.remember(entry)
        if self._mode == "replay" and (failure := file.get_failure(key)):
            return Outcome(error_kind=failure.kind, error=failure.message)
        threshold = self._config.cache_fuzzy_threshold
        if threshold and (entry := file.similar(key, threshold, lambda near: near.rows and self._usable(near))):
            return self.remember(entry, fuzzy_for=key)
        return None

    def _usable(self, entry: Entry) -> bool:
        if not entry.serves(self._config.topk):
            return False
        lifetime = self._config.cache_ttl_s if entry.rows else self._config.cache_empty_ttl_s
        # An entry from the future, after the clock was set back, would stay too long: it counts as old.
        return self._mode != "reuse" or 0 <= self._clock() - entry.created < lifetime

    def _guarded(self, use: Callable[[CacheFile], T]) -> T | None:
        """``use(file)``; None where the disk fails or failed a moment ago."""
        now = self._clock()
        if self._off_until - OFF_S <= now < self._off_until:
            return None
        try:
            return use(self._file)
        except sqlite3.Error as error:
            with self._lock:
                self._errors += 1
                self._off_until = now + OFF_S
            what = "recording in memory" if self._mode == "record" else "searching without it"
            logger.warning("search cache %s failed (%s); %s for %g s", self._file.path, error, what, OFF_S)
            return None
