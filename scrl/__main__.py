"""Try the agent and its tools by hand: ``python -m scrl search | browse | ask | serve --help``."""

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Sequence

COMMANDS = {
    "search": "what a search engine finds, as a table",
    "browse": "what the reading agent takes from a page",
    "ask": "let the trained agent answer a question, and watch it think and search",
    "serve": "the trained agent as an OpenAI-compatible chat endpoint",
}

_FLAGS = ("-h", "--help", "--chat")  # options without a value


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the rest, the ``key=value`` words), wherever these stand: argparse would take one for the question.

    What holds a space, follows an option that wants a value, or stands behind ``--`` is none.
    """
    rest, overrides = [], []
    for place, word in enumerate(argv):
        if word == "--":
            return [*rest, *argv[place:]], overrides
        before = argv[place - 1] if place else ""
        is_value = before.startswith("-") and "=" not in before and before not in _FLAGS
        (overrides if not is_value and re.fullmatch(r"\+*[\w.]+=\S*", word) else rest).append(word)
    return rest, overrides


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a failure or no result, 2 a user's mistake (one sentence), 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m scrl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, meaning in COMMANDS.items():
        module = importlib.import_module(f"scrl.commands.{name}")
        command = commands.add_parser(
            name, help=meaning, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(rest)
    options.overrides = overrides
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return options.run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
