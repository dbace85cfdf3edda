"""Build the full-text index of a corpus, for search_engine=local.

    python scripts/build_index.py corpus.jsonl [more.parquet ...] --out DIR

Each file holds rows of {title, url, text}: .jsonl, .jsonl.gz or .parquet. Then train with
search_engine=local search.index_corpus=corpus.jsonl search.index_dir=DIR (for a corpus of one file).
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not
    from scrl.handler.web_search_agent.local_index import LocalIndex, build_index

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", type=Path, help=".jsonl, .jsonl.gz or .parquet of {title, url, text}")
    parser.add_argument("--out", required=True, type=Path, help="folder for the index; made when missing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        folder = build_index(args.corpus, args.out, progress=not args.quiet)
        pages = len(LocalIndex.open(args.corpus, args.out))
    except ValueError as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_index: stopped; nothing half-built was left, start again at any time", file=sys.stderr)
        return 130
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{pages:,} pages, {size / 1e6:,.1f} MB in {folder} ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
