"""Is a search cache, or a recording, worth training on? Holds it against real queries and says so.

    python scripts/check_search_cache.py cache.sqlite --rollouts 'outputs/*/*/rollout/rollout_step_*.json'
    python scripts/check_search_cache.py cache.sqlite --data train.parquet      questions instead, before any rollout

Queries of rollouts are what a policy really asks; a dataset's questions are only a first guess at them. Exit status:
0 if it makes sense, offline or beside a live engine, 2 if not, 1 for an error.
"""

import argparse
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from scrl.handler.cache import normalise_query  # noqa: E402
from scrl.handler.cache_file import CacheFile, Entry, query_tokens  # noqa: E402
from scrl.handler.cache_import import AskedQuery, read_rollouts  # noqa: E402
from verl.utils.dataset import expand_files, read_rows  # noqa: E402
from verl.utils.reward_score.qa import gold_forms, tokenise  # noqa: E402

# What a cache must reach. Below the first, most of an offline run's searches would end in an error; the other three
# bound what a policy is taught wrongly by the results themselves (58 % empty ones once ruined a run of this family).
MIN_COVERAGE = 0.8  # of queries asked, found by the same or a similar query
MAX_EMPTY = 0.1  # of queries found, with no result
MAX_MISMATCH = 0.05  # of results, in another script than the query
MIN_GOLD = 0.5  # of questions with a gold to look for, that a result holds all words of
MIN_QUERIES = 50  # fewer say little
_EAST_ASIAN = {"HIRAGANA", "KATAKANA", "BOPOMOFO", "HANGUL"}


@dataclass
class Findings:
    """Counts over the queries asked (a repeated one counts each time), and over questions."""

    asked: int = 0
    exact: int = 0
    fuzzy: int = 0
    empty: int = 0  # of those found
    mismatched: int = 0  # of those with results, and letters on both sides
    compared: int = 0  # those
    gold_share: dict[str, float] = field(default_factory=dict)  # question -> the most of a gold that a result held

    @property
    def coverage(self) -> float:
        return (self.exact + self.fuzzy) / max(self.asked, 1)

    @property
    def empty_rate(self) -> float:
        return self.empty / max(self.exact + self.fuzzy, 1)

    @property
    def mismatch_rate(self) -> float:
        return self.mismatched / max(self.compared, 1)

    @property
    def gold_rate(self) -> float | None:
        """None where no question had a gold to look for."""
        return sum(share == 1 for share in self.gold_share.values()) / len(self.gold_share) if self.gold_share else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="a file made by search.cache_path or build_search_cache.py")
    parser.add_argument("--rollouts", nargs="+", default=[], metavar="FILE", help="rollout files or globs")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="parquet files or globs")
    parser.add_argument(
        "--fuzzy", type=float, default=0.8, metavar="J", help="search.cache_fuzzy_threshold to try (0.8)"
    )
    parser.add_argument("--scope", default=None, help="which engine's results, where the file has several")
    options = parser.parse_args(arguments)
    dropped: Counter[str] = Counter()
    try:
        if not 0.3 <= options.fuzzy <= 1:
            raise ValueError(f"--fuzzy {options.fuzzy} is out of range; give 0.3 to 1")
        asked = _asked(options.rollouts, options.data, dropped)
        file = _open(options.cache, options.scope)
    except ValueError as error:
        print(f"check_search_cache: {error}", file=sys.stderr)
        return 1
    try:
        findings = examine(file, asked, options.fuzzy)
        return _report(file, findings, options.fuzzy, dropped)
    finally:
        file.close()


def examine(file: CacheFile, asked: Iterable[AskedQuery], fuzzy: float) -> Findings:
    """What ``file`` has for the queries ``asked``, whatever its age."""
    found, known = Findings(), dict[str, tuple[Entry | None, bool]]()
    for query in asked:
        key = normalise_query(query.query)
        if key not in known:
            exact = file.get(key)
            entry = exact or file.similar(key, fuzzy, lambda near: bool(near.rows))
            known[key] = (entry, exact is None)
        entry, by_similarity = known[key]
        found.asked += 1
        held = 0.0
        if entry is not None:
            found.fuzzy += by_similarity
            found.exact += not by_similarity
            found.empty += not entry.rows
            text = "\n".join(value for row in entry.rows for name, value in row.items() if name != "url")
            ours, theirs = script_of(key), script_of(text)
            if ours and theirs:
                found.compared += 1
                found.mismatched += ours != theirs
            held = gold_share(query.ground_truths, text)
        if _words_to_find(query.ground_truths):
            found.gold_share[query.question] = max(found.gold_share.get(query.question, 0.0), held)
    return found


def gold_share(golds: tuple[str, ...], text: str) -> float:
    """The largest share, over the aliases, of an alias's words that ``text`` holds: what PBRS calls the potential."""
    aliases = _words_to_find(golds)
    words = set(tokenise(text)) if aliases else set()
    return max((len(alias & words) / len(alias) for alias in aliases), default=0.0)


@lru_cache(maxsize=4096)
def _words_to_find(golds: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """None for a question of yes or no, which any text would answer."""
    aliases = tuple(form.tokens for form in gold_forms(golds) if form.tokens)
    return () if any(alias in ({"yes"}, {"no"}) for alias in aliases) else aliases


def script_of(text: str) -> str:
    """The script of most words of the first 2,000 characters, as LATIN or CYRILLIC; "" without letters.

    Chinese, Japanese and Korean are one, CJK: each writes some of the others' characters. Of Chinese and Japanese each
    character counts as a word, so a Latin name in a Chinese query doesn't outweigh it.
    """
    counts = Counter(_script(token[0]) for token in query_tokens(text[:2000]) if token[0].isalpha())
    return counts.most_common(1)[0][0] if counts else ""


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if name in _EAST_ASIAN else name


def verdicts(found: Findings) -> tuple[list[str], list[str]]:
    """(what speaks against training offline, what speaks against it beside a live engine); empty: nothing does."""
    live = []
    if found.asked < MIN_QUERIES:
        live.append(f"{found.asked} queries are too few to tell (at least {MIN_QUERIES})")
    if found.exact + found.fuzzy == 0:
        live.append("no query was found")
    if found.empty_rate > MAX_EMPTY:
        live.append(f"{found.empty_rate:.0%} of what was found is empty (at most {MAX_EMPTY:.0%})")
    if found.mismatch_rate > MAX_MISMATCH:
        live.append(f"{found.mismatch_rate:.0%} of results are in another script (at most {MAX_MISMATCH:.0%})")
    offline = list(live)
    if found.coverage < MIN_COVERAGE:
        offline.insert(0, f"only {found.coverage:.0%} of queries were found (at least {MIN_COVERAGE:.0%})")
    if found.gold_rate is not None and found.gold_rate < MIN_GOLD:
        offline.append(f"the results hold a gold for only {found.gold_rate:.0%} of questions (at least {MIN_GOLD:.0%})")
    return offline, live


def _asked(rollouts: Sequence[str], data: Sequence[str], dropped: Counter[str]) -> list[AskedQuery]:
    asked = list(read_rollouts(expand_files(rollouts), dropped)) if rollouts else []
    for path in expand_files(data) if data else ():
        asked += [AskedQuery(row.question, row.question, row.ground_truths) for row in read_rows(path)]
    if not asked:
        raise ValueError("no queries to hold it against; give --rollouts FILES or --data FILES that have some")
    return asked


def _open(path: Path, scope: str | None) -> CacheFile:
    if scope is None:
        file = CacheFile(path, "", None)
        scopes = file.scopes
        file.close()
        if len(scopes) > 1:
            raise ValueError(f"{path} has the results of {len(scopes)} engines; choose by --scope: {', '.join(scopes)}")
    return CacheFile(path, scope, None)


def _report(file: CacheFile, found: Findings, fuzzy: float, dropped: Counter[str]) -> int:
    console = Console()
    entries = empty = 0
    for entry in file.entries():
        entries += 1
        empty += not entry.rows
    table = Table(title=escape(f"{file.path} ({file.scope})"), title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("needed", justify="right")
    table.add_row("queries in the cache", f"{entries:,}", "")
    table.add_row("  without results", f"{empty / max(entries, 1):.1%}", "")
    table.add_row("queries asked", f"{found.asked:,}", f"{MIN_QUERIES}")
    table.add_row("  found, the same", f"{found.exact / found.asked:.1%}", "")
    table.add_row(f"  found, similar (J >= {fuzzy:g})", f"{found.fuzzy / found.asked:.1%}", "")
    table.add_row("  found", f"{found.coverage:.1%}", f"{MIN_COVERAGE:.0%} offline")
    table.add_row("  of these empty", f"{found.empty_rate:.1%}", f"<= {MAX_EMPTY:.0%}")
    table.add_row("  of these in another script", f"{found.mismatch_rate:.1%}", f"<= {MAX_MISMATCH:.0%}")
    golds = "no golds" if found.gold_rate is None else f"{found.gold_rate:.1%} of {len(found.gold_share):,}"
    table.add_row("questions with a gold in results", golds, f"{MIN_GOLD:.0%} offline")
    shares = found.gold_share.values()
    table.add_row("  words of a gold, on average", f"{sum(shares) / len(shares):.1%}" if shares else "", "")
    console.print(table)
    for reason, count in dropped.most_common():
        console.print(f"{count:,} left out: {reason}", highlight=False)
    offline, live = verdicts(found)
    for use, against in (("Offline (search.cache_mode=replay)", offline), ("Beside a live engine (reuse)", live)):
        verdict = f"NO: {'; '.join(against)}" if against else "yes, training on it makes sense"
        console.print(f"{use}: {verdict}", highlight=False, soft_wrap=True, markup=False)
    return 0 if not live else 2


if __name__ == "__main__":
    sys.exit(main())
