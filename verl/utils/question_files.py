"""Questions and answers as people keep them (JSON, JSONL, CSV, parquet) to rows in the DeepResearcher format.

What can't be read or used comes back with its place and a reason, so that one bad line costs only itself.
"""

import ast
import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.reward_score.qa import ANSWER_SPLIT, split_golds

# Columns that usual data sets have, the most telling first (Search-R1's prompt holds instructions beside the question).
QUESTION = ("question", "query", "problem", "input", "prompt", "instruction")
ANSWER = (
    *("golden_answers", "ground_truths", "ground_truth", "answers", "answer", "targets", "target", "possible_answers"),
    *("reward_model.ground_truth", "reward_model", "label", "output"),
)
ALIASES = ("answer_aliases", "aliases")  # beside the answer
SOURCE = ("data_source", "source", "dataset")
KEY = ("extra_info.index", "id", "_id", "qid", "question_id", "index")
_INSIDE = ("value", "target", "text", "ground_truth", "answer", "aliases")  # of an answer that is an object

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
        "extra_info": pa.struct({"index": pa.string(), "split": pa.string()}),
    }
)


@dataclass(frozen=True)
class Record:
    """One row of a file. ``problem``: why it can't be read."""

    place: str
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Columns:
    """Where a row's question, answer and source stand (``a.b`` is b within a); None: guess."""

    question: str | None = None
    answer: str | None = None
    source: str | None = None  # or, where no row has such a column, the name of them all


@dataclass(frozen=True)
class QA:
    """A question that can be trained on. ``key``: the row's own id, or ""."""

    question: str
    golds: list[str]
    source: str
    key: str


# ------------------------------------------------------------------------------------------------------------- reading
def read_records(path: Path) -> Iterator[Record]:
    """The rows of one file, streamed. Raises ValueError for a file that is none of these, or is broken as a whole."""
    kind = path.suffix.lower()
    reader = READERS.get(kind)
    if reader is None:
        raise ValueError(f"{path}: {kind or 'no ending'} is none of {', '.join(READERS)}; rename or convert it")
    try:
        yield from reader(path)
    except (OSError, pa.ArrowException, ijson.JSONError, UnicodeError) as error:
        raise ValueError(f"{path} can't be read as {kind[1:]}: {str(error).strip().splitlines()[0]}") from error


def _open_text(path: Path) -> TextIO:
    """UTF-8, or UTF-16 where its mark says so. Bytes that are neither stay, as halves of characters, in their row."""
    with path.open("rb") as file:
        mark = file.read(2)
    encoding = "utf-16" if mark in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return path.open(encoding=encoding, errors="surrogateescape", newline="")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse(line, f"{path.name}, line {number}")


def _parse(text: str, place: str) -> Record:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Record(place, problem=f"no JSON ({error})")
    if not isinstance(values, dict):
        return Record(place, problem=f"a JSON {type(values).__name__}, not an object")
    return Record(place, values)


def _read_json(path: Path) -> Iterator[Record]:
    """A list of objects, read as a stream; an object that holds one such list; or JSONL under another name."""
    with _open_text(path) as file:
        first = next((character for character in iter(lambda: file.read(1), "") if not character.isspace()), "")
    if first == "[":
        with path.open("rb") as raw:
            raw.seek(3 if raw.read(3) == b"\xef\xbb\xbf" else 0)
            for number, values in enumerate(ijson.items(raw, "item", use_float=True), start=1):
                place = f"{path.name}, item {number}"
                is_object = isinstance(values, dict)
                yield Record(place, values) if is_object else Record(place, problem="not an object")
        return
    with _open_text(path) as file:
        text = file.read()
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _read_jsonl(path)
        return
    lists = [values for values in whole.values() if isinstance(values, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        yield from [_parse(text, f"{path.name}, line 1")]
        return
    for number, values in enumerate(lists[0], start=1):
        yield Record(f"{path.name}, item {number}", values if isinstance(values, dict) else {})


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        head = file.readline()
        delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t|", key=head.count)
        file.seek(0)
        # Strict: a quote that nothing closes would take the rest of the file for one answer.
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            place = f"{path.name}, line {reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield Record(place, problem=f"broken quotes ({error})")
                continue
            if cells is None:
                return
            if not cells:
                continue
            if names is None:
                names = [name.strip() for name in cells]
            elif len(cells) != len(names):
                yield Record(place, problem=f"{len(cells)} cells under {len(names)} columns")
            else:
                yield Record(place, dict(zip(names, cells, strict=True)))


def _read_parquet(path: Path) -> Iterator[Record]:
    number = itertools.count(1)
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                yield Record(f"{path.name}, row {next(number)}", values)


READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


# ---------------------------------------------------------------------------------------------------------- converting
def to_qa(values: dict[str, Any], columns: Columns, default_source: str) -> QA:
    """Raises ValueError, a few words, for what is missing or can't be used."""
    question = _text_of(_find(values, columns.question, QUESTION))
    if not question:
        raise ValueError(_missing("question", columns.question, values, QUESTION))
    golds = aliases(_find(values, columns.answer, ANSWER))
    if columns.answer is None:
        golds += [alias for name in ALIASES for alias in aliases(_get(values, name))]
    golds = list(dict.fromkeys(golds))
    if not golds:
        raise ValueError(_missing("answer", columns.answer, values, ANSWER))
    source = _find(values, columns.source, SOURCE)
    source = str(source).strip() if isinstance(source, str | int) else ""
    key = _find(values, None, KEY)
    qa = QA(question, golds, source or default_source, str(key) if isinstance(key, str | int) else "")
    try:
        "".join([qa.question, *qa.golds, qa.source, qa.key]).encode()
    except UnicodeEncodeError:
        raise ValueError("bytes that are not UTF-8; try iconv -f GB18030 -t UTF-8 on the file") from None
    return qa


def aliases(value: Any) -> list[str]:
    """Every gold in an answer of any usual form: text (also joined, or a list printed as text), number, list, object.

    Raises ValueError for a list that NumPy printed, whose ends can't be told.
    """
    if isinstance(value, str):
        return _listed(value) or split_golds(value)
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, float):
        if not math.isfinite(value):
            return []
        return [str(int(value)) if value.is_integer() else str(value)]
    if isinstance(value, list | tuple):
        return [gold for item in value for gold in aliases(item)]
    if isinstance(value, dict):
        return [gold for name in _INSIDE if name in value for gold in aliases(value[name])]
    return [] if value is None else [str(value)]


def _listed(text: str) -> list[str]:
    """The strings of a list that was printed into a cell; [] for any other text, such as the interval [0, 1]."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return []
    if re.search(r"""(['"])\s+\1""", text):
        raise ValueError("a list without commas, as NumPy prints it; write it as JSON")
    for parse in (json.loads, ast.literal_eval):
        try:
            items = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return aliases(items) if isinstance(items, list) and all(isinstance(item, str) for item in items) else []
    return []


def to_row(qa: QA, index: str, split: str) -> dict[str, Any]:
    """As ``RLHFDataset`` reads it."""
    return {
        "data_source": qa.source,
        "prompt": [{"content": qa.question, "role": "user"}],
        "ability": "qa",
        "reward_model": {"ground_truth": ANSWER_SPLIT.join(qa.golds), "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


def write_rows(rows: Iterable[dict[str, Any]], path: Path, batch: int = 1024) -> int:
    """Write rows as they come; how many there were."""
    count, rows = 0, iter(rows)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        while chunk := list(itertools.islice(rows, batch)):
            writer.write_table(pa.Table.from_pylist(chunk, SCHEMA))
            count += len(chunk)
    return count


def _get(values: Any, name: str) -> Any:
    """By name, whatever its case; ``a.b`` is b within a."""
    for part in [name] if isinstance(values, dict) and name in values else name.split("."):
        if not isinstance(values, dict):
            return None
        names = {str(key).strip().lower(): key for key in values}
        values = values.get(names.get(part.lower()))
    return values


def _find(values: dict[str, Any], given: str | None, usual: Sequence[str]) -> Any:
    """The column that was named, else the first usual one that holds something."""
    if given is not None:
        return _get(values, given)
    found = (_get(values, name) for name in usual)
    return next((value for value in found if value is not None and value != "" and value != []), None)


def _text_of(value: Any) -> str:
    """Of a text, or of the last user message of a conversation."""
    if isinstance(value, list):
        said = [m.get("content") for m in value if isinstance(m, dict) and m.get("role", "user") == "user"]
        value = said[-1] if said else None
    return value.strip() if isinstance(value, str) else ""


def _missing(what: str, given: str | None, values: dict[str, Any], usual: Sequence[str]) -> str:
    if given is not None:
        return f"no {what} in {given!r}" if _get(values, given) is not None else f"no column {given!r}"
    if any(_get(values, name) is not None for name in usual):
        return f"empty {what}"
    return f"no {what} among {', '.join(map(str, values)) or 'no columns'}"
