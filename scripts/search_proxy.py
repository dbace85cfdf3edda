"""Search for machines without internet: SearXNG's protocol over this machine's search engines.

    python scripts/search_proxy.py 'search_engine=[google,duckduckgo]' [port=8890] [key=value ...]

It answers ``GET /search?q=...&format=json`` as a SearXNG does, from any engine or chain of them that
scrl/handler/config.yaml can name, with their rate limits, retries, circuit breakers and the cache. API keys come from
this machine's environment and never leave it.

A GPU box without internet, and a laptop with it:

    laptop$  python scripts/search_proxy.py search_engine=duckduckgo cache_path=search_cache.sqlite
    laptop$  ssh -N -R 8890:127.0.0.1:8890 -o ServerAliveInterval=30 -o ExitOnForwardFailure=yes gpu-box
    gpu-box$ curl 'http://127.0.0.1:8890/search?q=test&format=json'
    gpu-box$ bash train_grpo.sh search_engine=proxy

The tunnel needs no token, since both ends are 127.0.0.1. Without a tunnel, with host=0.0.0.0, export the same
SCRL_TOKEN on both machines, and SEARCH_PROXY_URL=http://laptop:8890/search on the GPU box.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Response

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

from scrl.handler.config import HandlerConfig, config_from_arguments  # noqa: E402
from scrl.handler.handler import SearchHandler  # noqa: E402
from scrl.handler.http_service import closing, json_error, json_response, make_app, prometheus, serve  # noqa: E402
from scrl.types import ToolCall  # noqa: E402

# More results than one would train with: SearXNG's protocol has no count, whoever asks takes what they want. And an
# answer, if only "too late", before a client with 30 s gives up.
DEFAULTS = ("search_engine=duckduckgo", "topk=10", "port=8890", "timeout_s=25")
_STATUS = {
    "bad_request": 400,
    "not_recorded": 404,
    "no_backend": 424,
    "rate_limited": 429,
    "internal": 500,
    "timeout": 504,
}


def create_app(config: HandlerConfig, handler: SearchHandler | None = None) -> FastAPI:
    """The proxy over ``handler`` (default: one built from ``config``), which it closes when it ends."""
    handler = SearchHandler(config) if handler is None else handler
    app = make_app("search proxy", closing(handler))

    @app.get("/search")
    async def search(
        q: Annotated[str, Query(min_length=1, max_length=2000)],
        format: str = "json",
        pageno: Annotated[int, Query(ge=1)] = 1,
    ) -> Response:
        if format != "json":
            return json_error(400, f"format={format[:80]} is not served; use format=json")
        if pageno > 1:  # there is one page
            return json_response(_reply(config, q, []))
        call = ToolCall("web_search", {"query": [q]})
        result = await asyncio.wrap_future(handler.submit(call))  # resolved by its deadline, whatever happens
        if not result.ok:
            return json_error(_STATUS.get(result.error_kind, 502), result.error)
        return json_response(_reply(config, q, result.items[0]))

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok", "search_engine": config.search_engine})

    @app.get("/metrics")
    async def metrics() -> Response:
        return prometheus(handler.metrics())

    return app


def _reply(config: HandlerConfig, query: str, rows: Sequence[dict[str, str]]) -> dict[str, object]:
    engine = config.search_engine if isinstance(config.search_engine, str) else "+".join(config.search_engine)
    results = [
        {"title": row["title"], "url": row["url"], "content": row["text"], "engine": engine, "category": "general"}
        for row in rows
    ]
    nothing = ("answers", "corrections", "infoboxes", "suggestions", "unresponsive_engines")
    return {"query": query, "number_of_results": len(results), "results": results} | {name: [] for name in nothing}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        config = config_from_arguments(__doc__, arguments, DEFAULTS)
        return serve(create_app(config), config.host, config.port, "search proxy")
    except ValueError as error:
        print(f"search_proxy: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
