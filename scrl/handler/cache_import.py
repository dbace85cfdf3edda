"""What can fill or test a search cache: the family's result files, and the queries that rollout files hold.

Result files of this family come in many shapes, none of them written down. Read here: a JSON object query -> results
(DeepResearcher's ``search_result.json``), and a list or JSON lines of {query, results}. Results are a list, or an
object with that list under one of the usual names; a result is an object with the usual fields, or a text.
Whatever has no query, or no result with a word in it, is dropped and counted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scrl.handler.web_search_agent.local_index import Row

_QUERY = ("query", "question", "search_query", "q")
_RESULTS = ("results", "result", "organic", "web_page_info_list", "items", "data", "documents")
_FIELDS = {
    "title": ("title", "name"),
    "url": ("url", "link", "href"),
    "text": ("text", "snippet", "content", "contents", "body", "description", "quick_summary", "summary"),
}
_DEPTH = 3  # objects that may stand around a list of results


@dataclass(frozen=True)
class AskedQuery:
    """A query that a policy made, the question it was made for, and that question's golds."""

    query: str
    question: str
    ground_truths: tuple[str, ...]


def read_results(path: Path | str, dropped: Counter[str]) -> Iterator[tuple[str, list[Row]]]:
    """(query, rows) of a result file, read as a stream; ``dropped`` counts by reason what wasn't given out.

    A file that ends or breaks in the middle gives what stands before, and ``dropped`` the reason. ValueError for one
    that can't be opened or isn't JSON at all.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            pairs = _lines(file, dropped) if path.suffix == ".jsonl" else _document(file, path, dropped)
            for query, results in pairs:
                rows = [row for result in _list_of(results) if (row := _row(result))]
                if not isinstance(query, str) or not query.strip():
                    dropped["no query"] += 1
                elif not rows:
                    dropped["no results"] += 1
                else:
                    yield query, rows
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}); check the path") from error


def read_rollouts(paths: Iterable[Path | str], dropped: Counter[str]) -> Iterator[AskedQuery]:
    """Every query in rollout files (``rollout/rollout_step_*.json``), a file at a time; unreadable ones are counted."""
    for path in paths:
        try:
            rows = json.loads(Path(path).read_bytes())
        except (OSError, ValueError):
            dropped["unreadable file"] += 1
            continue
        for row in rows if isinstance(rows, list) else ():
            try:
                golds = tuple(map(str, row["ground_truths"]))
                for turn in row["turns"]:
                    yield from (AskedQuery(str(query), str(row["question"]), golds) for query in turn["queries"])
            except (KeyError, TypeError):
                dropped["row in another format"] += 1


def _document(file: BinaryIO, path: Path, dropped: Counter[str]) -> Iterator[tuple[Any, Any]]:
    import ijson

    first = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first not in (b"{", b"["):
        raise ValueError(f"{path} is no JSON object or list; give a file of query -> results")
    file.seek(3 if file.seek(0) == 0 and file.read(3) == b"\xef\xbb\xbf" else 0)
    try:
        if first == b"{":
            yield from ijson.kvitems(file, "", use_float=True)
        else:
            yield from map(_pair, ijson.items(file, "item", use_float=True))
    except ijson.JSONError:
        dropped["what stands after a break in the file"] += 1


def _lines(file: BinaryIO, dropped: Counter[str]) -> Iterator[tuple[Any, Any]]:
    for line in filter(bytes.strip, file):
        try:
            yield _pair(json.loads(line))
        except ValueError:
            dropped["line that is no JSON"] += 1


def _pair(item: Any) -> tuple[Any, Any]:
    return (_first(item, _QUERY), item) if isinstance(item, dict) else (None, None)


def _list_of(results: Any) -> list[Any]:
    """The list of results in ``results``, however it is wrapped."""
    for _ in range(_DEPTH):
        if not isinstance(results, dict):
            break
        results = next((results[name] for name in _RESULTS if results.get(name)), None)
    return results if isinstance(results, list) else []


def _row(result: Any) -> Row | None:
    if isinstance(result, str):
        result = {"text": result}
    if isinstance(result, dict) and isinstance(result.get("document"), dict):  # Search-R1's server: {document, score}
        result = result["document"]
    if not isinstance(result, dict):
        return None
    row = {name: _first(result, names) or "" for name, names in _FIELDS.items()}
    if not row["title"] and isinstance(result.get("contents"), str):  # Search-R1's corpus: "title"\ntext
        title, _, text = result["contents"].partition("\n")
        row |= {"title": title.strip('" '), "text": text} if text else {}
    return row if any(map(str.isalnum, row["title"] + row["text"])) else None


def _first(item: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((item[name] for name in names if isinstance(item.get(name), str) and item[name].strip()), None)
