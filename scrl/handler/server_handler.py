"""The search server: a SearchHandler behind HTTP, for trainers on this or other machines.

    python scrl/handler/server_handler.py index_corpus=data/demo/corpus.jsonl [port=5005] [key=value ...]

Keys: config.yaml beside this file (``--config`` reads another). ``POST /handle_execution`` runs tool calls, see
wire.py; ``POST /release`` ends episodes; ``GET /health``; ``GET /metrics`` for Prometheus.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from fastapi import FastAPI, Response

from scrl.handler.config import HandlerConfig, config_from_arguments
from scrl.handler.handler import SearchHandler
from scrl.handler.http_service import closing, json_response, make_app, prometheus, serve
from scrl.handler.wire import (
    EXECUTION_PATH,
    RELEASE_PATH,
    ExecutionRequest,
    Item,
    ReleaseRequest,
    answered,
    failed,
    read_call,
    read_urls,
)

_GRACE_S = 5.0  # the handler keeps the deadline; this is how much later the server gives up on it


def create_app(config: HandlerConfig, handler: SearchHandler | None = None) -> FastAPI:
    """The server over ``handler`` (default: one built from ``config``), which it closes when it ends.

    Raises ValueError as SearchHandler does.
    """
    handler = SearchHandler(config) if handler is None else handler
    app = make_app("search server", closing(handler))

    async def run(item: Item, timeout_s: float) -> Item:
        call = read_call(item)
        if isinstance(call, str):
            return failed(item, "bad_request", f"{call[:1].upper()}{call[1:]}.")
        future = handler.submit(
            call,
            timeout_s,
            episode_id=str(item.get("episode_id") or ""),
            question=str(item.get("question") or ""),
            allowed_urls=read_urls(item),
        )
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(future), timeout_s + _GRACE_S)
        except TimeoutError:
            return failed(item, "internal", f"The handler did not answer within {timeout_s + _GRACE_S:g} s.")
        return answered(item, call, result)

    @app.post(EXECUTION_PATH)
    async def handle_execution(request: ExecutionRequest) -> Response:
        timeout_s = min(request.timeout_s or config.timeout_s, config.timeout_s)
        answers = await asyncio.gather(*(run(item, timeout_s) for item in request.query_contents))
        return json_response({"query_contents": answers})

    @app.post(RELEASE_PATH)
    async def release(request: ReleaseRequest) -> Response:
        for episode_id in request.episode_ids:
            handler.release(episode_id)
        return json_response({"released": len(request.episode_ids)})

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok", "search_engine": config.search_engine, "topk": config.topk})

    @app.get("/metrics")
    async def metrics() -> Response:
        return prometheus(handler.metrics())

    return app


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        config = config_from_arguments(__doc__, arguments)
        engine = config.search_engine if isinstance(config.search_engine, str) else ", ".join(config.search_engine)
        return serve(create_app(config), config.host, config.port, f"search server ({engine})")
    except ValueError as error:
        print(f"server_handler: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
