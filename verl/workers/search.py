"""The search of a rollout worker: which handler, and whether it answers."""

import asyncio
import time

from scrl.handler.client import HttpSearchHandler
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.types import ToolCall
from verl.trainer.config.schema import Config

_CHECK = ToolCall("web_search", {"query": ["What is the capital of France?"]})


async def open_search(config: Config) -> SearchHandler | HttpSearchHandler:
    """The handler that ``search.mode`` names, after a real query that it answered: better no run than one without
    results. Raises ValueError, with what to do about it, where there is no answer within ``search.timeout_s``.
    """
    settings, search = HandlerConfig.from_config(config), config.search
    handler = HttpSearchHandler(search.server_url, settings) if search.mode == "http" else SearchHandler(settings)
    if search.mode == "inprocess" and search.cache_mode == "replay":
        return handler  # it answers what was recorded, and nothing else
    result = await asyncio.wrap_future(handler.submit(_CHECK))
    if result.ok and result.cached:  # of an earlier run: the engine has yet to answer
        unasked = ToolCall("web_search", {"query": [f"France {time.time_ns()}"]})
        result = await asyncio.wrap_future(handler.submit(unasked))
    if result.ok or result.error_kind == "not_recorded":  # a server that replays answers nothing else
        return handler
    handler.close()
    if search.mode == "http":
        raise ValueError(
            f"search.mode=http, and nothing answers at search.server_url={search.server_url}: {result.error} Start the "
            "server (python scrl/handler/server_handler.py port=5004 search_engine=...; behind several of them, "
            "python scrl/handler/handler.py), or use search.mode=inprocess"
        )
    raise ValueError(
        f"search_engine={','.join(config.search_engine)} does not answer: {result.error}; try it by hand, or "
        "use another engine (search_engine=local needs no network)"
    )
