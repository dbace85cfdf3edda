"""Fill a search cache before training: with a dataset's questions, the queries of earlier rollouts, a result file.

    python scripts/build_search_cache.py search.cache_path=cache.sqlite search_engine=searxng \\
        data.train_files=[train.parquet] --rollouts 'outputs/*/*/rollout/rollout_step_*.json' \\
        --import search_result.json

Settings are the training's own (key=value, profile=NAME): with the same ones the trainer finds what was searched here.
What the cache has is not searched again, so the same command goes on where it was stopped, be it by kill -9; failed
searches are tried again then. The engine's rate limit holds; where it is slow, lower search.max_workers.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from scrl.handler.cache import normalise_query  # noqa: E402
from scrl.handler.cache_file import CacheFile, Entry  # noqa: E402
from scrl.handler.cache_import import read_results, read_rollouts  # noqa: E402
from scrl.handler.config import HandlerConfig  # noqa: E402
from scrl.handler.handler import SearchHandler  # noqa: E402
from scrl.handler.web_search_agent.search_api import make_backend  # noqa: E402
from scrl.types import ToolCall, ToolResult  # noqa: E402
from verl.trainer.config import Config, load_config  # noqa: E402
from verl.utils.dataset import expand_files, read_rows  # noqa: E402

MAX_FAILURES = 20  # searches that fail in a row: the engine is down or has had enough, and more would not help


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for training; search.cache_path is needed")
    parser.add_argument("--rollouts", nargs="+", default=[], metavar="FILE", help="rollout files or globs")
    parser.add_argument("--import", nargs="+", default=[], metavar="FILE", dest="imports", help="result files")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_intermixed_args(arguments)
    started, counts = time.monotonic(), Counter()
    try:
        settings = load_config(options.settings)
        config = _handler_config(settings)
        dropped: Counter[str] = Counter()
        if options.imports:
            _import(config, options.imports, counts, dropped)
        queries = list(distinct(_queries(settings, options.rollouts, dropped)))
        if not queries and not options.imports:
            raise ValueError("nothing to do; give data.train_files=[...], --rollouts or --import")
        problem = _search_all(config, queries, counts, quiet=options.quiet) if queries else ""
    except ValueError as error:
        print(f"build_search_cache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_search_cache: stopped; what was found is kept, and the same command goes on", file=sys.stderr)
        return 130
    _report(counts, dropped, len(queries), config, time.monotonic() - started)
    if problem:
        print(f"build_search_cache: {problem}", file=sys.stderr)
    return 1 if problem else 0


def distinct(queries: Iterable[str]) -> Iterator[str]:
    """The first of each that the cache holds for the same."""
    seen: set[str] = set()
    for query in queries:
        key = normalise_query(query)
        if key and key not in seen:
            seen.add(key)
            yield query


def _handler_config(settings: Config) -> HandlerConfig:
    if not settings.search.cache_path or settings.search.cache_mode != "reuse":
        raise ValueError(
            f"search.cache_path={settings.search.cache_path!r} with search.cache_mode={settings.search.cache_mode} "
            "can't be filled; give search.cache_path=FILE, and leave the mode at reuse"
        )
    return HandlerConfig.from_config(settings)


def _queries(settings: Config, rollouts: Sequence[str], dropped: Counter[str]) -> Iterator[str]:
    for path in expand_files(settings.data.train_files) if settings.data.train_files else ():
        yield from (row.question for row in read_rows(path))
    if rollouts:
        yield from (asked.query for asked in read_rollouts(expand_files(rollouts), dropped))


def _import(config: HandlerConfig, paths: Sequence[str], counts: Counter[str], dropped: Counter[str]) -> None:
    """Write result files' entries where the cache has none; they are as old as the import."""
    backend = make_backend(config)
    scope = backend.cache_scope
    backend.close()
    file = CacheFile(config.cache_path, scope, "cache")
    try:
        for path in paths:
            for query, rows in read_results(path, dropped):
                key = normalise_query(query)
                if file.get(key) is None:
                    # One more than there are: these were all that there was, however many are asked for.
                    file.write([Entry(key, len(rows) + 1, time.time(), rows)])
                    counts["imported"] += 1
                else:
                    counts["imported before"] += 1
    finally:
        file.close()


def _search_all(config: HandlerConfig, queries: Sequence[str], counts: Counter[str], *, quiet: bool) -> str:
    """Search what the cache lacks, ``max_workers`` at once; why it gave up, or ""."""
    columns = (TextColumn("Searching"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tail = TextColumn("{task.fields[found]} found, {task.fields[empty]} empty, {task.fields[failed]} failed")
    console = Console(stderr=True, quiet=quiet)
    failures, running = 0, set[Future[ToolResult]]()
    remaining = iter(queries)
    with SearchHandler(config) as handler, Progress(*columns, tail, console=console) as bar:
        task = bar.add_task("", total=len(queries), found=0, empty=0, failed=0)
        while True:
            while len(running) < config.max_workers and (query := next(remaining, None)) is not None:
                running.add(handler.submit(ToolCall("web_search", {"query": [query]})))
            if not running:
                return ""
            done, running = wait(running, timeout=2 * config.timeout_s, return_when=FIRST_COMPLETED)
            assert done, "the handler answers by the deadline"
            for result in map(Future.result, done):
                kind = _kind(result)
                counts[kind] += 1
                failures = failures + (kind == "failed") if kind in ("failed", "known") else 0
                bar.update(task, advance=1, **{name: counts[name] for name in ("found", "empty", "failed")})
                if failures >= MAX_FAILURES:
                    return f"{failures} searches in a row failed, the last one: {result.error}; try again later"


def _kind(result: ToolResult) -> str:
    if not result.ok:
        return "failed"
    if result.cached:
        return "known"
    return "found" if result.items[0] else "empty"


def _report(counts: Counter[str], dropped: Counter[str], queries: int, config: HandlerConfig, seconds: float) -> None:
    size = Path(config.cache_path).stat().st_size / 1e6
    print(
        f"{queries:,} queries: {counts['known']:,} known before, {counts['found']:,} found, {counts['empty']:,} empty, "
        f"{counts['failed']:,} failed"
    )
    if counts["imported"] or counts["imported before"]:
        print(f"{counts['imported']:,} imported, {counts['imported before']:,} were there already")
    for reason, count in dropped.most_common():
        print(f"{count:,} dropped: {reason}")
    print(f"{config.cache_path}: {size:,.1f} MB ({seconds:.1f} s)")


if __name__ == "__main__":
    logging.getLogger("verl.trainer.config").setLevel(logging.ERROR)  # its warnings are about training
    sys.exit(main())
