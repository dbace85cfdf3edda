"""The search cache's file: what it finds, what it refuses, and many processes that write, or are killed at it."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from scrl.handler.cache_file import CacheFile, Entry, jaccard, query_tokens

ROOT = Path(__file__).resolve().parents[4]


def python(code: str, *arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def test_jaccard_by_hand():
    assert query_tokens("who wrote the red harbour?") == {"who", "wrote", "the", "red", "harbour"}
    assert query_tokens("红港 1984") == {"红", "港", "1984"}
    assert jaccard(frozenset("abcd"), frozenset("abce")) == 3 / 5 and jaccard(frozenset(), frozenset()) == 0


def test_similar_finds_what_comparing_with_every_query_finds(tmp_path):
    draw = random.Random(0)
    words = [f"w{i}" for i in range(30)]
    keys = sorted({" ".join(draw.sample(words, draw.randint(1, 8))) for _ in range(400)})
    file = CacheFile(tmp_path / "c.sqlite", "s", "cache")
    for key in keys[::2]:
        file.write([Entry(key, 3, 0.0, [{"title": key, "url": "", "text": ""}])])
    found = 0
    for threshold in (0.3, 0.5, 0.75, 1.0):
        for key in keys[1::16]:
            tokens = query_tokens(key)
            best = max((jaccard(tokens, query_tokens(other)) for other in keys[::2]), default=0.0)
            entry = file.similar(key, threshold, lambda _: True)
            assert (entry is not None) == (best >= threshold)
            if entry is not None:
                assert jaccard(tokens, query_tokens(entry.key)) == best
                found += 1
    assert 20 < found < 100
    file.close()


def test_a_recording_is_no_cache_and_a_cache_no_recording(tmp_path):
    CacheFile(tmp_path / "r.sqlite", "s", "recording").close()
    CacheFile(tmp_path / "c.sqlite", "s", "cache").close()
    with pytest.raises(ValueError, match="is a recording, not a cache; use it with search.cache_mode=replay"):
        CacheFile(tmp_path / "r.sqlite", "s", "cache")
    with pytest.raises(ValueError, match="is a cache, not a recording"):
        CacheFile(tmp_path / "c.sqlite", "s", "recording")
    with pytest.raises(ValueError, match="is not there; check the path"):
        CacheFile(tmp_path / "none.sqlite", None, None)
    CacheFile(tmp_path / "c.sqlite", "another", "cache").close()
    with pytest.raises(ValueError, match="holds results of 2 engines .*, and a replay needs those of one"):
        CacheFile(tmp_path / "c.sqlite", None, None)


# When it fails.


def test_what_cannot_be_opened_is_one_clear_error(tmp_path):
    (tmp_path / "text").write_text("not a database " * 100)
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t(x)").connection.close()
    for path, says in (
        ("text", "is damaged or no cache"),
        ("other.sqlite", "is a database of something else"),
        ("text/c.sqlite", "can't be made"),
        (".", "can't be opened"),
    ):
        with pytest.raises(ValueError, match=says):
            CacheFile(tmp_path / path, "s", "cache")
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        assert other.execute("PRAGMA journal_mode").fetchone()[0] == "delete"  # left as it was
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ValueError, match="another program has held it for 0.1 s"):
            CacheFile(tmp_path / "other.sqlite", "s", "cache", busy_s=0.1)
    other.close()


def test_damaged_rows_are_an_error_of_the_disk(tmp_path):
    file = CacheFile(tmp_path / "c.sqlite", "s", "cache")
    file.write([Entry("a", 3, 0.0, [])])
    file._writer.execute("UPDATE entry SET rows=x'5b7b'")
    with pytest.raises(sqlite3.DatabaseError, match="the rows of 'a' are damaged"):
        file.get("a")
    file.close()


FULL_DISK = """
import resource, sys
from scrl.handler.cache import Outcome, SearchCache
from scrl.handler.config import HandlerConfig
cache = SearchCache(HandlerConfig(cache_path=sys.argv[1], cache_size=0), "s")
rows = [{"title": "t", "url": "u", "text": "x" * 5000}]
cache.save("before", Outcome(rows))
cache._writer.submit(int).result()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))  # the kernel refuses to write beyond
for i in range(100):
    cache.save(f"q{i}", Outcome(rows))
    cache._writer.submit(int).result()
print(cache.metrics()["search/cache_errors"], cache.look_up("before"), flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
cache._off_until = 0.0
cache.save("after", Outcome(rows))
cache._writer.submit(int).result()
print(cache.look_up("after") is not None)
"""


def test_a_full_disk_is_counted_and_survived(tmp_path):
    done = python(FULL_DISK, tmp_path / "c.sqlite", stderr=subprocess.PIPE)
    out, err = done.communicate(timeout=60)
    assert out.split() == ["1.0", "None", "True"], err
    assert "searching without it for 30 s" in err


# Many at once, and killed.

WRITER = """
import sys, threading
from scrl.handler.cache import Outcome, SearchCache
from scrl.handler.config import HandlerConfig
path, name, threads, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
cache = SearchCache(HandlerConfig(cache_path=path, cache_mode="record", cache_size=0), "s")
lock = threading.Lock()
def write(thread):
    for i in range(count):
        key = f"{name} {thread} {i}"
        cache.settle(key, Outcome([{"title": key, "url": "", "text": "x" * 500}]))  # returns when it is on disk
        with lock:
            print(key, flush=True)
workers = [threading.Thread(target=write, args=(t,)) for t in range(threads)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
cache.close()
"""


def test_two_processes_of_sixteen_threads_write_at_once(tmp_path):
    writers = [python(WRITER, tmp_path / "c.sqlite", name, 16, 20) for name in ("one", "two")]
    said = [writer.communicate(timeout=120)[0].splitlines() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    file = CacheFile(tmp_path / "c.sqlite", "s", "recording")
    assert len(said[0]) == len(said[1]) == 320
    assert {entry.key: entry.rows[0]["title"] for entry in file.entries()} == {key: key for key in said[0] + said[1]}
    assert len(file) == 640
    file.close()


def test_killed_ten_times_while_writing_it_has_every_row_that_was_written(tmp_path):
    path, written = tmp_path / "c.sqlite", set()
    for round_ in range(10):
        writer = python(WRITER, path, f"round{round_}", 3, 100_000)
        for _ in range(10 + 7 * round_):
            written.add(writer.stdout.readline().strip())
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read()
        writer.stdout.close()
        assert writer.wait(timeout=60) == -signal.SIGKILL
        written |= set(rest[: rest.rfind("\n") + 1].splitlines())
        file = CacheFile(path, "s", "recording")
        assert all((entry := file.get(key)) is not None and entry.rows[0]["title"] == key for key in written)
        assert len(written) <= len(file) <= len(written) + 3 * (round_ + 1)  # each thread may have been about to say so
        assert file._reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        file.close()
    assert len(written) >= sum(10 + 7 * round_ for round_ in range(10))


OPENER = """
import sys
from scrl.handler.cache_file import CacheFile
sys.stdin.read(1)
CacheFile(sys.argv[1], sys.argv[2], "cache").close()
"""


def test_processes_that_open_a_new_file_at_once(tmp_path):
    openers = [python(OPENER, tmp_path / "c.sqlite", name, stdin=subprocess.PIPE) for name in "abcd"]
    for opener in openers:
        opener.stdin.write("x")
        opener.stdin.flush()
    assert [opener.wait(timeout=60) for opener in openers] == [0] * 4
    for opener in openers:
        opener.communicate()
