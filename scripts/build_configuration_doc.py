"""Writes doc/configuration.md from the schema, the comments of ppo_trainer.yaml and the two recipes.

    python scripts/build_configuration_doc.py

A test fails when the document isn't what this would write.
"""

import argparse
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.trainer.config import Config, load_config, to_dict  # noqa: E402
from verl.trainer.config.convert import field_types  # noqa: E402
from verl.trainer.config.loading import key_table, profiles  # noqa: E402
from verl.trainer.config.schema import Range  # noqa: E402

DOCUMENT = ROOT / "doc" / "configuration.md"
HEAD = """# Configuration

Every key, made from the schema by `scripts/build_configuration_doc.py`. Set any of them on the command line
(`bash train_grpo.sh agent_grpo.n=8`); a recipe (`profile=...`) stands over the defaults, the command line over both.
`python -m verl.trainer.main_ppo --cfg profile=cpu_demo` prints what a command line comes to. An unknown key, a value
out of its range and a combination that can't work are refused with the value, the reason and the remedy; the family's
retired keys are taken with a warning that names what replaces them.
"""


def allowed(hint: Any) -> str:
    """What a key takes, in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [str(bound) for bound in args[1:] if isinstance(bound, Range)]
        return ", ".join([allowed(args[0]), *bounds])
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else allowed(arg) for arg in args)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"list of {allowed(args[0])}" if args[-1] is Ellipsis else f"{len(args)} x {allowed(args[0])}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}.get(hint, str(hint))


def hint_of(key: str) -> Any:
    hint: Any = Config
    for part in key.split("."):
        hint = field_types(hint)[part]
    return hint


def value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def document() -> str:
    """The whole page as Markdown."""
    recipes = {name: to_dict(load_config([f"profile={name}"])) for name in profiles()}
    return HEAD + "".join(_sections(recipes))


def _sections(recipes: dict[str, Any]) -> Iterator[str]:
    defaults = to_dict(Config())
    rows: dict[str, list[str]] = {}  # by section: a subsection may stand between two keys of its parent
    for key, _, meaning in key_table():
        section, _, name = key.rpartition(".")
        base = value_at(defaults, key)
        values = [value_at(tree, key) for tree in recipes.values()]
        changed = [_show(value) if value != base else "" for value in values]
        cells = [f"`{name}`", _show(base), *changed, allowed(hint_of(key)), meaning]
        rows.setdefault(section, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    head = (
        f"| key | default | {' | '.join(f'`{name}`' for name in recipes)} | takes | |\n|{'---|' * (4 + len(recipes))}\n"
    )
    for section, lines in rows.items():
        yield f"\n## {section or 'Top level'}\n\n{head}{''.join(lines)}"


def _show(value: Any) -> str:
    if value in ("", None):
        return "null" if value is None else '""'
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return "`" + text.replace("'", "").replace(f"{ROOT}/", "") + "`"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT.relative_to(ROOT))
