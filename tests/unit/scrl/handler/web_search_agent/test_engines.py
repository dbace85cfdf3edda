"""What only one engine on the network does."""

import logging

from tests.unit.scrl.handler.web_search_agent.protocols import (
    KEY,
    PROTOCOLS,
    ROWS,
    contents,
    encoded,
    failure,
    made,
)


def test_retriever_without_scores_and_with_titles(server, clock, reply, metrics, monkeypatch):
    backend = made("retriever", server, clock, metrics, monkeypatch)
    documents = [contents("Tarnow", "A town.\nOn a river."), {"title": "Sel", "text": "A river.", "url": "u"}]
    server.script = [reply(200, encoded({"result": [documents]}))]
    assert backend.search("who", 2, clock() + 30) == [
        {"title": "Tarnow", "url": "", "text": "A town.\nOn a river."},
        {"title": "Sel", "url": "u", "text": "A river."},
    ]
    assert backend.cache_scope == f"retriever|{server.url}/retrieve"
    backend.close()


def test_searxng_whose_engines_are_silent_is_an_error_not_an_empty_result(server, clock, reply, metrics, monkeypatch):
    backend = made("searxng", server, clock, metrics, monkeypatch)
    silent = [["google", "CAPTCHA"], ["brave", "timeout"]]
    found = PROTOCOLS["searxng"].found
    server.script = [
        reply(200, encoded({"results": [], "unresponsive_engines": silent})),
        reply(200, encoded(found | {"unresponsive_engines": silent})),
        reply(403, b"<html>Forbidden"),
    ]
    assert "didn't answer (google: CAPTCHA, brave: timeout)" in str(failure(backend, clock() + 30))
    assert backend.search("who", 2, clock() + 30) == ROWS
    assert "add json to search.formats" in str(failure(backend, clock() + 30))
    backend.close()


def test_errors_under_status_200_and_an_empty_account(server, clock, reply, metrics, monkeypatch):
    cases = [
        ("serpapi", 200, {"error": "Your searches for the month have run out."}, "bad_reply", "searches for the month"),
        ("baidu", 200, {"code": "quota", "message": "daily limit"}, "bad_reply", "reports quota: daily limit"),
        ("google", 400, {"message": "Not enough credits", "statusCode": 400}, "no_backend", "Not enough credits"),
        ("duckduckgo", 202, {}, "rate_limited", "a check for robots"),
    ]
    for engine, status, body, kind, said in cases:
        backend = made(engine, server, clock, metrics, monkeypatch)
        server.script = [reply(status, encoded(body))]
        error = failure(backend, clock() + 30)
        assert error.kind == kind and said in str(error)
        backend.close()


def test_the_key_is_in_no_log_though_serpapi_takes_it_in_the_address(
    server, clock, reply, metrics, monkeypatch, caplog
):
    backend = made("serpapi", server, clock, metrics, monkeypatch)
    server.script = [reply(500, KEY.encode()), server.reset, reply(200, encoded({"organic_results": [{"title": KEY}]}))]
    with caplog.at_level(logging.INFO):
        assert backend.search("who", 2, clock() + 30) == [{"title": "***", "url": "", "text": ""}]
    backend.close()
    assert KEY not in caplog.text and "sk-very" not in caplog.text and "sk-very" not in repr(backend)


def test_brave_loses_its_markup_and_nothing_else(server, clock, reply, metrics, monkeypatch):
    backend = made("brave", server, clock, metrics, monkeypatch)
    hit = {"title": "a < b and c > d", "url": "u", "description": "x<y, 1 <2> 3, <strong>so</strong>&lt;i&gt;<br/>."}
    server.script = [reply(200, encoded({"web": {"results": [hit]}}))]
    assert backend.search("who", 2, clock() + 30) == [
        {"title": "a < b and c > d", "url": "u", "text": "x<y, 1 <2> 3, so<i>."}
    ]
    backend.close()


def test_rate_limit_of_the_configuration_replaces_the_engines_own(server, clock, reply, metrics, monkeypatch):
    backend = made("brave", server, clock, metrics, monkeypatch, rate_limit=0.5)
    server.script = [reply(200, encoded(PROTOCOLS["brave"].found))]
    for _ in range(3):
        backend.search("who", 2, clock() + 30)
    backend.close()
    assert clock.sleeps == [2.0, 2.0]
