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
    options, rest = parser.parse_known_args(argv)
    options.overrides = [text for text in rest if re.match(r"\+*[\w.]+=", text)]
    if wrong := [text for text in rest if text not in options.overrides]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
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
