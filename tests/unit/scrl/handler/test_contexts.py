"""Episodes' contexts: what is kept, for how long, and that nothing is left behind."""

import asyncio
import threading

import pytest

from scrl.handler.config import HandlerConfig
from scrl.handler.contexts import EpisodeContexts, url_key
from scrl.handler.handler import SearchHandler
from scrl.llm_agent import prompts
from scrl.llm_agent.generation import GenerationSettings, LLMGenerationManager
from scrl.types import EpisodeRequest, ToolCall
from verl.workers.rollout.base import Completion


def test_an_episode_has_its_own_urls_and_notes():
    contexts = EpisodeContexts()
    contexts.record("a", ["https://x.example/1", "https://x.example/2"], "first")
    contexts.record("b", ["https://y.example/"], "other")
    contexts.record("a", ["https://x.example/2"], "second")
    contexts.learn("a", ["one", "two"])
    contexts.learn("a", ["two", "three"])
    assert contexts.allowed("a") == {"https://x.example/1": "first", "https://x.example/2": "second"}
    assert contexts.allowed("b") == {"https://y.example": "other"} and contexts.allowed("c") == {}
    assert contexts.known("a") == {"one", "two", "three"} and contexts.known("b") == frozenset()


def test_released_is_forgotten_and_what_lands_late_brings_nothing_back():
    contexts = EpisodeContexts()
    contexts.record("a", ["https://x.example/"])
    contexts.release("a")
    contexts.release("a")
    contexts.release("unknown")
    contexts.record("a", ["https://x.example/"])
    contexts.learn("a", ["late"])
    assert len(contexts) == 0 and not contexts.allowed("a") and not contexts.known("a")


def test_no_episode_keeps_nothing():
    contexts = EpisodeContexts()
    contexts.record("", ["https://x.example/"])
    contexts.learn("", ["a"])
    contexts.release("")
    assert len(contexts) == 0 and not contexts.allowed("") and not contexts.known("")


def test_what_nobody_releases_is_bounded():
    contexts = EpisodeContexts(max_episodes=10, max_urls=4, max_notes=3)
    for i in range(1000):
        contexts.record(f"e{i}", [f"https://x.example/{j}" for j in range(20)])
        contexts.learn(f"e{i}", [str(j) for j in range(20)])
        contexts.record("busy", ["https://x.example/busy"])
    assert len(contexts) == 10 and contexts.allowed("busy")
    assert contexts.allowed("e999").keys() == {f"https://x.example/{j}" for j in range(16, 20)}  # the newest
    assert contexts.known("e999") == {"17", "18", "19"} and not contexts.allowed("e0")
    for i in range(1000):
        contexts.release(f"e{i}")
    assert len(contexts) == 1 and len(contexts._released) == 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://a.example", "https://a.example/"),
        ("HTTPS://A.Example/Path", "https://a.example/Path"),
        (" https://a.example/x#y ", "https://a.example/x"),
    ],
)
def test_spellings_of_one_url(one, other):
    assert url_key(one) == url_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("https://a.example/x", "http://a.example/x"), ("https://a.example/X", "https://a.example/x"),
     ("https://a.example/?q=1", "https://a.example/?q=2"), ("http://[", "http://]"), ("\ud800", "\ud801")],
)  # fmt: skip
def test_urls_that_differ(one, other):
    assert url_key(one) != url_key(other)


def test_threads_may_share_them():
    contexts = EpisodeContexts(max_episodes=50)

    def use(thread: int) -> None:
        for i in range(500):
            episode = f"{thread}/{i}"
            contexts.record(episode, ["https://x.example/"])
            assert contexts.allowed(episode).keys() <= {"https://x.example"}
            contexts.release(episode)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(contexts) == 0


SEARCH = 'x</think><tool_call>{"name": "web_search", "arguments": {"query": ["q"]}}</tool_call>'
BROWSE = (
    'x</think><tool_call>{"name": "browse_webpage", "arguments": {"url_list": ["https://u.example/q"]}}</tool_call>'
)
ANSWER = "x</think><answer>y</answer>"


class Engine:
    """Each episode searches, browses and answers; uids named ``fail`` break in their third turn."""

    def __init__(self, tokenizer) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._stop = tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def generate(self, prompt_ids, params):
        uid, _, turn = params.order
        if uid == "fail" and turn == 2:
            raise RuntimeError("the engine died")
        ids = [*self._encode((SEARCH, BROWSE, ANSWER)[turn]), self._stop]
        return Completion(ids, [0.0] * len(ids), "stop", version=1)

    def begin_episode(self) -> None: ...
    def end_episode(self) -> None: ...


class Backend:
    name = cache_scope = "test"

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        self.entered.set()
        assert self.gate.wait(30)
        return [{"title": "T", "url": f"https://u.example/{query}", "text": "text"}]

    def close(self) -> None: ...


SETTINGS = GenerationSettings(3000, 2500, 300, 200, tools=("web_search", "browse_webpage"))


async def test_no_growth_over_many_episodes_whether_they_end_fail_or_are_cancelled(tokenizer):
    backend = Backend()
    prompt = prompts.encode_prompt(tokenizer, "q?", SETTINGS.tools)
    request = lambda uid, i: EpisodeRequest(uid, i, 0, "q?", ["y"], "test", prompt, max_turns=3)  # noqa: E731
    with SearchHandler(HandlerConfig(cache_size=0), backend) as handler:
        manager = LLMGenerationManager(Engine(tokenizer), tokenizer, handler, SETTINGS)
        for i in range(20):
            episodes = await manager.run([request("ok", i), request("fail", i)])
            assert [episode.finish for episode in episodes] == ["answer", "error"]
            assert len(handler._contexts) == 0
        backend.gate.clear()
        backend.entered.clear()
        running = asyncio.ensure_future(manager.run([request("cancelled", i) for i in range(10)]))
        assert await asyncio.to_thread(backend.entered.wait, 30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        backend.gate.set()
        handler.handle([ToolCall("web_search", {"query": ["after"]})])
    assert len(handler._contexts) == 0  # though their search came back after they had gone
