"""Which engine a configuration gives, and what it refuses."""

import json
import typing
from types import SimpleNamespace

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.web_search_agent.remote import RemoteBackend
from scrl.handler.web_search_agent.search_api import BACKENDS, FAMILY, check_engines, expand, make_backend
from scrl.types import ToolCall
from verl.trainer.config import load_config
from verl.trainer.config.schema import Engine
from verl.trainer.config.validation import check_inputs

ROW = {"title": "Tarnow", "url": "w/4", "text": "Tarnow is a town on the river Sel."}
KEYED = {name: engine for name, engine in BACKENDS.items() if getattr(engine, "key_variable", "")}


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    """No key or address of the machine that runs the tests."""
    for name, engine in BACKENDS.items():
        monkeypatch.delenv(getattr(engine, "url_variable", f"{name.upper()}_URL"), raising=False)
        monkeypatch.delenv(getattr(engine, "key_variable", "") or "SCRL_TOKEN", raising=False)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(ROW))
    return path


@pytest.mark.parametrize("engine", ["local", "rag", ("local",)])
def test_a_trainers_config_searches_the_local_index(corpus, engine):
    search = SimpleNamespace(index_corpus=str(corpus), index_dir="", topk=1, timeout_s=5.0, mode="inprocess")
    config = HandlerConfig.from_config(SimpleNamespace(search_engine=engine, search=search))
    assert (config.topk, config.timeout_s, config.max_queries) == (1, 5.0, HandlerConfig.max_queries)
    with SearchHandler(config) as handler:
        result = handler.handle([ToolCall("web_search", {"query": ["which river", "nowhere"]})])[0]
        assert "search/backend/local_s/p99" in handler.metrics()
    assert result.ok
    assert result.items == [[ROW], []]
    assert (corpus.parent / "index").is_dir()


def test_index_dir_is_used_when_given(corpus, tmp_path):
    SearchHandler(HandlerConfig(index_corpus=str(corpus), index_dir=str(tmp_path / "elsewhere"))).close()
    assert (tmp_path / "elsewhere").is_dir() and not (corpus.parent / "index").exists()


def test_two_corpora_have_two_cache_scopes(corpus, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**ROW, "title": "Else"}))
    scopes = [make_backend(HandlerConfig(index_corpus=str(path))).cache_scope for path in (corpus, other, corpus)]
    assert scopes[0] == scopes[2] != scopes[1]


def test_what_cannot_search_is_refused(tmp_path):
    with pytest.raises(ValueError, match="search_engine='googel' is no engine; use local, retriever, .*online_search"):
        make_backend(HandlerConfig(search_engine="googel"))
    with pytest.raises(ValueError, match="search_engine is an empty list"):
        make_backend(HandlerConfig(search_engine=()))
    with pytest.raises(ValueError, match="search.index_corpus is empty"):
        make_backend(HandlerConfig())
    with pytest.raises(ValueError, match="missing"):
        make_backend(HandlerConfig(index_corpus=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize("name", sorted(KEYED.keys() - {"proxy"}))
def test_a_missing_key_names_its_variable_and_where_to_get_one(name):
    variable = KEYED[name].key_variable
    with pytest.raises(
        ValueError, match=f"search_engine={name} needs a key, and {variable} is not set; .*export {variable}="
    ):
        make_backend(HandlerConfig(search_engine=("duckduckgo", name)))


def test_bings_missing_key_says_that_the_service_is_gone():
    with pytest.raises(ValueError, match="retired the Bing Search API on 11 August 2025"):
        check_engines("bing", {})


def test_the_proxy_needs_a_token_only_on_another_machine():
    assert check_engines("proxy", {"SEARCH_PROXY_URL": "http://localhost:8890"}) == ("proxy",)
    with pytest.raises(ValueError, match="SCRL_TOKEN is not set"):
        check_engines("proxy", {"SEARCH_PROXY_URL": "http://10.0.0.5:8890"})


def test_a_key_that_no_header_could_carry_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="BRAVE_API_KEY holds characters that no key has") as refusal:
        check_engines("brave", {"BRAVE_API_KEY": "se\ncret"})
    assert "cret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "http://127.0.0.1:8080/search"),
        ("http://search.lan", "http://search.lan/search"),
        ("https://search.lan:8443/sub/", "https://search.lan:8443/sub/search"),
        ("http://search.lan/search", "http://search.lan/search"),
    ],
)
def test_an_address_may_be_the_server_or_the_whole(given, asked):
    assert BACKENDS["searxng"].address({"SEARXNG_URL": given}) == asked


@pytest.mark.parametrize(
    "given", ["search.lan", "ftp://search.lan", "http://", "http://a:99999", "http://a/?q=1", "http://[::1"]
)
def test_an_address_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match="SEARXNG_URL=.* is not an address"):
        check_engines("searxng", {"SEARXNG_URL": given})


def test_family_names_stand_for_what_the_environment_has():
    assert expand("rag", {}) == ("local",)
    assert expand("rag", {"RETRIEVER_URL": "http://wiki:8000"}) == ("retriever",)
    assert expand("online_search", {}) == ("duckduckgo",)
    assert expand("online_search", {"TAVILY_API_KEY": "t", "SERPER_API_KEY": "s", "SEARXNG_URL": "http://s"}) == (
        "searxng",
        "google",
        "tavily",
        "duckduckgo",
    )
    assert expand(["brave", "online_search"], {"BRAVE_API_KEY": "b"}) == ("brave", "duckduckgo")  # each once


def test_the_trainer_knows_the_engines_and_takes_one_or_a_list():
    assert typing.get_args(Engine) == (*BACKENDS, *FAMILY)
    assert load_config(["search_engine=local"]).search_engine == ("local",)
    assert load_config(["search_engine=[searxng,duckduckgo]"]).search_engine == ("searxng", "duckduckgo")
    with pytest.raises(ValueError, match="google"):
        load_config(["search_engine=googel"])


def test_the_trainer_checks_keys_before_it_starts_anything():
    with pytest.raises(ValueError, match="search_engine=tavily needs a key, and TAVILY_API_KEY is not set"):
        check_inputs(load_config(["profile=cpu_demo", "search_engine=[local,tavily]"]))
    check_inputs(load_config(["profile=cpu_demo", "search_engine=tavily", "search.mode=http"]))  # the server's concern


def test_every_remote_engine_says_where_its_key_comes_from():
    remote = [engine for engine in BACKENDS.values() if isinstance(engine, type) and issubclass(engine, RemoteBackend)]
    assert len(remote) == 9
    assert all(bool(engine.key_variable) == bool(engine.key_source) for engine in remote)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", 0),
        ("max_queries", 0),
        ("max_workers", 0),
        ("cache_size", -1),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("rate_limit", 0),
        ("rate_limit", float("nan")),
        ("region", "USA"),
        ("language", "EN"),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"search.{name}={value!r}"):
        HandlerConfig(**{name: value})
