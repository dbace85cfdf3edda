"""The local index beside bm25s on the same generated passages: time to build, queries a second, p50 and p99.

    python scripts/bench/local_index.py [--passages 1000000] [--queries 500] [--topk 3] [--json FILE]

Passages are 60 to 120 words, drawn from 200,000 words by Zipf's law, with a title of two to four. One query in five is
a passage's title; the others are four of a passage's words, each the rarer of two draws. Queries come one by one, as a
policy sends them. The local index gives whole rows from disk; bm25s keeps all in memory and gives row numbers, and its
tokenizer runs without a stemmer. "found" is the share of queries whose own passage is among the results.

Needs bm25s (pip install -r requirements-test.txt), and about 6 GB of memory for a million passages, most of it bm25s'.
"""

import argparse
import functools
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scrl.handler.web_search_agent.local_index import LocalIndex, Row  # noqa: E402

VOCABULARY = 200_000
CHUNK = 10_000  # passages drawn at once


@dataclass
class Measured:
    engine: str
    build_s: float
    queries_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float  # processor time a query, which other processes on the machine don't change
    found: float  # share of queries whose own passage came back
    peak_gb: float  # resident memory of the process by then


@functools.cache
def vocabulary(seed: int) -> np.ndarray:
    """Different words of two to four syllables, the frequent ones short."""
    rng = random.Random(seed)
    syllables = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        length = 2 if len(words) < 20_000 else 3 if len(words) < 120_000 else 4
        words["".join(rng.choices(syllables, k=length))] = None
    return np.array(list(words), dtype=object)


def passages(count: int, seed: int) -> Iterator[Row]:
    """``count`` rows, the same for the same seed, whatever the count."""
    words, generator = vocabulary(seed), np.random.default_rng(seed)
    cumulative = np.cumsum(1.0 / np.arange(1, VOCABULARY + 1))
    cumulative /= cumulative[-1]
    for start in range(0, count, CHUNK):
        lengths = generator.integers(60, 121, CHUNK)
        drawn = words[np.searchsorted(cumulative, generator.random(int(lengths.sum())))]
        title_lengths = generator.integers(2, 5, CHUNK)
        titles = words[generator.integers(0, VOCABULARY, int(title_lengths.sum()))]
        text_ends, title_ends = np.cumsum(lengths), np.cumsum(title_lengths)
        for i in range(min(CHUNK, count - start)):
            yield {
                "title": " ".join(titles[title_ends[i] - title_lengths[i] : title_ends[i]]),
                "url": f"passage/{start + i}",
                "text": " ".join(drawn[text_ends[i] - lengths[i] : text_ends[i]]),
            }


def draw_queries(rows: Sequence[Row], count: int, seed: int) -> list[tuple[str, str]]:
    """(query, url of its passage); the rarer of two words is the longer one, as in any language."""
    rng = random.Random(seed)
    queries = []
    for i in range(count):
        row = rng.choice(rows)
        words = row["text"].split()
        picked = [max(rng.sample(words, 2), key=len) for _ in range(4)]
        queries.append((row["title"] if i % 5 == 0 else " ".join(picked), row["url"]))
    return queries


def measure(
    engine: str, build: Callable[[], Callable[[str], list[str]]], queries: Sequence[tuple[str, str]]
) -> Measured:
    """``build`` makes a function from a query to the URLs of its results."""
    started = time.perf_counter()
    search = build()
    build_s = time.perf_counter() - started
    for query, _ in queries[:20]:  # the first ones read the index from disk
        search(query)
    seconds, found, cpu = [], 0, time.process_time()
    for query, url in queries:
        started = time.perf_counter()
        urls = search(query)
        seconds.append(time.perf_counter() - started)
        found += url in urls
    cpu_ms = (time.process_time() - cpu) / len(queries) * 1e3
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Measured(engine, build_s, len(seconds) / sum(seconds), p50, p99, cpu_ms, found / len(queries), peak)


def local(corpus: Path, topk: int) -> Callable[[str], list[str]]:
    index = LocalIndex.open(corpus, corpus.parent / "index", progress=sys.stderr.isatty())
    return lambda query: [row["url"] for row in index.search(query, topk)]


def bm25s_of(rows: Sequence[Row], topk: int) -> Callable[[str], list[str]]:
    import bm25s

    quiet = {"show_progress": False}
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize([f"{row['title']} {row['text']}" for row in rows], stopwords="en", **quiet), **quiet)

    def search(query: str) -> list[str]:
        tokens = bm25s.tokenize([query], stopwords="en", return_ids=False, **quiet)
        numbers, _ = retriever.retrieve(tokens, k=topk, **quiet)
        return [f"passage/{number}" for number in numbers[0]]

    return search


def show(results: Sequence[Measured], passages_count: int, queries: int) -> None:
    table = Table(title=f"{passages_count:,} passages, {queries:,} queries one by one")
    for column in ("engine", "build s", "queries/s", "p50 ms", "p99 ms", "CPU ms", "found", "peak GB"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for r in results:
        numbers = (
            f"{r.build_s:.1f}",
            f"{r.queries_per_s:,.0f}",
            f"{r.p50_ms:.2f}",
            f"{r.p99_ms:.2f}",
            f"{r.cpu_ms:.2f}",
            f"{r.found:.0%}",
        )
        table.add_row(r.engine, *numbers, f"{r.peak_gb:.1f}")
    Console().print(table)
    ratio = results[0].queries_per_s / results[1].queries_per_s
    print(
        f"local index / bm25s: {ratio:.2f}x the queries a second, {results[0].p99_ms / results[1].p99_ms:.2f}x the p99"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if min(options.passages, options.queries, options.topk) < 1:
        parser.error("--passages, --queries and --topk must be 1 or more")
    try:
        import bm25s
    except ImportError:
        parser.error("bm25s is missing; pip install bm25s==0.3.16")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "passages.jsonl"
        with corpus.open("w") as file:
            for row in passages(options.passages, options.seed):
                file.write(json.dumps(row) + "\n")
        # The local index first: what it holds in memory isn't hidden behind what bm25s needs.
        with corpus.open() as file:
            sample = [json.loads(line) for i, line in enumerate(file) if i % max(options.passages // 5000, 1) == 0]
        queries = draw_queries(sample, options.queries, options.seed)
        results = [measure(f"local (tantivy {version('tantivy')})", lambda: local(corpus, options.topk), queries)]
        rows = list(passages(options.passages, options.seed))
        results.append(measure(f"bm25s {bm25s.__version__}", lambda: bm25s_of(rows, options.topk), queries))
    show(results, options.passages, options.queries)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
