"""What a policy turn means: text -> Answer, ToolCall or Malformed. Pure, linear time, and no input raises."""

import json
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

from scrl.llm_agent.prompts import TOOLS, list_argument
from scrl.types import ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_QUERIES = 3  # of one web_search call; the rest is not run

# A number's value never matters here, and int() refuses one of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=lambda digits: 0, parse_float=lambda digits: 0.0)
_OBJECT_START = re.compile(r'\{(?=\s*["}])')
_MAX_STARTS = 64  # braces tried as the object's start; a decoding error costs its position, so many would be quadratic
_SURROGATE = re.compile("[\ud800-\udfff]")  # from a JSON escape such as \ud800; it can't be encoded as UTF-8


@dataclass(frozen=True)
class Answer:
    """The policy's answer, spaces around it taken off. ``trailing``: text followed it and was ignored."""

    text: str
    trailing: bool = False


@dataclass(frozen=True)
class Malformed:
    """The turn is no action. ``reason``: one sentence for people and for the records."""

    reason: str


def parse_turn(text: str) -> Answer | ToolCall | Malformed:
    """Meaning of one policy turn: ``text`` is the forced prefix + what was sampled, the end-of-turn token left out.

    A turn is a closed ``<think>`` block and then an action: the first complete ``<answer>`` or ``<tool_call>`` block.
    What stands between the two, and after the action, is ignored (the latter is flagged ``trailing``).
    """
    think, rest = split_think(text)
    if rest is None:
        return Malformed("the <think> block is not closed" if think is not None else "there is no <think> block")
    blocks = [block for tag in ("answer", "tool_call") if (block := _first_block(rest, tag)) is not None]
    complete = [block for block in blocks if block.end >= 0]
    if not complete:
        return Malformed(f"the <{blocks[0].tag}> block is not closed" if blocks else "no action follows the thought")
    block = min(complete, key=lambda candidate: candidate.start)
    trailing = bool(rest[block.end :].strip())
    if block.tag == "answer":
        return Answer(_without_surrogates(block.body).strip(), trailing)
    return _parse_call(block.body, trailing)


def split_think(text: str) -> tuple[str | None, str | None]:
    """(thought, what follows it). No ``<think>`` at the start: (None, None); never closed: (thought, None)."""
    text = text.lstrip()
    if not text.startswith(THINK_OPEN):
        return None, None
    think, closed, rest = text[len(THINK_OPEN) :].partition(THINK_CLOSE)
    return think, rest if closed else None


@dataclass(frozen=True)
class _Block:
    tag: str
    start: int
    end: int  # past the closing tag; -1: never closed
    body: str


def _first_block(text: str, tag: str) -> _Block | None:
    """The block that the first opening tag begins. If that one is not closed, no later one of its kind can be."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    if start < 0:
        return None
    close = text.find(closing, start + len(opening))
    return _Block(tag, start, close + len(closing) if close >= 0 else -1, text[start + len(opening) : close])


def _parse_call(body: str, trailing: bool) -> ToolCall | Malformed:
    try:
        call, start, end = _first_object(body)
    except ValueError as error:
        return Malformed(f"the tool call {error}")
    before, after = body[:start].strip(), body[end:].strip()
    if before.startswith("```"):
        after = after.removeprefix("```").strip()
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or name not in TOOLS:
        return Malformed("the tool call has no name" if name is None else f"{str(name)[:80]!r} is not a tool")
    coerced = bool(before)
    if isinstance(arguments, str):
        coerced = True
        try:
            arguments = _first_object(arguments)[0]
        except ValueError as error:
            return Malformed(f"the text in arguments {error}")
    if not isinstance(arguments, dict):
        return Malformed("the tool call's arguments are not an object")
    key = list_argument(name)
    values, repaired = _string_list(arguments.get(key))
    if not values:
        return Malformed(f"{name} needs {key}, a list of non-empty strings")
    values = values[:MAX_QUERIES] if name == "web_search" else values
    return ToolCall(name, {key: values}, coerced or repaired, trailing or bool(after))


def _first_object(text: str) -> tuple[dict[str, Any], int, int]:
    """The first JSON object in ``text`` with its (start, end). Raises ValueError with a clause that says why not."""
    resume = 0
    for match in islice(_OBJECT_START.finditer(text), _MAX_STARTS):
        if match.start() < resume:
            continue
        try:
            value, end = _DECODER.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            resume = error.pos
            continue
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return value, match.start(), end
    raise ValueError("holds no JSON object")


def _string_list(value: Any) -> tuple[list[str], bool]:
    """(distinct non-empty strings in order, whether the form had to be repaired)."""
    items = value if isinstance(value, list) else [value]
    kept = [text for item in items if isinstance(item, str) and (text := _without_surrogates(item).strip())]
    return list(dict.fromkeys(kept)), not isinstance(value, list) or len(kept) < len(items)


def _without_surrogates(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
