"""The examples of doc/architecture.md run: each is taken from the page, added as it says, and used."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from scrl.handler import tools
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.web_search_agent import engines, search_api
from scrl.llm_agent import prompts
from scrl.llm_agent.parsing import parse_turn
from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config.schema import RewardConfig
from verl.trainer.ppo import advantages
from verl.workers.reward_manager.naive import NaiveRewardManager

PAGE = (Path(__file__).resolve().parents[2] / "doc" / "architecture.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"the page has no example {name!r}"
    return found[1]


def test_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(prompts.TOOLS, "calculate", {})
    monkeypatch.setitem(tools.TOOL_FUNCTIONS, "calculate", None)
    exec(example("tool, told"), {"TOOLS": prompts.TOOLS})
    exec(example("tool, done"), vars(tools).copy())
    arguments = json.dumps({"name": "calculate", "arguments": {"expression": ["1946 - 1904", "rm -r"]}})
    call = parse_turn(f"<think>x</think><tool_call>{arguments}</tool_call>")
    assert isinstance(call, ToolCall)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "t", "url": "u", "text": "x"}) + "\n")
    with SearchHandler(HandlerConfig(index_corpus=str(corpus))) as handler:
        (result,) = handler.handle([call])
    assert result.ok and result.items[0][0]["text"] == "42"
    assert result.items[1] == [] and "not a sum" in result.error


def test_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(example("reward"))
    manager = NaiveRewardManager(RewardConfig(custom=f"{file}:reward", use_early_stop_penalty=False))
    turn = Turn("answer", answer="In Kopim", span=(0, 1))
    episode = Episode("u", 0, 0, "Where?", ["Kopim"], "demo", [1], [2], [1], [-0.1], [turn], "answer")
    scores, _ = manager([episode], 1)
    assert scores.tolist() == [[pytest.approx(1.0 - 0.02)]]


def test_an_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(advantages.ADVANTAGE_ESTIMATORS, "centred_by_batch", None)
    exec(example("estimator"), vars(advantages).copy())
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    got, returns = advantages.ADVANTAGE_ESTIMATORS["centred_by_batch"](
        rewards, mask, [0, 0], turn_index=None, gamma=1.0
    )
    assert got.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.fixture
def library() -> Iterator[str]:
    class Library(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"books": [{"title": self.path, "link": "u", "abstract": "a"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Library)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_search_engine(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(search_api.BACKENDS, "library", None)
    monkeypatch.setenv("LIBRARY_URL", library)
    exec(example("engine"), vars(engines) | {"BACKENDS": search_api.BACKENDS})
    with SearchHandler(HandlerConfig(search_engine="library", topk=2)) as handler:
        (result,) = handler.handle([ToolCall("web_search", {"query": ["old maps"]})])
    assert result.items == [[{"title": "/api/search?q=old+maps&limit=2", "url": "u", "text": "a"}]], result.error
