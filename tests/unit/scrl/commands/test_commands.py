"""The commands by hand: the demo's corpus is searched and browsed, its policy answers, a mistake is one sentence."""

import argparse
import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from rich.console import Console

from scrl.__main__ import main, split_overrides
from scrl.agent import Agent, find_run, latest_checkpoint, read_adapter
from scrl.commands import ask
from scrl.commands.serve import create_app
from scrl.types import Episode, Turn
from verl.trainer.config import load_config

ROOT = Path(__file__).resolve().parents[4]
QUESTION = "In which city was the director of The Ashen Valley born?"


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", "replace")


def pieces(text: str) -> list[str]:
    thought = ask.ThoughtText(Bytes())
    return [thought.add(byte) for byte in text.encode()]


def test_a_thought_is_told_as_it_comes_and_its_action_is_not() -> None:
    assert "".join(pieces("I see.</think>\n<answer>x</answer>")) == "I see."
    assert "".join(pieces("a </thin b")) == "a </thin b"
    assert pieces("é<") == ["", "é", ""]  # half a character, and what may begin the tag, wait


def test_search_shows_the_page_and_browse_its_text(capsys: pytest.CaptureFixture) -> None:
    assert main(["search", "The Ashen Valley", "--topk", "2"]) == 0
    shown = capsys.readouterr().out
    assert "The Ashen Valley" in shown and "film.demo.example" in shown and "2 results" in shown
    url = "https://film.demo.example/The_Ashen_Valley"
    assert main(["browse", url, "--engine", "local", "--question", "Who directed it?"]) == 0
    assert "directed by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", ""], "nothing to search for"),
        (["search", "x", "--engine", "nowhere"], "'nowhere' is no engine"),
        (["search", "x", "topk=0"], "topk=0 is too small"),
        (["search", "x", "--topk", "0"], "topk=0 is too small"),
        (["search", "topk=0", "x"], "topk=0 is too small"),
        (["ask", "--chat", "--model", "data/demo/policy", "max_trns=3"], "did you mean max_turns?"),
        (["serve", "--model", "no/such/model", "--port", "0"], "no/such/model"),
        (["ask", "x", "--model", "/no/such/folder"], "--model=/no/such/folder: there is no such folder"),
        (["ask", "x", "--adapter", "no/such/run"], "--adapter=no/such/run: there is no such folder"),
        (
            ["serve", "--port", "0", "--model", "data/demo/policy", "search.mode=http"]
            + ["search.server_url=http://127.0.0.1:9", "search.timeout_s=2"],
            "search.server_url=http://127.0.0.1:9",
        ),
        (["ask"], "there is no question"),
        (["ask", "x", "--adapter", "data/demo", "--model", "data/demo/policy"], "holds no PEFT adapter"),
        (["ask", "x", "--model", "no/such/model"], "no/such/model"),
        (["ask", "x", "--model", "data/demo/policy", "--temperature", "-1"], "is below 0"),
        (["ask", "x", "--model", "data/demo/policy", "max_trns=3"], "did you mean max_turns?"),
        (["ask", "word " * 2000, "--model", "data/demo/policy"], "the question is too long"),
        (
            ["ask", "x", "--model", "data/demo/policy", "search.mode=http", "search.server_url=http://127.0.0.1:9"]
            + ["search.timeout_s=2"],
            "search.server_url=http://127.0.0.1:9",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err.strip()
    assert words in told and "Traceback" not in told
    assert len(told.splitlines()) == 1


def test_key_value_words_are_told_from_questions_and_options_values() -> None:
    words = ["ask", "max_turns=3", "What is x=1 + y?", "--model", "a=b", "--chat", "+a.b=[1,2]", "--topk=2", "c=d"]
    rest, overrides = split_overrides(words)
    assert rest == ["ask", "What is x=1 + y?", "--model", "a=b", "--chat", "--topk=2"]
    assert overrides == ["max_turns=3", "+a.b=[1,2]", "c=d"]
    assert split_overrides(["ask", "topk=1", "--", "x=1"]) == (["ask", "--", "x=1"], ["topk=1"])
    assert split_overrides(["browse", "https://a.example/?q=1"])[1] == []


def test_without_a_checkpoint_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train first"):
        latest_checkpoint(tmp_path)
    for name in ("global_step_9", "global_step_10", "global_step_x"):
        (tmp_path / "checkpoints" / name / "adapter").mkdir(parents=True)
    assert latest_checkpoint(tmp_path).name == "global_step_10"  # by number, not by name
    assert find_run(tmp_path / "checkpoints" / "global_step_10") is None
    (tmp_path / "config.yaml").write_text("{}")
    assert find_run(tmp_path / "checkpoints" / "global_step_10" / "adapter") == tmp_path / "config.yaml"
    with pytest.raises(ValueError, match="holds no PEFT adapter"):
        read_adapter(tmp_path)


def test_a_page_can_neither_mark_up_nor_steer_the_terminal() -> None:
    out = Console(file=io.StringIO(), width=100)
    listener = ask.ConsoleListener(out, Bytes())
    listener.observation(Turn("tool_call", sources=[("[red]x[/red]\x1b[2J", "https://a.example/[link]")]))
    shown = out.file.getvalue()
    assert "[red]x[/red]" in shown and "\x1b" not in shown and "[link]" in shown


@pytest.fixture(scope="module")
def agent() -> Agent:
    overrides = ["profile=cpu_demo", "actor_rollout_ref.model.path=data/demo/policy", "max_turns=1"]
    return Agent(load_config(overrides))


def test_chat_endpoint_streams_thoughts_and_answers_as_openai_does(agent: Agent) -> None:
    asked = {"model": "any", "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]}
    with TestClient(create_app(agent)) as client:
        whole = client.post("/v1/chat/completions", json=asked).json()
        message = whole["choices"][0]["message"]
        assert message["content"] and message["reasoning_content"]
        assert whole["usage"]["completion_tokens"] > 0
        lines = client.post("/v1/chat/completions", json=asked | {"stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        assert deltas[-1]["finish_reason"] == "stop"
        # Greedy: the stream says what the whole reply said.
        assert "".join(d["delta"].get("reasoning_content", "") for d in deltas) == message["reasoning_content"]
        assert "".join(d["delta"].get("content", "") for d in deltas) == message["content"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "miniresearcher"
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "w " * 4000}]})
        assert refused.status_code == 400 and "too long" in refused.json()["error"]["message"]
        for path, body, status in [
            ("chat/completions", "{", 400),
            ("chat/completions", "{}", 400),
            ("other", "{}", 404),
        ]:
            refused = client.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
            told = refused.json()["error"]
            assert refused.status_code == status and told["message"] and told["type"] == "invalid_request_error"


async def test_chat_endpoint_and_openais_own_client(agent: Agent) -> None:
    import httpx
    import openai

    await agent.open()
    transport = httpx.ASGITransport(create_app(agent))
    messages = [{"role": "user", "content": [{"type": "text", "text": None}, {"type": "text", "text": "who \ud83d"}]}]
    async with httpx.AsyncClient(transport=transport, base_url="http://agent/v1") as http:
        client = openai.AsyncOpenAI(base_url="http://agent/v1", api_key="x", http_client=http, max_retries=0)
        # As a client sends it: half an emoji, and null for what isn't said.
        body = json.dumps({"model": "any", "messages": messages, "stream": None, "n": None, "temperature": None})
        reply = await http.post("/chat/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
        chunks = await client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": QUESTION}],
            stream=True,
            stream_options={"include_usage": True},
        )
        seen = [chunk async for chunk in chunks]
        assert seen[-1].choices == [] and seen[-1].usage.completion_tokens > 0 and seen[-2].usage is None
        assert (await client.models.retrieve("miniresearcher")).id == "miniresearcher"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            await client.models.retrieve("gpt")
        with pytest.raises(openai.BadRequestError, match="n: Input should be less than or equal to 1"):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}], n=2)


class Failing:
    """An agent whose episodes fail, or whose own code does."""

    tokenizer, failed = Bytes(), False

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def encode(self, question: str) -> list[int]:
        return [1]

    async def answer(self, question: str, *_: object) -> Episode:
        if self.raises:
            raise RuntimeError("out of memory at /home/me/secret")
        episode = Episode("u", 0, 0, question, [], "ask", [1], [], [], [], [], "error")
        episode.error = "Turn 0 failed: RuntimeError: out of memory at /home/me/secret"
        return episode


@pytest.mark.parametrize("raises", [False, True])
async def test_an_episode_that_fails_is_an_error_of_the_server_and_tells_no_internals(raises: bool, caplog) -> None:
    import httpx
    import openai

    transport = httpx.ASGITransport(create_app(Failing(raises)), raise_app_exceptions=False)
    asked = {"model": "any", "messages": [{"role": "user", "content": "Who?"}]}
    async with httpx.AsyncClient(transport=transport, base_url="http://agent/v1") as http:
        client = openai.AsyncOpenAI(base_url="http://agent/v1", api_key="x", http_client=http, max_retries=0)
        with pytest.raises(openai.InternalServerError) as whole:
            await client.chat.completions.create(**asked)
        with pytest.raises(openai.APIError, match="the episode failed; the server's log says why") as streamed:
            async for _ in await client.chat.completions.create(**asked, stream=True):
                pass
    assert "secret" not in str(whole.value) and "secret" not in str(streamed.value)


async def test_an_engine_that_died_ends_the_server(monkeypatch) -> None:
    import httpx

    signals: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", signals.append)
    agent = Failing(raises=False)
    app = create_app(agent)
    asked = {"messages": [{"role": "user", "content": "Who?"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent/v1") as http:
        assert (await http.post("/chat/completions", json=asked)).status_code == 500
        assert not signals and not app.state.engine_died
        agent.failed = True
        assert (await http.post("/chat/completions", json=asked)).status_code == 500
    assert signals == [signal.SIGTERM] and app.state.engine_died


def test_an_episode_is_saved_as_rollout_files_are(agent: Agent, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("verl.trainer.config.paths.REPO_ROOT", tmp_path)
    turn = Turn("answer", "<think>I know.</think><answer>Kopim</answer>", "I know.", answer="Kopim", span=(0, 1))
    episode = Episode("ask-1", 0, 0, QUESTION, [], "ask", [1, 2], [3], [1], [-0.5], [turn], "answer")
    (row,) = json.loads((Path.cwd() / agent.save(episode)).read_text())
    assert row["question"] == QUESTION and row["answer"] == "Kopim" and row["turns"][0]["think"] == "I know."


async def test_a_client_that_leaves_ends_its_episode() -> None:
    class Waiting:
        """An agent that never comes to an end."""

        tokenizer, failed = Bytes(), False

        def __init__(self) -> None:
            self.asked, self.cancelled = asyncio.Event(), False

        def encode(self, question: str) -> list[int]:
            return [1]

        async def answer(self, *_: object) -> Episode:
            self.asked.set()
            try:
                return await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    waiting = Waiting()
    body = json.dumps({"messages": [{"role": "user", "content": "Who?"}]}).encode()
    sent: list[dict] = []

    async def receive() -> dict:
        if not waiting.asked.is_set() and not sent:
            sent.append({})
            return {"type": "http.request", "body": body}
        await waiting.asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "http_version": "1.1"}
    scope["headers"] = [(b"content-type", b"application/json")]
    async with asyncio.timeout(20):
        await create_app(waiting)(scope, receive, send)
        while not waiting.cancelled:
            await asyncio.sleep(0)
    assert sent[1]["status"] == 499


def test_ctrl_c_ends_cleanly(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    def interrupted(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ask, "run", interrupted)
    assert main(["ask", "x"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_asyncio_loop_is_left_alone_by_opening_twice(agent: Agent) -> None:
    """An agent is opened inside the loop that will use it."""
    own = Agent(agent.config)

    async def play() -> Episode:
        await own.open()
        try:
            return await own.answer(QUESTION)
        finally:
            own.close()

    assert asyncio.run(play()).turns


PROMPT = """
import asyncio, signal
from scrl.commands.ask import _read_question

async def chat():
    while _read_question():
        pass

try:
    asyncio.run(chat())
except KeyboardInterrupt:
    print("STOPPED", flush=True)
"""


def test_ctrl_c_at_the_chat_prompt_ends_at_once(tmp_path: Path) -> None:
    """Not only after Enter, as a thread's ``input`` would."""
    master, terminal = pty.openpty()
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + PROMPT
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        os.close(terminal)
        shown = b""
        while b"? " not in shown:
            assert select.select([master], [], [], 60)[0], "no prompt came"
            shown += os.read(master, 1000)
        for _ in range(5):  # one that comes between the prompt and its wait for a line is not heard
            process.send_signal(signal.SIGINT)
            if select.select([master], [], [], 5)[0]:
                break
        while b"STOPPED" not in shown:
            assert select.select([master], [], [], 30)[0], "Ctrl-C did not end it"
            shown += os.read(master, 1000)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
