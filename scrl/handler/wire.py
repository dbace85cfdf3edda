"""What travels between search clients, proxy and servers: the body of ``POST /handle_execution``.

DeepResearcher's: ``{"query_contents": [{idx, question, think, tool_call, total_number}, ...]}`` comes back as the same
items with ``content``, the text that the policy reads. Ours add, all optional: ``timeout_s`` beside the list, and in an
item ``episode_id`` and ``allowed_urls`` (what the episode may browse -> the query that found it) on the way there,
``result`` (every field of ToolResult) on the way back. ``POST /release`` says which episodes have ended.
"""

import json
import os
import re
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from scrl.llm_agent.parsing import parse_turn
from scrl.llm_agent.prompts import list_argument, render_error, render_observation, well_formed
from scrl.types import ToolCall, ToolResult

EXECUTION_PATH = "/handle_execution"
RELEASE_PATH = "/release"
RELEASE_TIMEOUT_S = 5.0  # nobody waits for a release; a server that doesn't hear of one forgets the oldest episodes
TOKEN_VARIABLE = "SCRL_TOKEN"
MAX_ITEMS = 4096  # calls in one request
_RESULT = TypeAdapter(ToolResult)

Item = dict[str, Any]


class ExecutionRequest(BaseModel):
    """``timeout_s``: seconds that whoever asks will wait; without it, what the server is set to."""

    query_contents: Annotated[list[Item], Field(max_length=MAX_ITEMS)]
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class ReleaseRequest(BaseModel):
    """Episodes that have ended: what they found and read may be forgotten."""

    episode_ids: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=MAX_ITEMS)]


def service_token() -> str:
    """The token that servers ask for and clients send; "" for none."""
    return os.environ.get(TOKEN_VARIABLE, "").strip()


def client_headers() -> dict[str, str]:
    """What a client sends along: that its bodies are JSON, and the token. ValueError where no header can hold that."""
    token = service_token()
    if not re.fullmatch(r"[!-~]*", token):
        raise ValueError(f"{TOKEN_VARIABLE} holds a character that no HTTP header can; use letters and digits")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


def http_client() -> httpx.AsyncClient:
    """For search servers. Bounds how long connecting takes; all else is bounded by the deadline of each call."""
    return httpx.AsyncClient(
        headers=client_headers(),
        timeout=httpx.Timeout(None, connect=5.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30.0),
        trust_env=False,  # search servers stand in one's own network, not behind HTTP_PROXY
    )


def encode_json(value: Any) -> bytes:
    """``value`` as UTF-8; a lone surrogate, which a page may hold and UTF-8 can't, becomes ``?``."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def checked_url(key: str, url: str) -> str:
    """A server's address without its path. ValueError, naming ``key``, where it is no http(s) URL."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, AttributeError):
        usable = False
    if not usable:
        raise ValueError(f"{key}={url!r} is no address of a search server; write it as http://127.0.0.1:5004")
    return url.rstrip("/").removesuffix(EXECUTION_PATH)


def problem_of(reply: httpx.Response) -> str:
    """What a reply other than 200 says, as one clause; "" for 200."""
    if reply.status_code == 200:
        return ""
    try:
        said = str(json.loads(reply.content)["error"])
    except (ValueError, RecursionError, KeyError, TypeError):
        said = next(iter(reply.text.strip().splitlines()), "nothing")
    return f"answered {reply.status_code}: {said[:300]}"


def read_call(item: Item) -> ToolCall | str:
    """The item's tool call; else one sentence that says what is wrong with it.

    ``tool_call`` is ``{"name", "arguments"}``, or its text as the policy wrote it. One that is well-formed is taken as
    it stands, so that its results belong to its queries one by one; all else is read by the rules of an episode.
    """
    call = item.get("tool_call")
    if not isinstance(call, dict | str):
        return "the item has no tool_call; give {name, arguments}, or their JSON text"
    if isinstance(call, dict) and (asked := well_formed(call.get("name"), call.get("arguments"))):
        return ToolCall(call["name"], {list_argument(call["name"]): asked})
    # In JSON "<\/" says "</": a closing tag inside a query must not end the block.
    text = call if isinstance(call, str) else json.dumps(call).replace("</", "<\\/")
    parsed = parse_turn(f"<think></think><tool_call>{text}</tool_call>")
    return parsed if isinstance(parsed, ToolCall) else getattr(parsed, "reason", "it holds an answer, not a tool call")


def read_urls(item: Item) -> dict[str, str] | None:
    """What the item says its episode may browse, by which query it was found; None where it says nothing about it."""
    urls = item.get("allowed_urls")
    return {url: str(query) for url, query in urls.items()} if isinstance(urls, dict) else None


def answered(item: Item, call: ToolCall | str, result: ToolResult) -> Item:
    """``item`` with ``content`` and ``result``; what only the server needed is left out."""
    kept = {key: value for key, value in item.items() if key != "allowed_urls"}
    if result.ok and isinstance(call, ToolCall):
        (asked,) = call.arguments.values()
        content = render_observation(asked, result.items, with_url=True)
    else:
        content = render_error(result.error)
    return {**kept, "content": content, "result": asdict(result)}


def failed(item: Item, kind: str, sentence: str, latency_s: float = 0.0) -> Item:
    """``item`` as it comes back when its call could not be run."""
    result = ToolResult(ok=False, error=sentence, error_kind=kind, latency_s=latency_s)
    return answered(item, sentence, result)


def read_reply(body: bytes, count: int) -> list[Item]:
    """The ``count`` items of a reply. ValueError, one clause, for anything else."""
    try:
        items = json.loads(body)["query_contents"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ValueError(f"is not an answer: {body[:80]!r}") from None
    if not isinstance(items, list) or len(items) != count or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"has not {count} answers")
    return items


def read_result(item: Item) -> ToolResult:
    """The ToolResult of an answered item. ValueError, one clause, where there is none."""
    try:
        return _RESULT.validate_python(item.get("result"))
    except ValidationError as error:
        raise ValueError(f"has no result ({error.errors()[0]['msg']})") from None


def hop_budget(remaining_s: float) -> float:
    """Seconds to grant the next hop, so that its answer, even "too late", is back before ours is due."""
    return max(remaining_s - min(1.0, 0.2 * remaining_s), 1e-3)
