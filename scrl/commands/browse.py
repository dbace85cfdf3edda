"""What the reading agent takes from a page.

    python -m scrl browse https://example.org/page --question "Who founded it?"
    python -m scrl browse URL --engine local        a page of the demo's corpus, without a network

A model reads where READER_MODEL names one (OPENAI_BASE_URL, OPENAI_API_KEY); otherwise sentences are ranked by BM25.
"""

import argparse

from rich.console import Console
from rich.panel import Panel

from scrl.commands.search import add_handler_arguments, ask_handler, handler_config, plain
from scrl.types import ToolCall


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url")
    parser.add_argument("--question", default="", help="what to look for; without one, what the page begins with")
    add_handler_arguments(parser)
    parser.set_defaults(engine="duckduckgo")  # any engine of the web: pages are then fetched, not looked up


def run(options: argparse.Namespace) -> int:
    config = handler_config(options, "browse_any_url=true")
    result = ask_handler(config, ToolCall("browse_webpage", {"url_list": [options.url]}), options.question)
    console = Console()
    if not result.ok:
        console.print(f"[red]{result.error_kind}[/]: {plain(result.error)}")
        return 1
    for row in result.items[0]:
        console.print(Panel(plain(row.get("text", "")), title=plain(row.get("title", "")), title_align="left"))
    console.print(f"[dim]{result.latency_s:.2f} s[/]")
    return 0
