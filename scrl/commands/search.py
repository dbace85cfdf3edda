"""What a search engine finds, as a table.

    python -m scrl search "The Ashen Whisper"                        the demo's corpus
    python -m scrl search "Marie Curie" --engine searxng             where: SEARXNG_URL; keys: the environment
    python -m scrl search "Marie Curie" --engine searxng,duckduckgo language=fr

Further key=value arguments are those of scrl/handler/config.yaml.
"""

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scrl.handler.config import HandlerConfig, load_config
from scrl.handler.handler import SearchHandler
from scrl.types import ToolCall, ToolResult

DEMO_CORPUS = "data/demo/corpus.jsonl"
SHOWN = 300  # characters of a result's text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", nargs="?", default="")
    add_handler_arguments(parser)


def add_handler_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command with a search handler takes."""
    names = ("--engine", "--search-engine")
    parser.add_argument(*names, default="local", metavar="NAME", help="several, as a,b: in order of preference")
    parser.add_argument("--topk", type=int, help="results (default 3)")


def handler_config(options: argparse.Namespace, *defaults: str) -> HandlerConfig:
    """The handler that the arguments describe; the local engine searches the demo's corpus unless told otherwise."""
    own = [f"index_corpus={DEMO_CORPUS}", *defaults, f"search_engine=[{options.engine}]"]
    own += [f"topk={options.topk}"] if options.topk is not None else []
    return load_config(overrides=[*own, *options.overrides])


def ask_handler(config: HandlerConfig, call: ToolCall, question: str = "") -> ToolResult:
    with SearchHandler(config) as handler:
        return handler.submit(call, question=question).result()


def printable(text: str) -> str:
    """``text`` without the terminal's control characters: a page may hold some."""
    return "".join(ch if ch.isprintable() or ch == "\n" else " " for ch in text)


def plain(text: str) -> str:
    """``printable`` text in which rich's markup is just text."""
    return escape(printable(text))


def run(options: argparse.Namespace) -> int:
    if not options.query.strip():
        raise ValueError('there is nothing to search for; python -m scrl search "a query"')
    result = ask_handler(handler_config(options), ToolCall("web_search", {"query": [options.query]}))
    console = Console()
    if not result.ok:
        console.print(f"[red]{result.error_kind}[/]: {plain(result.error)}")
        return 1
    rows = result.items[0]
    table = Table(show_lines=True, caption=f"{len(rows)} results in {result.latency_s:.2f} s")
    table.add_column("#", justify="right", style="dim")
    table.add_column("title", style="bold", max_width=32)
    table.add_column("text", ratio=1)
    for place, row in enumerate(rows, start=1):
        text = row.get("text", "")
        shown = text[:SHOWN] + ("…" if len(text) > SHOWN else "")
        table.add_row(str(place), plain(row.get("title", "")), f"{plain(shown)}\n[dim]{plain(row.get('url', ''))}[/]")
    console.print(table)
    return 0 if rows else 1
