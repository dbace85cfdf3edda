"""Every engine on the network as this machine's tests know it: replies in recorded shapes, and what a request holds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.remote import RemoteBackend
from scrl.handler.web_search_agent.resilience import Guard
from scrl.handler.web_search_agent.search_api import BACKENDS, SearchError

KEY = "sk-very/secret+key=1"
HITS = [
    ("Tarnow", "https://w.org/wiki/Tarnow", "A town on the river Sel."),
    ("Sel (river)", "https://w.org/wiki/Sel", "Höhe 12 m; 北京 & more"),
]
ROWS = [dict(zip(("title", "url", "text"), hit, strict=True)) for hit in HITS]


def items(title: str, url: str, text: str, **more: Any) -> list[dict[str, Any]]:
    return [{title: hit[0], url: hit[1], text: hit[2], **more} for hit in HITS]


def contents(title: str, text: str) -> dict[str, str]:
    return {"id": "12", "contents": f'"{title}"\n{text}'}


@dataclass
class Protocol:
    """One engine's replies in the shapes recorded from it, and what a request to it must hold."""

    found: Any
    nothing: Any
    asks: Callable[[Any], Any]  # received -> (query, results wanted, key)
    asked: tuple[Any, ...] = ("who", 2, KEY)
    path: str = ""
    localised: dict[str, str] = field(default_factory=dict)  # what region=de, language=zh adds
    rows: list[dict[str, str]] = field(default_factory=lambda: ROWS)


def page(*hits: tuple[str, str, str]) -> str:
    """DuckDuckGo's HTML page."""
    results = "".join(
        f'<div class="result results_links results_links_deep web-result"><div class="links_main result__body">'
        f'<h2 class="result__title"><a rel="nofollow" class="result__a" href="{url}">{title}</a></h2>'
        f'<div class="result__extras"><a class="result__url" href="{url}"> w.org </a></div>'
        f'<a class="result__snippet" href="{url}">{text}</a></div></div>'
        for title, url, text in hits
    )
    none = "" if hits else '<div class="no-results">No results found for <b>who</b></div>'
    title = "<title>who at DuckDuckGo</title>"
    return f'<!DOCTYPE html><html><head>{title}</head><body><div id="links">{results}{none}</div></body></html>'


def form(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode(), keep_blank_values=True))


PROTOCOLS: dict[str, Protocol] = {
    "retriever": Protocol(
        found={"result": [[{"document": contents(t, x) | {"url": u}, "score": 0.8} for t, u, x in HITS]]},
        nothing={"result": [[]]},
        asks=lambda r: (*r.json["queries"], r.json["topk"], r.json["return_scores"]),
        asked=("who", 2, True),
        path="/retrieve",
    ),
    "searxng": Protocol(
        found={"query": "who", "number_of_results": 0, "results": items("title", "url", "content", engine="google")},
        nothing={"query": "who", "number_of_results": 0, "results": [], "answers": [], "unresponsive_engines": []},
        asks=lambda r: (r.params["q"], r.params["format"]),
        asked=("who", "json"),
        path="/search",
        localised={"language": "zh"},
    ),
    "google": Protocol(
        found={
            "searchParameters": {"q": "who"},
            "organic": items("title", "link", "snippet", position=1),
            "credits": 1,
        },
        nothing={"searchParameters": {"q": "who"}, "organic": [], "credits": 1},
        asks=lambda r: (r.json["q"], r.json["num"], r.headers["x-api-key"]),
        path="/search",
        localised={"gl": "de", "hl": "zh"},
    ),
    "serpapi": Protocol(
        found={"search_metadata": {"status": "Success"}, "organic_results": items("title", "link", "snippet")},
        nothing={
            "search_metadata": {"status": "Success"},
            "search_information": {"organic_results_state": "Fully empty"},
            "error": "Google hasn't returned any results for this query.",
        },
        asks=lambda r: (r.params["q"], int(r.params["num"]), r.params["api_key"]),
        path="/search.json",
        localised={"gl": "de", "hl": "zh"},
    ),
    "bing": Protocol(
        found={"_type": "SearchResponse", "webPages": {"value": items("name", "url", "snippet")}},
        nothing={"_type": "SearchResponse", "queryContext": {"originalQuery": "who"}},
        asks=lambda r: (r.params["q"], int(r.params["count"]), r.headers["ocp-apim-subscription-key"]),
        path="/v7.0/search",
        localised={"cc": "de", "setLang": "zh"},
    ),
    "duckduckgo": Protocol(
        found=page(*HITS),
        nothing=page(),
        asks=lambda r: (form(r.body)["q"], form(r.body)["l"]),
        asked=("who", "wt-wt"),
        path="/html/",
        localised={"l": "de-zh"},
    ),
    "baidu": Protocol(
        found={"request_id": "1", "references": items("title", "url", "content", id=1, type="web", web_anchor="w")},
        nothing={"request_id": "1", "references": []},
        asks=lambda r: (
            r.json["messages"][0]["content"],
            r.json["resource_type_filter"][0]["top_k"],
            r.headers["authorization"].removeprefix("Bearer "),
        ),
        path="/v2/ai_search/web_search",
    ),
    "tavily": Protocol(
        found={
            "query": "who",
            "answer": None,
            "results": items("title", "url", "content", score=0.9, raw_content=None),
        },
        nothing={"query": "who", "answer": None, "results": []},
        asks=lambda r: (r.json["query"], r.json["max_results"], r.headers["authorization"].removeprefix("Bearer ")),
        path="/search",
    ),
    "brave": Protocol(
        found={
            "type": "search",
            "web": {
                "results": [
                    {
                        "title": t,
                        "url": u,
                        "description": x.replace("river", "<strong>river</strong>").replace("&", "&amp;"),
                    }
                    for t, u, x in HITS
                ]
            },
        },
        nothing={"type": "search", "query": {"original": "who"}, "mixed": {}},
        asks=lambda r: (r.params["q"], int(r.params["count"]), r.headers["x-subscription-token"]),
        path="/res/v1/web/search",
        localised={"country": "DE", "search_lang": "zh-hans"},
    ),
    "proxy": Protocol(
        found={"query": "who", "results": items("title", "url", "content")},
        nothing={"query": "who", "results": []},
        asks=lambda r: (r.params["q"], r.params["format"], r.headers["authorization"].removeprefix("Bearer ")),
        asked=("who", "json", KEY),
        path="/search",  # which language it searches in is what it was started with
    ),
}


def encoded(body: Any) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def made(name, server, clock, metrics, monkeypatch, **config: Any) -> RemoteBackend:
    for variable in ("SERPER_API_KEY", "SERPAPI_API_KEY", "BING_SEARCH_KEY", "QIANFAN_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    monkeypatch.setenv("SCRL_TOKEN", KEY)
    guard = Guard if clock is None else partial(Guard, clock=clock, sleep=clock.sleep)
    return BACKENDS[name](HandlerConfig(**config), metrics, url=server.url, guard=guard)


def counts(metrics: HandlerMetrics, name: str) -> dict[str, float]:
    prefix = f"search/backend/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.as_dict().items() if key.startswith(prefix)}


def failure(backend, deadline: float) -> SearchError:
    with pytest.raises(SearchError) as caught:
        backend.search("who", 2, deadline)
    assert str(caught.value).startswith(f"{backend.name} ") and KEY not in str(caught.value)
    assert ("retired" in str(caught.value)) == (backend.name == "bing")
    return caught.value
