"""Questions and answers to the parquet rows that training reads.

    python scripts/prepare_data.py convert questions.jsonl more.csv --output train.parquet
    python scripts/prepare_data.py convert q.csv --question problem --answer solution --source my_set --output q.parquet
    python scripts/prepare_data.py deepresearcher --output data/deepresearcher

`convert` takes JSONL, JSON, CSV, TSV and parquet; the columns are found by their usual names, or named. Rows without
question or answer are counted, shown and left out. Questions that stand more than once are kept, and counted.

`deepresearcher` fetches that project's train, dev and test sets (an interrupted download goes on), checks them, and
marks the dev questions that stand in the test set as well (extra_info.also_in_test): leave these out of what you tune
on. Files that are there already are only checked and marked, so they can be put there by hand.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

import httpx  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: E402

from verl.utils.dataset import QuestionRow, RLHFDataset, expand_files, read_rows  # noqa: E402
from verl.utils.question_files import Columns, read_records, to_qa, to_row, write_rows  # noqa: E402
from verl.utils.tokenizer import load_tokenizer  # noqa: E402

SHOWN = 5  # bad rows
PROJECT = "https://github.com/GAIR-NLP/DeepResearcher"
ROWS = {"train": None, "dev": 875, "test": 3197}  # as published; None: not known to us
TRIES = 5
ANY_LENGTH = 1 << 62


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place if nothing goes wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- convert
class Converter:
    """Files to rows, with what was met on the way. ``problems``: the first few, as ``place: reason``."""

    def __init__(self, files: Sequence[Path], columns: Columns, split: str) -> None:
        self._files, self._columns, self._split = files, columns, split
        self.sources: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.problems: list[str] = []
        self.repeated = self.contradicting = 0

    def rows(self) -> Iterator[dict]:
        keys: set[str] = set()
        answers: dict[int, int] = {}  # hashes: the texts of a large set needn't be kept
        for path in self._files:
            for record in read_records(path):
                try:
                    if record.problem:
                        raise ValueError(record.problem)
                    qa = to_qa(record.values, self._columns, self._columns.source or path.stem)
                except ValueError as error:
                    self.reasons[str(error).partition(" (")[0]] += 1
                    self.problems += [f"{record.place}: {error}"] if len(self.problems) < SHOWN else []
                    continue
                number = sum(self.sources.values())
                index = qa.key if qa.key and qa.key not in keys else f"{path.stem}_{number}"
                keys.add(index)
                question, answer = hash(qa.question), hash(tuple(sorted(qa.golds)))
                self.repeated += question in answers
                self.contradicting += answers.setdefault(question, answer) != answer
                self.sources[qa.source] += 1
                yield to_row(qa, index, self._split)


def convert(files: Sequence[str], columns: Columns, output: Path) -> None:
    """Raises ValueError where a file can't be read, or no row is left."""
    paths = expand_files(files)
    if output.suffix != ".parquet":
        raise ValueError(f"--output {output} is no .parquet, which is what training reads; rename it")
    if any(path.samefile(output) for path in paths if output.exists()):
        raise ValueError(f"--output {output} is one of the files to convert; name another")
    converter = Converter(paths, columns, output.stem)
    with whole(output) as unfinished:
        count = write_rows(converter.rows(), unfinished)
        left_out = sum(converter.reasons.values())
        if not count:
            shown = "; ".join(converter.problems) or "the files are empty"
            raise ValueError(f"no row can be used ({shown}); name the columns: --question NAME --answer NAME")
        tokenizer = load_tokenizer(str(ROOT / "data" / "demo" / "policy"))
        read = RLHFDataset(str(unfinished), tokenizer, max_prompt_length=ANY_LENGTH)
        assert len(read) == count, "the dataset reads what was written"
    sources = ", ".join(f"{name} {number:,}" for name, number in converter.sources.most_common(10))
    print(f"{count:,} questions: {output} (data_source: {sources})")
    if converter.repeated:
        print(
            f"{converter.repeated:,} repeat an earlier question, {converter.contradicting:,} with other answers (kept)"
        )
    if left_out:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in converter.reasons.most_common(5))
        print(f"{left_out:,} rows left out ({reasons}):", file=sys.stderr)
        more = [f"and {left_out - SHOWN:,} more"] if left_out > SHOWN else []
        print("\n".join(f"  {line}" for line in converter.problems + more), file=sys.stderr)


# ------------------------------------------------------------------------------------------------------ DeepResearcher
def deepresearcher(folder: Path, url: str) -> None:
    """Raises ValueError where a file can't be fetched, or isn't what it should be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ROWS:
        if not (folder / f"{name}.parquet").is_file():
            download(f"{url}/{name}.parquet", folder / f"{name}.parquet")
    rows = {name: read_rows(folder / f"{name}.parquet") for name in ROWS}
    for name, expected in ROWS.items():
        note = f" (published: {expected:,}; this is another version)" if expected not in (None, len(rows[name])) else ""
        print(f"{folder / name}.parquet: {len(rows[name]):,} questions{note}")
    tested = questions(rows["test"])
    marked = mark(folder / "dev.parquet", [row.question in tested for row in rows["dev"]])
    print(f"{marked:,} of dev's questions stand in test too: extra_info.also_in_test")
    for name in ("dev", "test"):
        if seen := sum(row.question in questions(rows[name]) for row in rows["train"]):
            print(f"{seen:,} of train's questions stand in {name}")


def questions(rows: Sequence[QuestionRow]) -> set[str]:
    return {row.question for row in rows}


def mark(path: Path, flags: list[bool]) -> int:
    """Write ``flags`` as ``extra_info.also_in_test`` into the file, beside what is there; how many are set."""
    table = pq.read_table(path)
    names = list(dict.fromkeys([*table.schema.names, "extra_info"]))
    extras = table["extra_info"].to_pylist() if "extra_info" in table.schema.names else [None] * len(table)
    marked = pa.array([(extra or {}) | {"also_in_test": flag} for extra, flag in zip(extras, flags, strict=True)])
    columns = {name: marked if name == "extra_info" else table[name] for name in names}
    with whole(path) as unfinished:
        pq.write_table(pa.table(columns), unfinished)
    return sum(flags)


def download(url: str, path: Path) -> None:
    """Fetch ``url``, going on where an earlier try was cut off. Raises ValueError when that doesn't work."""
    part, problem = path.with_name(f".{path.name}.part"), ""
    columns = (TextColumn(path.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        for _ in range(TRIES):
            before = part.stat().st_size if part.exists() else 0
            try:
                _fetch(url, part, lambda done, total: bar.update(task, completed=done, total=total))
                part.replace(path)
                return
            except httpx.HTTPStatusError as error:
                problem = f"HTTP {error.response.status_code}"
                if error.response.status_code == 416 and before:  # it has changed since: from the beginning
                    part.unlink()
                elif error.response.status_code < 500:
                    break
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                if isinstance(error, httpx.ConnectError):
                    break
    raise ValueError(
        f"{url} can't be fetched ({problem}); run this again where the network allows, or put train.parquet, "
        f"dev.parquet and test.parquet (folder data of {PROJECT}) into {path.parent} by hand and run this again"
    )


def _fetch(url: str, part: Path, tell: Callable[[int, int | None], None]) -> None:
    done = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=30.0) as answer:
        answer.raise_for_status()
        done = done if answer.status_code == httpx.codes.PARTIAL_CONTENT else 0  # else it sends the whole again
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as file:
            for piece in answer.iter_raw():
                file.write(piece)
                tell(file.tell(), total)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert", help="files of questions and answers to one parquet file")
    one.add_argument("files", nargs="+", metavar="FILE", help="files or globs")
    one.add_argument("--output", type=Path, required=True, help="parquet file to write; an earlier one is replaced")
    one.add_argument("--question", metavar="COLUMN", help="where the question stands, such as data.question")
    one.add_argument("--answer", metavar="COLUMN", help="where the answers stand: text, a number, a list, an object")
    one.add_argument("--source", metavar="COLUMN", help="where the source stands, or the source's name itself")
    two = commands.add_parser("deepresearcher", help="fetch, check and mark DeepResearcher's data sets")
    two.add_argument("--output", type=Path, required=True, metavar="DIR")
    two.add_argument("--url", default=f"{PROJECT}/raw/HEAD/data", help="where the files are (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        if args.command == "convert":
            convert(args.files, Columns(args.question, args.answer, args.source), args.output.expanduser())
        else:
            deepresearcher(args.output.expanduser(), args.url.rstrip("/"))
    except (ValueError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare_data: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
