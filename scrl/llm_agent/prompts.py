"""What the policy is told: system prompt, tools, how observations are rendered, framed and encoded."""

import json
import re
from functools import cached_property, lru_cache
from typing import Any

SYSTEM_PROMPT = (
    "You answer questions by searching the web. First think inside <think> and </think>. "
    "Then either call a tool, or give the final answer inside <answer> and </answer>. "
    "The answer is a few words, without explanation."
)
FORCED_PREFIX = "<think>"
ANSWER_NOW = "\nNo tool calls are left. Answer now."

# What the policy can be offered (`tools`). What a tool does: SearchHandler, and scrl/handler/tools.py for further ones.
TOOLS: dict[str, dict[str, Any]] = {
    "web_search": {
        "type": "function",
        "function": {
            "name": "web_search",
            "description": "Search the web. Give one to three queries.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "array", "items": {"type": "string"}}},
                "required": ["query"],
            },
        },
    },
    "browse_webpage": {
        "type": "function",
        "function": {
            "name": "browse_webpage",
            "description": "Read web pages found by a search.",
            "parameters": {
                "type": "object",
                "properties": {"url_list": {"type": "array", "items": {"type": "string"}}},
                "required": ["url_list"],
            },
        },
    },
}


def list_argument(tool: str) -> str:
    """The one argument that a tool takes, a list of strings: ``query``, ``url_list``."""
    return TOOLS[tool]["function"]["parameters"]["required"][0]


def well_formed(name: Any, arguments: Any) -> list[str] | None:
    """The queries or URLs of a tool call that is as it should be: one or more strings, none blank. Else None."""
    if not isinstance(name, str) or name not in TOOLS or not isinstance(arguments, dict):
        return None
    asked = arguments.get(list_argument(name))
    fits = isinstance(asked, list) and all(isinstance(text, str) and text.strip() for text in asked)
    return asked if fits and asked else None


def writable(text: str) -> str:
    """``text`` without lone surrogates, which JSON may name and neither UTF-8 nor a tokenizer can take: ``?`` each."""
    return text.encode("utf-8", "replace").decode()


def build_messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def encode_prompt(tokenizer: Any, question: str, tools: tuple[str, ...] = ("web_search",)) -> list[int]:
    """Token ids of the conversation's start, generation prompt and forced ``<think>`` included."""
    before, after = _prompt_frame(tokenizer, tools, tokenizer.chat_template)
    return [*before, *encode_untrusted(tokenizer, writable(question)), *after]


@lru_cache(maxsize=8)
def _prompt_frame(tokenizer: Any, tools: tuple[str, ...], template: str | None) -> tuple[list[int], list[int]]:
    """Token ids around the question. Rendering a template takes ten times as long as encoding a question."""
    text = tokenizer.apply_chat_template(
        build_messages("\0question\0"),
        tools=[TOOLS[name] for name in tools],
        add_generation_prompt=True,
        tokenize=False,
    )
    before, _, after = text.partition("\0question\0")
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
    return encode(before), encode(after + FORCED_PREFIX)


def encode_untrusted(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` with no added token among them: ``<|im_start|>`` in a web page is ordinary text.

    The text is cut after the first character of every added token that it names, and the pieces are encoded apart, so
    that no character changes. Should a tokenizer's normaliser still build one, those pieces are encoded by character.
    """
    added = tokenizer.get_added_vocab()
    forbidden = set(added.values())
    names = sorted((re.escape(name) for name in added if len(name) > 1), key=len, reverse=True)
    pieces, start = [], 0
    if names:
        for match in re.finditer(f"(?=({'|'.join(names)}))", text):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
    pieces.append(text[start:])
    ids: list[int] = []
    for piece in pieces:
        encoded = tokenizer.encode(piece, add_special_tokens=False) if piece else []
        if forbidden.intersection(encoded):
            encoded = [i for ch in piece for i in tokenizer.encode(ch, add_special_tokens=False) if i not in forbidden]
        ids.extend(encoded)
    return ids


def render_observation(queries: list[str], items: list[list[dict[str, str]]], with_url: bool = False) -> str:
    """JSON text of a tool's results, a result a line: ``[{"query": q, "results": [{"title", "text"}, ...]}, ...]``."""
    keys = ("title", "url", "text") if with_url else ("title", "text")
    blocks = []
    for query, results in zip(queries, items, strict=True):
        rows = [json.dumps({k: r.get(k, "") for k in keys}, ensure_ascii=False) for r in results]
        body = "\n" + ",\n".join(rows) + "\n" if rows else ""
        blocks.append(f'{{"query": {json.dumps(query, ensure_ascii=False)}, "results": [{body}]}}')
    return "[" + ",\n".join(blocks) + "]"


def render_error(message: str) -> str:
    return json.dumps({"error": message}, ensure_ascii=False)


class ChatFrame:
    """What the chat template puts around an observation, learned from the template itself by rendering a sentinel."""

    def __init__(self, tokenizer: Any, tools: tuple[str, ...] = ("web_search",)) -> None:
        self._tokenizer = tokenizer
        self._tools = [TOOLS[name] for name in tools]

    @cached_property
    def _parts(self) -> tuple[str, str]:
        said, observed = "\0assistant\0", "\0observation\0"
        messages = build_messages("q") + [
            {"role": "assistant", "content": said},
            {"role": "tool", "content": observed},
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tools=self._tools, add_generation_prompt=True, tokenize=False
        )
        after_said = text.partition(said)[2]
        before, found, after = after_said.partition(observed)
        if not found:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} does not render a tool message; "
                "use a model whose template knows the role 'tool' (Qwen2.5, Qwen3, SmolLM2)"
            )
        return before, after

    @cached_property
    def end_of_turn_id(self) -> int:
        """The token that ends a policy turn (Qwen: ``<|im_end|>``): the first of the frame."""
        return self._tokenizer.encode(self._parts[0], add_special_tokens=False)[0]

    @cached_property
    def _before_ids(self) -> list[int]:
        return self._tokenizer.encode(self._parts[0], add_special_tokens=False)

    @cached_property
    def _after_ids(self) -> dict[bool, list[int]]:
        after = self._parts[1] + FORCED_PREFIX
        encode = lambda text: self._tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        return {False: encode(after), True: encode(ANSWER_NOW + after)}

    def overhead(self, last: bool) -> int:
        """Tokens that the frame takes beside the observation's own."""
        return len(self._before_ids) + len(self._after_ids[last])

    def wrap(self, observation_ids: list[int], *, turn_ended: bool, last: bool) -> list[int]:
        """Frame + observation + frame + forced prefix. ``turn_ended``: the policy sampled the end-of-turn token itself.

        ``last``: the next turn is the final one, and the policy is told so.
        """
        before = self._before_ids[1:] if turn_ended else self._before_ids
        return before + observation_ids + self._after_ids[last]
