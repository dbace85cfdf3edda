"""One HTML file of training runs: curves with alerts, every episode to read and to filter, steps side by side.

    python scripts/report.py outputs/{project}/{experiment} [more runs] [--out report.html] [--max-mb 10]

Writes report.html into the first run's folder, or what --out names. The file needs no network and no server: open it,
or send it to somebody. A run that is still going can be reported at any time. Where all episodes don't fit into
--max-mb, the longest texts are cut first, then episodes are sampled, and the page says so.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any directory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl.utils.report.build import MB, build
from verl.utils.report.source import open_runs


@contextmanager
def progress_bar() -> Iterator:
    """A callback for ``build``: a bar on a terminal, elsewhere a line each 15 s."""
    said = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > 15:
            said = time.monotonic()
            print(f"{what}: {done} of {total} files", file=sys.stderr, flush=True)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield line
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="a run's folder")
    parser.add_argument("--out", type=Path, help="HTML file to write (default: report.html in the first run's folder)")
    parser.add_argument("--max-mb", type=float, default=10.0, help="largest size of the file (default: %(default)g)")
    args = parser.parse_args(argv)
    if not 0 < args.max_mb < float("inf"):
        parser.error(f"--max-mb {args.max_mb:g} is no size; give the megabytes that the file may have, such as 10")
    try:
        runs = open_runs(args.runs)
        first = args.runs[0].expanduser()
        out = args.out or (first.parent if first.is_file() else first) / "report.html"
        with progress_bar() as progress:
            report = build(runs, int(args.max_mb * MB), progress)
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            unfinished.write_text(report.html, encoding="utf-8")
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    except (ValueError, OSError) as error:  # OSError: the page can't be written there
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; no report was written", file=sys.stderr)
        return 130
    print(f"{out} ({len(report.html) / MB:.1f} MB)")
    if report.notes:
        print(f"to stay below {args.max_mb:g} MB: {'; '.join(report.notes)} (--max-mb keeps more)")
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
