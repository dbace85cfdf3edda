"""The trained agent as an OpenAI-compatible chat endpoint: POST /v1/chat/completions, streaming or not; GET /v1/models.

    python -m scrl serve                       the demo's latest checkpoint at http://127.0.0.1:8000/v1
    python -m scrl serve --model Qwen/Qwen2.5-3B-Instruct --adapter PATH --port 8080

The agent answers the last user message; it was trained on single questions. Thoughts and searches are streamed as
``reasoning_content``, the answer with its sources as ``content``. On another address than 127.0.0.1 (``--host``)
SCRL_TOKEN must be set, and is the API key.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from scrl.agent import Agent
from scrl.commands.ask import ThoughtText, add_agent_arguments, open_agent, sources, why_no_answer
from scrl.types import Episode, Turn

if TYPE_CHECKING:
    from fastapi import Request

MAX_AT_ONCE = 64  # episodes; further requests wait
MODEL = "miniresearcher"
_MODEL_CARD = {"id": MODEL, "object": "model", "owned_by": MODEL, "created": 0}
_FAILED = "the episode failed; the server's log says why"

logger = logging.getLogger(__name__)


class Message(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text") or "") for part in self.content if part.get("type") == "text")
        return self.content or ""


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """Of OpenAI's fields those that mean something here. Others are ignored, such as ``max_tokens``: how long an
    episode may be is the configuration's."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    n: int | None = Field(None, ge=1, le=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    add_agent_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from scrl.handler.http_service import serve

    agent = open_agent(options)
    app = create_app(agent, options.temperature)
    code = serve(app, options.host, options.port, "chat endpoint (/v1)", prepare=agent.open)
    if app.state.engine_died:
        print("serve: the engine died; start the server again", file=sys.stderr)
    return 1 if app.state.engine_died else code


class QueueListener:
    """Puts what the episode says into a queue, as pieces of reasoning, from whatever thread it comes."""

    def __init__(self, tokenizer: Any) -> None:
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._thought, self._loop = ThoughtText(tokenizer), asyncio.get_running_loop()

    def token(self, token_id: int) -> None:
        if piece := self._thought.add(token_id):
            self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def turn(self, turn: Turn) -> None:
        self._thought = ThoughtText(self._thought.tokenizer)
        if turn.tool_call:
            (asked,) = turn.tool_call.arguments.values()
            self._say(f"\n{turn.tool_call.name}: {' · '.join(asked)}\n")

    def observation(self, turn: Turn) -> None:
        self._say("".join(f"- {title} {url}\n" for title, url in turn.sources) or f"{turn.observation}\n")

    def _say(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self.pieces.put_nowait, text)


def create_app(agent: Agent, temperature: float = 0.0) -> Any:
    """The endpoint over ``agent``, which it opens at its start and closes at its end."""
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse

    from scrl.handler.http_service import json_response, make_app

    def tell(status: int, sentence: str) -> Response:
        return json_response(_error(status, sentence), status)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await agent.open()
        yield
        agent.close()

    app = make_app("chat endpoint", lifespan, tell=tell)
    app.state.engine_died = False
    at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def answer(question: str, listener: QueueListener, warmth: float) -> Episode:
        try:
            async with at_once:
                return await agent.answer(question, listener, warmth)
        finally:
            listener.pieces.put_nowait(None)
            if agent.failed:  # every further answer would be an error
                app.state.engine_died = True
                signal.raise_signal(signal.SIGTERM)

    @app.get("/v1/models")
    async def models() -> Any:
        return json_response({"object": "list", "data": [_MODEL_CARD]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name != MODEL:
            return tell(404, f"there is no model {name[:80]!r}; use {MODEL}")
        return json_response(_MODEL_CARD)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, connection: Request) -> Any:
        question = next((m.text() for m in reversed(request.messages) if m.role == "user"), "")
        try:
            agent.encode(question)
        except ValueError as error:
            return tell(400, str(error))
        listener = QueueListener(agent.tokenizer)
        warmth = temperature if request.temperature is None else request.temperature
        episode = asyncio.ensure_future(answer(question, listener, warmth))
        if request.stream:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return StreamingResponse(_events(episode, listener, with_usage), media_type="text/event-stream")
        if not await _finishes(episode, connection):
            return tell(499, "the client went away")
        finished = await episode
        if finished.finish == "error":
            return tell(500, _FAILED)
        reasoning = "".join([piece async for piece in _pieces(listener)])
        message = {"role": "assistant", "content": _content(finished), "reasoning_content": reasoning}
        choice = {"index": 0, "message": message, "finish_reason": _reason(finished)}
        return json_response(_head(finished.uid, "chat.completion") | {"choices": [choice], "usage": _usage(finished)})

    return app


async def _finishes(episode: "asyncio.Future[Episode]", connection: "Request") -> bool:
    """Whether the episode ended before its client went away, which ends it."""

    async def gone() -> None:
        while (await connection.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({episode, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return episode.done()
    finally:
        leaving.cancel()
        episode.cancel()  # nothing happens to one that is done


async def _pieces(listener: QueueListener) -> AsyncIterator[str]:
    while (piece := await listener.pieces.get()) is not None:
        yield piece


async def _events(
    episode: "asyncio.Future[Episode]", listener: QueueListener, with_usage: bool = False
) -> AsyncIterator[str]:
    """Server-sent events in OpenAI's form. A client that goes away ends its episode."""
    head = _head(f"chatcmpl-{time.time_ns()}", "chat.completion.chunk")

    def event(delta: dict[str, str], finish: str | None = None) -> str:
        return _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    try:
        yield event({"role": "assistant"})
        async for piece in _pieces(listener):
            yield event({"reasoning_content": piece})
        finished = await episode
        if finished.finish == "error":
            yield _event(_error(500, _FAILED))
            return
        yield event({"content": _content(finished)})
        yield event({}, _reason(finished))
        if with_usage:
            yield _event(head | {"choices": [], "usage": _usage(finished)})
        yield "data: [DONE]\n\n"
    except Exception:  # the answer has begun: a status can't say so any more
        logger.exception("an episode failed")
        yield _event(_error(500, _FAILED))
    finally:
        episode.cancel()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, sentence: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind}}


def _reason(episode: Episode) -> str:
    return "length" if episode.finish == "length" else "stop"


def _content(episode: Episode) -> str:
    if episode.answer is None:
        return f"No answer: {why_no_answer(episode)}"
    found = "\n".join(f"{n}. {title} {url}" for n, (title, url) in enumerate(sources(episode), start=1))
    return episode.answer + (f"\n\nSources:\n{found}" if found else "")


def _head(name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(episode: Episode) -> dict[str, int]:
    sampled = sum(episode.response_mask)
    prompt = len(episode.prompt_ids) + len(episode.response_ids) - sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
