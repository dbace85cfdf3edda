"""A full-text index of a corpus on this machine (tantivy, BM25): from a few pages in memory to millions on disk.

Ranking. Title and text go into one field, the title repeated ``TITLE_WEIGHT`` times: the weighted term frequencies of
BM25F (Robertson, Zaragoza, Taylor 2004), which keeps a query one flat union of terms, the form tantivy prunes best. A
page whose title says exactly the query comes first. Equal scores are ordered as in the corpus.

On disk, ``index_dir/<fingerprint>`` is a finished index: it is built beside under another name, by one process at a
time, and renamed when whole. So whoever sees it may open it, and a build that was killed leaves only litter.
"""

import fcntl
import json
import os
import re
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tantivy

from scrl.handler.web_search_agent.corpus import fingerprint, iter_rows, kind_of
from scrl.llm_agent.prompts import writable

FORMAT_VERSION = f"1-tantivy-{tantivy.__version__}"
TITLE_WEIGHT = 3
MAX_QUERY_CHARS = 10_000
MAX_QUERY_TERMS = 64
_MAX_TITLE_KEY = 500  # characters; a longer title is found by its words only
_TIE_LIMIT = 1024  # equally scored hits looked at, to order them as in the corpus
_DISK_HEAP, _MEMORY_HEAP = 256_000_000, 15_000_000  # bytes; the latter is the least tantivy takes
_MANIFEST = "manifest.json"

Row = dict[str, str]
Corpus = Path | str | Sequence[Path | str]

# Written without spaces between the words: each character becomes a token.
UNSPACED = re.compile("([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")


def _analyzer(*, drop_stop_words: bool) -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(64)).filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    if drop_stop_words:
        builder = builder.filter(tantivy.Filter.stopword("english"))
    return builder.filter(tantivy.Filter.stemmer("english")).build()


_ALL_WORDS = _analyzer(drop_stop_words=False)
_CONTENT_WORDS = _analyzer(drop_stop_words=True)


def content_words(text: str) -> list[str]:
    """The stems of ``text`` without stop words; in scripts without spaces each character is a word."""
    return _CONTENT_WORDS.analyze(_indexable(writable(text)))


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("body", tokenizer_name="body", index_option="freq")
    builder.add_text_field("title_key", tokenizer_name="raw", index_option="basic")
    builder.add_unsigned_field("ordinal", fast=True)
    builder.add_bytes_field("row", stored=True)
    return builder.build()


def _indexable(text: str) -> str:
    """``text`` as the analyzer should see it: compatibility forms folded, unspaced scripts spaced."""
    return text if text.isascii() else UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text))


def _title_key(title: str) -> str:
    """What two titles that say the same have in common; "" for one too long or without a word."""
    return " ".join(_ALL_WORDS.analyze(_indexable(title))) if len(title) <= _MAX_TITLE_KEY else ""


def _write(index: tantivy.Index, rows: Iterable[Row], heap_size: int) -> int:
    """Add ``rows`` in order and commit; the number of rows. OSError where the index can't be written.

    One thread, so that rows are numbered and stored in the corpus' order.
    """
    writer = index.writer(heap_size=heap_size, num_threads=1)
    count = 0
    try:
        for row in rows:
            title, url, text = writable(row["title"]), writable(row["url"]), writable(row["text"])
            document = tantivy.Document()
            document.add_text("body", _indexable("\n".join([title] * TITLE_WEIGHT + [text])))
            document.add_text("title_key", _title_key(title))
            document.add_unsigned("ordinal", count)
            document.add_bytes("row", json.dumps([title, url, text], ensure_ascii=False).encode())
            with _write_errors():
                writer.add_document(document)
            count += 1
        with _write_errors():
            writer.commit()
    finally:
        # Also after an error in ``rows``: the writer's threads must have ended before the folder is removed.
        with _write_errors():
            writer.wait_merging_threads()
    return count


@contextmanager
def _write_errors() -> Iterator[None]:
    """tantivy reports a full disk as ValueError, as it does a wrong argument; here only the disk can be at fault."""
    try:
        yield
    except ValueError as error:
        raise OSError(str(error)) from error


class LocalIndex:
    """Search over an index. Threads may share one."""

    def __init__(self, index: tantivy.Index) -> None:
        index.register_tokenizer("body", _ALL_WORDS)
        # "manual": a finished index never changes, so no thread needs to watch its files.
        index.config_reader("manual")
        index.reload()
        self._schema = index.schema
        self._searcher = index.searcher()

    @classmethod
    def in_memory(cls, rows: Iterable[Row]) -> "LocalIndex":
        """An index of ``rows`` ({title, url, text}) that lives as long as the object."""
        index = tantivy.Index(_schema())
        index.register_tokenizer("body", _ALL_WORDS)
        _write(index, rows, _MEMORY_HEAP)
        return cls(index)

    @classmethod
    def open(cls, corpus: Corpus, index_dir: Path | str, progress: bool = True) -> "LocalIndex":
        """The index of ``corpus``, built under ``index_dir`` first where it isn't there yet. See ``build_index``."""
        folder = build_index(corpus, index_dir, progress)
        try:
            return cls(tantivy.Index.open(str(folder)))
        except ValueError as error:
            raise ValueError(f"index {folder} is damaged ({error}); delete that folder, it is built anew") from error

    def __len__(self) -> int:
        return self._searcher.num_docs

    def search(self, query: str, topk: int = 3) -> list[Row]:
        """The ``topk`` best rows {title, url, text}, best first; fewer where fewer share a word with ``query``.

        ``query`` is any text: there is no syntax, so nothing in it can be wrong. Its first 10,000 characters and 64
        different words count. Raises ValueError only for topk < 1.
        """
        if topk < 1:
            raise ValueError(f"topk={topk} asks for no result; give 1 or more")
        text = _indexable(writable(query[:MAX_QUERY_CHARS]))
        words = list(dict.fromkeys(_CONTENT_WORDS.analyze(text) or _ALL_WORDS.analyze(text)))[:MAX_QUERY_TERMS]
        if not words:
            return []
        key = _title_key(text.strip())
        hits = self._hits([self._term("title_key", key, "basic")], topk) if key else []
        if len(hits) < topk:
            ranked = self._hits([self._term("body", word, "freq") for word in words], topk + len(hits))
            seen = {ordinal for ordinal, _ in hits}
            hits += [hit for hit in ranked if hit[0] not in seen]
        return [self._row(address) for _, address in hits[:topk]]

    def _term(self, field: str, value: str, option: str) -> tantivy.Query:
        return tantivy.Query.term_query(self._schema, field, value, index_option=option)

    def _hits(self, terms: list[tantivy.Query], topk: int) -> list[tuple[int, tantivy.DocAddress]]:
        """The best ``topk`` as (ordinal, address).

        Among equal scores tantivy's order follows its segments, which differ from build to build. So the search is
        widened until the tie at the cut is whole, and ties are ordered by ordinal. Scores are float32 sums whose last
        bits depend on the order of the terms; hence the rounding.
        """
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        limit = topk + 1
        while True:
            found = self._searcher.search(query, limit=limit, count=False).hits
            scored = [(round(score, 3), address) for score, address in found]
            if len(scored) < limit or scored[-1][0] < scored[topk - 1][0] or limit >= _TIE_LIMIT:
                break
            limit *= 8
        ordinals = self._searcher.fast_field_values("ordinal", [address for _, address in scored]) if scored else []
        ranked = sorted(zip(scored, ordinals, strict=True), key=lambda item: (-item[0][0], item[1]))
        return [(int(ordinal), address) for (_, address), ordinal in ranked[:topk]]

    def _row(self, address: tantivy.DocAddress) -> Row:
        title, url, text = json.loads(bytes(self._searcher.doc(address).get_first("row")))
        return {"title": title, "url": url, "text": text}


def build_index(corpus: Corpus, index_dir: Path | str, progress: bool = True, *, timeout_s: float = 6 * 3600.0) -> Path:
    """Make sure that the index of ``corpus`` (one file or several) exists under ``index_dir``; its folder.

    An index that is there and fits the corpus and the format is left as it is. Where another process is building, this
    one waits, ``timeout_s`` at most. Raises ValueError for a corpus that is missing, empty or malformed, a folder that
    can't be written, and that deadline.
    """
    paths = [Path(item).resolve() for item in ([corpus] if isinstance(corpus, str | Path) else corpus)]
    if not paths:
        raise ValueError("the list of corpus files is empty; give at least one")
    for path in paths:
        kind_of(path)
    root = Path(index_dir)
    target = root / fingerprint(paths, FORMAT_VERSION)
    if (target / _MANIFEST).is_file():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / ".lock", timeout_s):
            if not (target / _MANIFEST).is_file():
                _build(paths, root, target, progress)
    except OSError as error:
        raise ValueError(f"index folder {root} can't be written ({error}); give another one or make room") from error
    return target


def _build(paths: list[Path], root: Path, target: Path, progress: bool) -> None:
    for litter in root.glob("*.building"):  # we hold the lock, so whoever made it is dead
        shutil.rmtree(litter)
    beside = target.with_suffix(".building")
    beside.mkdir()
    try:
        index = tantivy.Index(_schema(), path=str(beside), reuse=False)
        index.register_tokenizer("body", _ALL_WORDS)
        with _progress(paths, progress) as advance:
            count = _write(index, _advancing(paths, advance), _DISK_HEAP)
        if not count:
            raise ValueError(f"corpus {', '.join(map(str, paths))} has no rows; give a file that has some")
        manifest = {"rows": count, "corpus": [str(path) for path in paths], "format": FORMAT_VERSION}
        (beside / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(target, ignore_errors=True)  # one without a manifest: someone took files out of it
        os.replace(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _remove_outdated(root, target, manifest["corpus"])


def _remove_outdated(root: Path, target: Path, corpus: list[str]) -> None:
    """Remove earlier indexes of the same files. Whoever has one open keeps its mapped files until it ends."""
    for manifest in root.glob(f"*/{_MANIFEST}"):
        if manifest.parent != target and _corpus_of(manifest) == corpus:
            shutil.rmtree(manifest.parent, ignore_errors=True)


def _corpus_of(manifest: Path) -> list[str] | None:
    """None for one that is damaged, or somebody else's."""
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))["corpus"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _advancing(paths: list[Path], advance: Callable[[int, int], None]) -> Iterator[Row]:
    count = read = 0
    for count, (row, read) in enumerate(iter_rows(paths), start=1):
        if count % 256 == 0:
            advance(read, count)
        yield row
    advance(read, count)


@contextmanager
def _progress(paths: list[Path], show: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar over the corpus' bytes, on stderr; ``advance(bytes read, pages)``."""
    if not show:
        yield lambda read, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), "{task.percentage:>3.0f}%")
    bar = Progress(
        *columns, TextColumn("{task.fields[pages]:,} pages"), TimeRemainingColumn(), console=Console(stderr=True)
    )
    total = sum(path.stat().st_size for path in paths)
    with bar:
        task = bar.add_task(f"Indexing {paths[0].name}", total=total, pages=0)
        yield lambda read, count: bar.update(task, completed=read, pages=count)


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. The kernel drops it with its process, so a lock is never stale."""
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ValueError(
                        f"another process has been building in {path.parent} for {timeout_s:.0f} s; "
                        "wait for it, or give another index folder"
                    ) from None
                time.sleep(0.05)
        yield
