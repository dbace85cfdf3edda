"""The search cache's file: one SQLite database in WAL mode that many threads and several processes share.

An entry is (scope, key) -> rows, where a scope names what searched (backend, region, language), a key is a normalised
query. ``token`` is an inverted table over the keys' words, for finding similar queries. Every write is one transaction,
so a process killed in the middle leaves whole entries only; with synchronous=NORMAL a power cut may take the last ones,
never the file. Everything here raises sqlite3.Error when the disk fails; what to do about that is SearchCache's matter.
"""

import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scrl.handler.web_search_agent.local_index import UNSPACED, Row

Kind = Literal["cache", "recording"]

BUSY_S = 5.0  # how long a lock that another process holds is waited for
MAX_TOKENS = 64  # a longer query is a ramble that no other resembles; it is found by its exact key only
MAX_CANDIDATES = 2000  # queries compared with one, at most
_APPLICATION_ID = 0x53435243  # "SCRC", in the file's header: this is a search cache and no other database
_VERSION = 1
_TABLES = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE scope(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE entry(
    id INTEGER PRIMARY KEY, scope INTEGER NOT NULL, key TEXT NOT NULL, topk INTEGER NOT NULL, created REAL NOT NULL,
    rows BLOB NOT NULL, UNIQUE(scope, key));
CREATE INDEX entry_created ON entry(created);
CREATE TABLE token(
    scope INTEGER, token TEXT, size INTEGER, entry INTEGER, PRIMARY KEY(scope, token, size, entry)) WITHOUT ROWID;
CREATE TABLE failure(scope INTEGER, key TEXT, kind TEXT, message TEXT, PRIMARY KEY(scope, key)) WITHOUT ROWID;
"""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Entry:
    """What a search for ``key`` found when ``topk`` results were asked for, at ``created`` (seconds since 1970)."""

    key: str
    topk: int
    created: float
    rows: list[Row]

    def serves(self, topk: int) -> bool:
        """Whether a search for ``topk`` would find nothing beyond ``rows``."""
        return topk <= self.topk or len(self.rows) < self.topk


@dataclass(frozen=True)
class Failure:
    """A search for ``key`` that failed: kind and message of its error. Only recordings have some."""

    key: str
    kind: str
    message: str


def query_tokens(key: str) -> frozenset[str]:
    """The words of a normalised query; of scripts written without spaces, the characters."""
    return frozenset(_WORD.findall(key if key.isascii() else UNSPACED.sub(r" \1 ", key)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Shared tokens over all tokens, in [0, 1]; 0 where there are none."""
    return len(one & other) / max(len(one | other), 1)


class CacheFile:
    """Entries of one scope. Open it in the process that uses it: a connection must not cross a fork.

    ``kind`` is what a writer takes the file for; it is fixed when the file is made, so that a recording is never
    mistaken for a cache, whose old entries go. ``kind=None`` opens for reading only, and then ``scope=None`` means the
    only scope that the file has. ``scopes`` are all of them.

    Raises ValueError, with the remedy, for a file that can't be used: damaged, locked, unwritable, something else.
    """

    def __init__(self, path: Path | str, scope: str | None, kind: Kind | None, busy_s: float = BUSY_S) -> None:
        self.path, self._busy_s = Path(path), busy_s
        self._writing, self._reading = threading.Lock(), threading.Lock()
        connections: list[sqlite3.Connection] = []
        try:
            with _explained(self.path, busy_s):
                if kind is None:
                    self._check_present()
                else:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._writer = _connect(self.path, busy_s)
                    connections.append(self._writer)
                    self._prepare(kind)
                self._reader = _connect(self.path, busy_s)
                connections.append(self._reader)
                self._reader.execute("PRAGMA query_only=ON")
                _check_format(self._reader, self.path)
                self.scopes = tuple(name for (name,) in self._read("SELECT name FROM scope ORDER BY id"))
                self.scope = self._only_scope() if scope is None else scope
                self._scope = self._scope_id(create=kind is not None)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        self._connections = connections

    def close(self) -> None:
        with self._writing, self._reading:
            for connection in self._connections:
                connection.close()

    def get(self, key: str) -> Entry | None:
        row = self._read("SELECT key, topk, created, rows FROM entry WHERE scope=? AND key=?", self._scope, key)
        return _entry(*row[0]) if row else None

    def write(
        self, items: Sequence[Entry | Failure], *, keep_first: bool = False, expired_before: float | None = None
    ) -> int:
        """Write ``items`` in one transaction, entries in the place of older ones of their keys; how many they are.

        ``keep_first``: an entry that is there and serves as many results stays. Entries older than ``expired_before``
        go, two for each that is written, so that a file that is written for months keeps its size, and no write takes
        long.
        """
        with self._transaction() as database:
            for item in items:
                if isinstance(item, Failure):
                    values = (self._scope, item.key, item.kind, _encodable(item.message))
                    database.execute("INSERT OR REPLACE INTO failure VALUES (?, ?, ?, ?)", values)
                else:
                    self._write_entry(database, item, keep_first)
            if expired_before is not None:
                _drop_expired(database, expired_before, 2 * len(items))
        return len(items)

    def _write_entry(self, database: sqlite3.Connection, entry: Entry, keep_first: bool) -> None:
        blob = json.dumps(entry.rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        unless = " WHERE excluded.topk > entry.topk" if keep_first else ""
        ids = database.execute(
            "INSERT INTO entry(scope, key, topk, created, rows) VALUES (?, ?, ?, ?, ?) ON CONFLICT(scope, key) "
            f"DO UPDATE SET topk=excluded.topk, created=excluded.created, rows=excluded.rows{unless} RETURNING id",
            (self._scope, entry.key, entry.topk, entry.created, blob),
        ).fetchall()
        tokens = query_tokens(entry.key)
        if ids and len(tokens) <= MAX_TOKENS:
            # One statement and not one a token: each lets go of the interpreter's lock while the file's is held.
            database.execute(
                "INSERT OR IGNORE INTO token SELECT ?, value, ?, ? FROM json_each(?)",
                (self._scope, len(tokens), ids[0][0], json.dumps(list(tokens))),
            )

    def similar(self, key: str, threshold: float, usable: Callable[[Entry], bool]) -> Entry | None:
        """The usable entry whose query is most like ``key``: Jaccard of the tokens at least ``threshold``.

        Prefix filtering (Bayardo, Ma, Srikant 2007): J(q, e) >= t needs at least t|q| shared tokens, so e has one of
        any |q| - ceil(t|q|) + 1 tokens of q; the rarest are taken. And t|q| <= |e| <= |q|/t. So the work follows the
        rare words' entries, not the file's; beyond MAX_CANDIDATES of them the rest isn't looked at.
        """
        tokens = query_tokens(key)
        if not 0 < len(tokens) <= MAX_TOKENS:
            return None
        least, most = math.ceil(threshold * len(tokens) - 1e-9), math.floor(len(tokens) / threshold + 1e-9)
        rarest = sorted(tokens, key=lambda token: (self._frequency(token), token))[: len(tokens) - least + 1]
        candidates = self._read(
            f"SELECT key FROM entry WHERE id IN (SELECT DISTINCT entry FROM token WHERE scope=? AND token IN "
            f"({', '.join('?' * len(rarest))}) AND size BETWEEN ? AND ? LIMIT {MAX_CANDIDATES})",
            *(self._scope, *rarest, least, most),
        )
        scored = ((jaccard(tokens, query_tokens(other)), other) for (other,) in candidates)
        close = sorted((-score, other) for score, other in scored if score >= threshold - 1e-9)
        for _, other in close:  # the closest first; among equals the order of the alphabet, not of their writing
            entry = self.get(other)
            if entry is not None and usable(entry):
                return entry
        return None

    def get_failure(self, key: str) -> Failure | None:
        """The last recorded one."""
        rows = self._read("SELECT key, kind, message FROM failure WHERE scope=? AND key=?", self._scope, key)
        return Failure(*rows[0]) if rows else None

    def __len__(self) -> int:
        return self._read("SELECT count(*) FROM entry WHERE scope=?", self._scope)[0][0]

    def entries(self) -> Iterator[Entry]:
        """Every entry, oldest row first, read in bites: a file may be larger than memory."""
        last = -1
        while bite := self._read(
            "SELECT id, key, topk, created, rows FROM entry WHERE scope=? AND id>? ORDER BY id LIMIT 500",
            *(self._scope, last),
        ):
            for _, *values in bite:
                yield _entry(*values)
            last = bite[-1][0]

    def _read(self, sql: str, *values: object) -> list[tuple]:
        with self._reading:
            return self._reader.execute(sql, values).fetchall()

    def _frequency(self, token: str) -> int:
        """Entries that have ``token``, counted no further than candidates are looked at."""
        return self._read(
            f"SELECT count(*) FROM (SELECT 1 FROM token WHERE scope=? AND token=? LIMIT {MAX_CANDIDATES})",
            *(self._scope, token),
        )[0][0]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """IMMEDIATE: the write lock is waited for at the beginning, the one place where waiting can't deadlock."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # a full disk has rolled it back already
                    self._writer.execute("ROLLBACK")
                raise

    def _check_present(self) -> None:
        if not self.path.is_file():
            raise ValueError(
                f"search cache {self.path} is not there; check the path, or make it with search.cache_mode=record or "
                "scripts/build_search_cache.py"
            )

    def _prepare(self, kind: Kind) -> None:
        """Make the tables where the file is new; ValueError where it is another kind of file."""
        with self._transaction() as database:
            if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in filter(str.strip, _TABLES.split(";")):
                    database.execute(statement)
                database.execute("INSERT INTO meta VALUES ('kind', ?)", (kind,))
                database.execute(f"PRAGMA application_id={_APPLICATION_ID}")
                database.execute(f"PRAGMA user_version={_VERSION}")
        _check_format(self._writer, self.path)
        found = self._writer.execute("SELECT value FROM meta WHERE name='kind'").fetchone()[0]
        if found != kind:
            use = "search.cache_mode=replay" if found == "recording" else "search.cache_mode=reuse"
            raise ValueError(
                f"search cache {self.path} is a {found}, not a {kind}; use it with {use}, or give another path"
            )
        deadline = time.monotonic() + self._busy_s
        while True:  # two processes that switch to WAL at once get "locked" without any waiting
            try:
                mode = self._writer.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                break
            except sqlite3.OperationalError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)
        if mode != "wal":
            raise ValueError(f"search cache {self.path} lies on a file system without WAL; give a path on a local disk")
        self._writer.execute("PRAGMA synchronous=NORMAL")

    def _only_scope(self) -> str:
        if len(self.scopes) != 1:
            found = f"results of {len(self.scopes)} engines ({', '.join(self.scopes)})" if self.scopes else "no results"
            raise ValueError(
                f"search cache {self.path} holds {found}, and a replay needs those of one; "
                "record into a file of its own"
            )
        return self.scopes[0]

    def _scope_id(self, create: bool) -> int:
        if create:
            with self._transaction() as database:
                database.execute("INSERT OR IGNORE INTO scope(name) VALUES (?)", (self.scope,))
        rows = self._read("SELECT id FROM scope WHERE name=?", self.scope)
        return rows[0][0] if rows else -1


def _connect(path: Path, busy_s: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise ValueError(f"{path} is a database of something else, not a search cache; give another path")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != _VERSION:
        raise ValueError(f"search cache {path} has format {version}, not {_VERSION}; move it away, a new one is made")


def _entry(key: str, topk: int, created: float, blob: bytes) -> Entry:
    """Raises sqlite3.DatabaseError for rows that can't be read: the disk did that, as SQLite would say itself."""
    try:
        return Entry(key, topk, created, json.loads(blob.decode("utf-8", "surrogatepass")))
    except (ValueError, AttributeError) as error:
        raise sqlite3.DatabaseError(f"the rows of {key[:80]!r} are damaged: {error}") from error


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _drop_expired(database: sqlite3.Connection, before: float, count: int) -> None:
    old = database.execute(
        "SELECT id, scope, key FROM entry WHERE created < ? ORDER BY created LIMIT ?", (before, count)
    )
    for entry, scope, key in old.fetchall():
        tokens = query_tokens(key)
        database.execute(
            "DELETE FROM token WHERE scope=? AND size=? AND entry=? AND token IN (SELECT value FROM json_each(?))",
            (scope, len(tokens), entry, json.dumps(list(tokens))),
        )
        database.execute("DELETE FROM entry WHERE id=?", (entry,))


@contextmanager
def _explained(path: Path, busy_s: float) -> Iterator[None]:
    """What goes wrong at opening, as ValueError with a remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"search cache {path} can't be made ({error.strerror}); give a path in a folder that can be written"
        ) from error
    except sqlite3.OperationalError as error:
        busy = "locked" in str(error)
        remedy = (
            f"another program has held it for {busy_s:g} s; end that one, or give another path"
            if busy
            else "check that its folder can be written and has room, or give another path"
        )
        raise ValueError(f"search cache {path} can't be opened ({error}): {remedy}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"search cache {path} is damaged or no cache ({error}); move it away, a new one is made"
        ) from error
