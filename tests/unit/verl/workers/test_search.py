"""Which search a rollout worker gets, and that it must have answered a real query by then."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from scrl.handler.client import HttpSearchHandler
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.server_handler import create_app
from scrl.types import ToolCall
from verl.trainer.config.schema import Config, SearchConfig
from verl.workers.search import _CHECK, open_search


@pytest.fixture
def corpus(tmp_path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"title": "Tarnow", "url": "w/4", "text": "Tarnow is a town."}))
    return str(path)


async def test_inprocess_answers_a_query_at_the_start(corpus):
    handler = await open_search(Config(search=SearchConfig(index_corpus=corpus)))
    with handler:
        assert isinstance(handler, SearchHandler)
        assert handler.metrics()["search/calls"] == 1
        assert handler.handle([ToolCall("web_search", {"query": ["town"]})])[0].items[0][0]["url"] == "w/4"


async def test_an_engine_that_does_not_answer_is_said_at_the_start(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RETRIEVER_URL", f"http://127.0.0.1:{port}/retrieve")
    config = Config(search_engine=("retriever",), search=SearchConfig(timeout_s=1.0))
    with pytest.raises(ValueError, match="search_engine=retriever does not answer: .*; try it by hand"):
        await open_search(config)


@pytest.fixture
def earlier(monkeypatch, tmp_path):
    """Makes the cache of an earlier run over a retriever that isn't there any more; its path."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
    monkeypatch.setenv("RETRIEVER_URL", url)

    class Earlier:
        name, cache_scope = "retriever", f"retriever|{url}"

        def search(self, query, topk, deadline):
            return [{"title": "Paris", "url": "w/1", "text": "The capital of France."}]

        def close(self): ...

    def run(query: str = _CHECK.arguments["query"][0], **values: str) -> str:
        path = str(tmp_path / "cache.sqlite")
        config = HandlerConfig(cache_path=path, search_engine=("retriever",), **values)
        with SearchHandler(config, Earlier()) as handler:
            assert handler.handle([ToolCall("web_search", {"query": [query]})])[0].ok
        return path

    return run


async def test_what_a_cache_kept_does_not_answer_for_the_engine(earlier):
    search = SearchConfig(timeout_s=1.0, cache_path=earlier())
    with pytest.raises(ValueError, match="search_engine=retriever does not answer"):
        await open_search(Config(search_engine=("retriever",), search=search))


async def test_a_server_that_was_not_started_is_said_with_how_to_start_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = Config(search=SearchConfig(mode="http", server_url=url, timeout_s=1.0))
    with pytest.raises(ValueError, match=f"nothing answers at search.server_url={url}: No search server") as error:
        await open_search(config)
    assert "python scrl/handler/server_handler.py" in str(error.value)


@contextmanager
def served(config: HandlerConfig) -> Iterator[str]:
    """The URL of a search server that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(config), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


async def test_http_is_ready_when_its_server_answers(corpus):
    with served(HandlerConfig(index_corpus=corpus)) as url:
        handler = await open_search(Config(search=SearchConfig(mode="http", server_url=url)))
        with handler:
            assert isinstance(handler, HttpSearchHandler)


async def test_a_cache_of_the_server_does_not_answer_for_its_engine_either(earlier):
    config = HandlerConfig(cache_path=earlier(), search_engine=("retriever",), timeout_s=1.0)
    with served(config) as url, pytest.raises(ValueError, match="search.mode=http, and nothing answers at"):
        await open_search(Config(search=SearchConfig(mode="http", server_url=url, timeout_s=3.0)))


@pytest.mark.parametrize("query", ["something else", _CHECK.arguments["query"][0]])
async def test_a_server_that_replays_is_ready_whatever_it_recorded(earlier, query):
    recording = earlier(query, cache_mode="record")
    with served(HandlerConfig(cache_path=recording, cache_mode="replay")) as url:
        with await open_search(Config(search=SearchConfig(mode="http", server_url=url))) as handler:
            found, missing = handler.handle([ToolCall("web_search", {"query": [q]}) for q in (query, "never asked")])
        assert found.items[0][0]["url"] == "w/1" and missing.error_kind == "not_recorded"
