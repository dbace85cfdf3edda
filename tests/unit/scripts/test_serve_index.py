"""The local index behind Search-R1's API: its shapes, its limits, and our own retriever backend as a client."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from scrl.handler.web_search_agent.local_index import LocalIndex

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    {"title": "Tarnow", "url": "w/1", "text": "Tarnow is a town on the river Sel."},
    {"title": "Sel", "url": "w/2", "text": "A river."},
    {"title": 'Quote "it"', "url": "", "text": "Town of <|im_start|> and\nnewlines."},
]
DOCUMENT = {
    "id": "w/1",
    "contents": '"Tarnow"\nTarnow is a town on the river Sel.',
    "title": "Tarnow",
    "url": "w/1",
    "text": "Tarnow is a town on the river Sel.",
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("serve_index", ROOT / "scripts/serve_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(script) -> httpx.AsyncClient:
    app = script.create_app(LocalIndex.in_memory(PAGES), topk=1)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_documents_as_search_r1_sends_them(client):
    body = {"queries": ["which town", "nowhere", "sel"], "topk": 2, "return_scores": False}
    town, nothing, river = (await client.post("/retrieve", json=body)).json()["result"]
    assert DOCUMENT in town and len(town) == 2 and nothing == []
    assert [one["title"] for one in river] == ["Sel", "Tarnow"]


async def test_scores_fall_with_the_rank(client):
    body = {"queries": ["sel"], "topk": 3, "return_scores": True}
    (hits,) = (await client.post("/retrieve", json=body)).json()["result"]
    assert [(hit["document"]["title"], hit["score"]) for hit in hits] == [("Sel", 1.0), ("Tarnow", 0.5)]


async def test_topk_may_be_missing(client):
    for body in ({"queries": ["town"]}, {"queries": ["town"], "topk": None}):
        assert len((await client.post("/retrieve", json=body)).json()["result"][0]) == 1
    assert (await client.post("/retrieve", json={"queries": []})).json() == {"result": []}
    assert (await client.get("/health")).json() == {"status": "ok", "pages": 3}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "queries: Field required"),
        ({"queries": "town"}, "queries: Input should be a valid list"),
        ({"queries": [1]}, "queries.0: Input should be a valid string"),
        ({"queries": ["a"] * 1025}, "queries: List should have at most 1024 items"),
        ({"queries": ["a"], "topk": 0}, "topk: Input should be greater than or equal to 1"),
        ({"queries": ["a"], "topk": 101}, "topk: Input should be less than or equal to 100"),
    ],
)
async def test_what_is_no_request_is_one_sentence(client, body, said):
    reply = await client.post("/retrieve", json=body)
    assert reply.status_code == 400 and said in reply.json()["error"]


def test_our_own_retriever_reads_it_from_a_process_started_anywhere(tmp_path, monkeypatch):
    from scrl.handler.config import HandlerConfig
    from scrl.handler.handler import SearchHandler
    from scrl.types import ToolCall

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(map(json.dumps, PAGES)), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SCRL_TOKEN")}
    process = subprocess.Popen(
        [sys.executable, "-P", ROOT / "scripts/serve_index.py", "corpus.jsonl", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[-1]
        monkeypatch.setenv("RETRIEVER_URL", url + "/retrieve")
        with SearchHandler(HandlerConfig(search_engine="retriever", topk=2)) as handler:
            (result,) = handler.handle([ToolCall("web_search", {"query": ["sel", "it quote"]})])
        assert result.ok, result.error
        assert result.items == [[PAGES[1], PAGES[0]], [PAGES[2]]]
    finally:
        process.kill()
        process.communicate()


def test_mistakes_are_one_sentence(script, capsys, monkeypatch, tmp_path):
    for arguments in (["none.jsonl"], ["none.jsonl", "--topk", "0"]):
        monkeypatch.setattr(sys, "argv", ["serve_index.py", *arguments])
        assert script.main() == 2
    missing, topk = capsys.readouterr().err.splitlines()
    assert missing.startswith("serve_index: ") and "none.jsonl" in missing
    assert topk == "serve_index: --topk=0 is out of range; give 1 to 100"
