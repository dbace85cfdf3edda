"""Read a corpus of ``{title, url, text}`` rows from .jsonl, .jsonl.gz or .parquet, with errors that point."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

FIELDS = ("title", "url", "text")
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_HASH_WHOLE_BELOW = 64 * 2**20  # bytes


def iter_rows(paths: Sequence[Path]) -> Iterator[tuple[dict[str, str], int]]:
    """Yield ``(row, bytes read so far over all files)``, the files in the given order.

    Raises ValueError (file, line or row, reason) for a file of another kind, a broken line, a missing field or a field
    that is not a string.
    """
    done = 0
    for path in paths:
        reader = _parquet_rows if kind_of(path) == ".parquet" else _jsonl_rows
        for where, value, read in reader(path):
            yield _checked(value, path, where), done + read
        done += path.stat().st_size


def kind_of(path: Path) -> str:
    """The one of SUFFIXES that ``path`` ends with; ValueError where it is missing, closed to us, or of another kind."""
    if not path.is_file():
        raise ValueError(f"corpus {path} is {'a folder' if path.is_dir() else 'missing'}; give a file {_wanted()}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"corpus {path} can't be read by this user; change its permissions")
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise ValueError(f"corpus {path} is of an unknown kind; give a file {_wanted()}")


def fingerprint(paths: Sequence[Path], version: str) -> str:
    """16 hex digits that change when a file's content, the files' order, or ``version`` (the format) changes.

    Files under 64 MiB count by content, so that a copy or a fresh clone keeps its index; larger ones by size and
    modification time, since hashing tens of gigabytes would take minutes at every start.
    """
    digest = hashlib.sha256(version.encode())
    for path in paths:
        kind, stat = kind_of(path), path.stat()
        if stat.st_size <= _HASH_WHOLE_BELOW:
            digest.update(f"\0{kind}\0{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        else:
            digest.update(f"\0{kind}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    with path.open("rb") as raw:
        # Progress counts what was read of the file itself, so it is right for compressed files too.
        lines: IO[bytes] = gzip.open(raw) if path.name.lower().endswith(".gz") else raw  # type: ignore[assignment]
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", json.loads(line.removeprefix(b"\xef\xbb\xbf").decode()), raw.tell()
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error.msg}); write one object a line") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8; convert the file, e.g. with iconv") from error
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged after line {number} ({error}); copy or download it again") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any, int]]:
    import pyarrow.parquet as pq  # only here: a .jsonl corpus needs no arrow

    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no parquet file that can be read ({error}); copy or download it again") from error
    with file:
        names = set(file.schema_arrow.names)
        missing = [name for name in FIELDS if name not in names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r} (it has {sorted(names)}); rename or add it")
        size, total, number = path.stat().st_size, max(file.metadata.num_rows, 1), 0
        for batch in file.iter_batches(batch_size=1024, columns=list(FIELDS)):
            for value in batch.to_pylist():
                number += 1
                yield f"row {number}", value, size * number // total


def _checked(value: Any, path: Path, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}, {where} is a JSON {type(value).__name__}, not an object of title, url and text")
    for name in FIELDS:
        if name not in value:
            raise ValueError(f"{path}, {where} has no field {name!r} (it has {sorted(value)}); rename or add it")
        if not isinstance(value[name], str):
            raise ValueError(
                f"{path}, {where}: {name!r} is {value[name]!r:.60}, not a string; write text, it may be ''"
            )
    return {name: value[name] for name in FIELDS}


def _wanted() -> str:
    return f"of {{title, url, text}} rows that ends with {', '.join(SUFFIXES)}"
