"""Which search a rollout worker gets, and that it must have answered a real query by then."""

import json
import socket

import pytest

from scrl.handler.client import HttpSearchHandler
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
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


async def test_what_a_cache_kept_does_not_answer_for_the_engine(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
    monkeypatch.setenv("RETRIEVER_URL", url)

    class Earlier:
        name, cache_scope = "retriever", f"retriever|{url}"

        def search(self, query, topk, deadline):
            return [{"title": "Paris", "url": "w/1", "text": "The capital of France."}]

        def close(self): ...

    cache = str(tmp_path / "cache.sqlite")
    with SearchHandler(HandlerConfig(cache_path=cache, search_engine=("retriever",)), Earlier()) as handler:
        assert handler.handle([_CHECK])[0].ok
    config = Config(search_engine=("retriever",), search=SearchConfig(timeout_s=1.0, cache_path=cache))
    with pytest.raises(ValueError, match="search_engine=retriever does not answer"):
        await open_search(config)


async def test_a_server_that_was_not_started_is_said_with_how_to_start_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = Config(search=SearchConfig(mode="http", server_url=url, timeout_s=1.0))
    with pytest.raises(ValueError, match=f"nothing answers at search.server_url={url}: No search server") as error:
        await open_search(config)
    assert "python scrl/handler/server_handler.py" in str(error.value)


async def test_http_is_ready_when_its_server_answers(corpus):
    import threading

    import uvicorn

    from scrl.handler.server_handler import create_app

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(HandlerConfig(index_corpus=corpus)), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            handler = await open_search(Config(search=SearchConfig(mode="http", server_url=url)))
            with handler:
                assert isinstance(handler, HttpSearchHandler)
        finally:
            server.should_exit = True
            thread.join(20)
