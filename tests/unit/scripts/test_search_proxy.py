"""SearXNG's protocol over our engines: shapes, failures, and our own searxng and proxy engines as clients."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from scrl.handler.config import HandlerConfig, config_from_arguments
from scrl.handler.handler import SearchHandler
from scrl.handler.web_search_agent.backend import SearchError
from scrl.types import ToolCall

ROOT = Path(__file__).resolve().parents[3]


class Engine:
    name = "test"

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        if query.startswith("fail "):
            raise SearchError(query.split()[1], f"it failed with {query.split()[1]}")
        rows = [
            {"title": f"{query} {i}", "url": f"https://a.example/{i}", "text": f"text \ud800 {i}"} for i in range(9)
        ]
        return [] if query == "nothing" else rows[:topk]

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("search_proxy", ROOT / "scripts/search_proxy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(script) -> httpx.AsyncClient:
    config = HandlerConfig(search_engine="duckduckgo", topk=2)
    app = script.create_app(config, SearchHandler(config, Engine()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


async def test_results_as_searxng_sends_them(client):
    reply = (await client.get("/search", params={"q": "Tarnow", "format": "json", "language": "en"})).json()
    assert (reply["query"], reply["number_of_results"], reply["unresponsive_engines"]) == ("Tarnow", 2, [])
    first, second = reply["results"]
    assert {"title": "Tarnow 0", "url": "https://a.example/0", "content": "text ? 0"}.items() <= first.items()
    assert second["title"] == "Tarnow 1" and second["engine"] == "duckduckgo"
    for params in ({"q": "nothing"}, {"q": "Tarnow", "pageno": 2}):
        assert (await client.get("/search", params=params)).json()["results"] == []


@pytest.mark.parametrize(
    ("params", "status", "said"),
    [
        ({}, 400, "q: Field required"),
        ({"q": ""}, 400, "q: String should have at least 1 character"),
        ({"q": " "}, 400, "non-empty"),
        ({"q": "a" * 2001}, 400, "q: String should have at most 2000 characters"),
        ({"q": "a", "format": "html"}, 400, "format=html is not served; use format=json"),
        ({"q": "a", "pageno": "x"}, 400, "pageno: "),
        ({"q": "fail rate_limited"}, 429, "it failed with rate_limited"),
        ({"q": "fail timeout"}, 504, "it failed with timeout"),
        ({"q": "fail no_backend"}, 424, "it failed with no_backend"),
        ({"q": "fail connection"}, 502, "it failed with connection"),
    ],
)
async def test_a_failure_is_a_status_and_one_sentence(client, params, status, said):
    reply = await client.get("/search", params=params)
    assert reply.status_code == status and said in reply.json()["error"]


def test_it_answers_before_a_client_of_the_default_timeout_gives_up(script):
    assert config_from_arguments("", [], script.DEFAULTS).timeout_s < HandlerConfig().timeout_s
    assert config_from_arguments("", ["timeout_s=60"], script.DEFAULTS).timeout_s == 60


def test_our_own_engines_read_it_from_a_process_started_anywhere(tmp_path, monkeypatch):
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Tarnow", "url": "w/1", "text": "A town."}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"SCRL_TOKEN": "s3cret"}
    process = subprocess.Popen(
        [sys.executable, "-P", ROOT / "scripts/search_proxy.py", "search_engine=local"]
        + ["index_corpus=corpus.jsonl", "port=0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[-1] + "/search"
        monkeypatch.setenv("SEARCH_PROXY_URL", url)
        monkeypatch.setenv("SEARXNG_URL", url)
        call = ToolCall("web_search", {"query": ["which town"]})
        for engine, token, kind in (("proxy", "s3cret", ""), ("proxy", "wrong", "x"), ("searxng", "s3cret", "x")):
            monkeypatch.setenv("SCRL_TOKEN", token)
            with SearchHandler(HandlerConfig(search_engine=engine)) as handler:
                (result,) = handler.handle([call])
            assert result.ok == (not kind), result.error
            if kind:
                assert "401" in result.error
            else:
                assert result.items == [[{"title": "Tarnow", "url": "w/1", "text": "A town."}]]
    finally:
        process.kill()
        process.communicate()


def test_mistakes_are_one_sentence(script, capsys, monkeypatch):
    monkeypatch.delenv("SCRL_TOKEN", raising=False)
    assert script.main(["search_engine=nowhere"]) == 2
    assert script.main(["search_engine=duckduckgo", "host=0.0.0.0"]) == 2
    unknown, open_to_all = capsys.readouterr().err.splitlines()
    assert unknown.startswith("search_proxy: ") and "nowhere" in unknown
    assert "host=0.0.0.0 can be reached from other machines" in open_to_all
