"""Which engine a configuration gives, and what it refuses."""

import json
from types import SimpleNamespace

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.web_search_agent.search_api import make_backend
from scrl.types import ToolCall


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"title": "Tarnow", "url": "w/4", "text": "Tarnow is a town on the river Sel."}))
    return path


@pytest.mark.parametrize("engine", ["local", "rag"])
def test_a_trainers_config_searches_the_local_index(corpus, engine):
    search = SimpleNamespace(index_corpus=str(corpus), index_dir="", topk=1, timeout_s=5.0, mode="inprocess")
    config = HandlerConfig.from_config(SimpleNamespace(search_engine=engine, search=search))
    assert (config.topk, config.timeout_s, config.max_queries) == (1, 5.0, HandlerConfig.max_queries)
    with SearchHandler(config) as handler:
        result = handler.handle([ToolCall("web_search", {"query": ["which river", "nowhere"]})])[0]
        assert "search/backend/local_s/p99" in handler.metrics()
    assert result.ok
    assert result.items == [[{"title": "Tarnow", "url": "w/4", "text": "Tarnow is a town on the river Sel."}], []]
    assert (corpus.parent / "index").is_dir()


def test_index_dir_is_used_when_given(corpus, tmp_path):
    SearchHandler(HandlerConfig(index_corpus=str(corpus), index_dir=str(tmp_path / "elsewhere"))).close()
    assert (tmp_path / "elsewhere").is_dir() and not (corpus.parent / "index").exists()


def test_what_cannot_search_is_refused(tmp_path):
    with pytest.raises(ValueError, match="search_engine='google' is not one that this version has; use local or rag"):
        make_backend(HandlerConfig(search_engine="google"))
    with pytest.raises(ValueError, match="search.index_corpus is empty"):
        make_backend(HandlerConfig())
    with pytest.raises(ValueError, match="missing"):
        make_backend(HandlerConfig(index_corpus=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", 0),
        ("max_queries", 0),
        ("max_workers", 0),
        ("cache_size", -1),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"search.{name}={value}"):
        HandlerConfig(**{name: value})
