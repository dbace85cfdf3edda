"""browse_webpage through the handler: the demo's pages offline, several pages of a call, deadlines, and over HTTP."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from scrl.handler.client import HttpSearchHandler
from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.server_handler import create_app
from scrl.handler.web_search_agent.browser import NOTHING_NEW, Page, PageSource
from scrl.handler.web_search_agent.fetch import PageError
from scrl.llm_agent import prompts
from scrl.llm_agent.generation import GenerationSettings, LLMGenerationManager
from scrl.types import EpisodeRequest, ToolCall
from verl.workers.rollout.base import Completion

DEMO = Path(__file__).parents[4] / "data/demo/corpus.jsonl"
FILM = "https://film.demo.example/The_Silver_Bridge"
QUESTION = "When did the film The Silver Bridge come out?"


def search(query: str) -> ToolCall:
    return ToolCall("web_search", {"query": [query]})


def browse(*urls: str) -> ToolCall:
    return ToolCall("browse_webpage", {"url_list": list(urls)})


class Gated(PageSource):
    """A source whose pages named slow* wait for ``gate``; ``fail`` and ``bug`` raise."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)

    def load(self, url: str, deadline: float) -> Page:
        name = url.rpartition("/")[2]
        self.entered.release()
        if name.startswith("slow"):
            assert self.gate.wait(30)
        if name == "fail":
            raise PageError("bad_reply", "no page")
        if name == "bug":
            raise KeyError(name)
        return Page(name.title(), f"The page {name} says so.")


class OneRow:
    name = cache_scope = "one"

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        return [{"title": query, "url": f"https://p.example/{query}", "text": "snippet"}]

    def close(self) -> None: ...


def handler_over(pages: Gated, **values) -> SearchHandler:
    return SearchHandler(HandlerConfig(**values), OneRow(), pages)


def test_an_episode_reads_the_demos_page_that_its_search_found():
    with SearchHandler(HandlerConfig(index_corpus=str(DEMO))) as handler:
        ask = lambda call, episode="e": handler.submit(call, episode_id=episode, question=QUESTION).result(30)  # noqa: E731
        assert ask(browse(FILM)).error == f"{FILM} is not among this episode's search results"
        found = ask(search("The Silver Bridge")).items[0][0]
        assert found["url"] == FILM
        read = ask(browse(FILM, "https://elsewhere.example/"))
        assert read.ok and read.items[1] == [] and read.error_kind == "bad_request"
        assert read.items[0] == [{"title": "The Silver Bridge", "url": FILM, "text": found["text"]}]
        assert ask(browse(FILM)).items[0][0]["text"] == NOTHING_NEW
        assert ask(browse(FILM), "another").error_kind == "bad_request"
        handler.release("e")
        assert ask(browse(FILM)).error_kind == "bad_request"
        assert handler.metrics()["search/browse/loads"] == 1


def test_pages_of_a_call_keep_their_order_and_fail_alone():
    with handler_over(Gated(), browse_any_url=True, max_queries=4) as handler:
        result = handler.handle([browse(*(f"https://p.example/{name}" for name in ("b", "fail", "a", "bug", "over")))])[
            0
        ]
    assert [[row["text"] for row in rows] for rows in result.items] == [
        ["The page b says so."], [], ["The page a says so."], [], [],
    ]  # fmt: skip
    assert (result.ok, result.error_kind, result.error) == (True, "bad_reply", "no page")


def test_a_failure_is_a_value():
    with handler_over(Gated(), browse_any_url=True) as handler:
        result = handler.handle([browse("https://p.example/bug")])[0]
    assert (result.ok, result.error_kind, result.error) == (False, "internal", "browse_webpage: KeyError: 'bug'")


def test_slow_pages_keep_their_calls_deadline_and_hold_up_no_search():
    pages = Gated()
    with handler_over(pages, browse_any_url=True, max_workers=2) as handler:
        slow = [handler.submit(browse(f"https://p.example/slow{i}"), timeout_s=0.5) for i in range(6)]
        for _ in range(2):
            assert pages.entered.acquire(timeout=20)
        assert handler.submit(search("x")).result(20).ok
        assert {future.result(timeout=20).error_kind for future in slow} == {"timeout"}
        pages.gate.set()
        assert handler.submit(browse("https://p.example/next"), timeout_s=30).result(60).ok


def test_what_a_page_says_does_not_depend_on_which_is_faster():
    """Two pages of one call say the same; neither's notes are missing because the other was first."""
    pages = Gated()
    pages.load = lambda url, deadline: Page("T", "The same sentence.")
    with handler_over(pages, browse_any_url=True) as handler:
        for i in range(20):
            call = browse(f"https://p.example/{i}a", f"https://p.example/{i}b")
            result = handler.submit(call, episode_id=f"e{i}").result(30)
            assert [rows[0]["text"] for rows in result.items] == ["The same sentence."] * 2


def test_closing_answers_what_is_being_read():
    pages = Gated()
    handler = handler_over(pages, browse_any_url=True)
    waiting = handler.submit(browse("https://p.example/slow"))
    assert pages.entered.acquire(timeout=20)
    closer = threading.Thread(target=handler.close)
    closer.start()
    assert waiting.result(timeout=20).error == "the search handler was closed"
    pages.gate.set()
    closer.join(timeout=20)
    assert not closer.is_alive()


def test_over_http_the_client_says_what_its_episode_may_read(serve_app):
    pages = Gated()
    # As behind a balancer: what answers the browsing has not seen the search.
    searching = serve_app(create_app(HandlerConfig(), handler_over(pages)))
    reading = serve_app(create_app(HandlerConfig(), handler_over(pages)))
    with HttpSearchHandler(searching, HandlerConfig()) as client:
        client.submit(search("a"), episode_id="e", question="?").result(30)
        client._url = reading
        read = client.submit(browse("https://p.example/a"), episode_id="e", question="?").result(30)
        refused = client.submit(browse("https://p.example/b"), episode_id="e", question="?").result(30)
        client.release("e")
        released = client.submit(browse("https://p.example/a"), episode_id="e", question="?").result(30)
    assert read.items == [[{"title": "A", "url": "https://p.example/a", "text": "The page a says so."}]]
    assert refused.error_kind == released.error_kind == "bad_request"


def test_over_http_a_page_is_read_for_the_query_that_found_it(serve_app):
    """Whichever server reads, it says what the one that searched would say, and what a handler in the process does."""
    pages = Gated()
    filler = "\n".join(f"Sentence number {i} is about the weather of the day." for i in range(200))
    pages.load = lambda url, deadline: Page("T", f"{filler}\nThe zebrafish was found in 1822.")
    texts = []
    for search_at, read_at in ((0, 0), (0, 1), (None, None)):
        urls = [serve_app(create_app(HandlerConfig(), handler_over(pages))) for _ in range(2)]
        client = handler_over(pages) if search_at is None else HttpSearchHandler(urls[search_at], HandlerConfig())
        with client:
            client.submit(search("zebrafish"), episode_id="e", question="When?").result(30)
            if read_at is not None:
                client._url = urls[read_at]
            url = "https://p.example/zebrafish"
            texts.append(client.submit(browse(url), episode_id="e", question="When?").result(30).items[0][0]["text"])
    assert texts == ["The zebrafish was found in 1822."] * 3


class Policy:
    """Searches for the film, reads its page, and answers with the year that it was shown."""

    def __init__(self, tokenizer, actions: list[str]) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._decode, self._stop = tokenizer.decode, tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._actions = actions

    async def generate(self, prompt_ids, params):
        ids = [*self._encode("x</think>" + self._actions[params.order[2]]), self._stop]
        return Completion(ids, [0.0] * len(ids), "stop", version=1)

    def begin_episode(self) -> None: ...
    def end_episode(self) -> None: ...


@pytest.mark.parametrize("index", [0, 1000, 2500])
def test_a_demo_episode_with_both_tools(tokenizer, index):
    row = json.loads(DEMO.read_text().splitlines()[index])
    tools = ("web_search", "browse_webpage")
    call = lambda tool: f"<tool_call>{json.dumps({'name': tool.name, 'arguments': tool.arguments})}</tool_call>"  # noqa: E731
    actions = [call(search(row["title"])), call(browse(row["url"])), "<answer>y</answer>"]
    settings = GenerationSettings(6000, 5000, 400, 2000, tools)
    with SearchHandler(HandlerConfig(index_corpus=str(DEMO), topk=1)) as handler:
        manager = LLMGenerationManager(Policy(tokenizer, actions), tokenizer, handler, settings)
        prompt = prompts.encode_prompt(tokenizer, "Who?", tools)
        request = EpisodeRequest("u", 0, 0, "Who?", ["y"], "demo", prompt, max_turns=2)
        episode = asyncio.run(manager.run_episode(request))
    assert (episode.finish, episode.search_depth, [turn.search_ok for turn in episode.turns[:2]]) == (
        "answer",
        2,
        [True] * 2,
    )
    (read,) = json.loads(episode.turns[1].observation)
    assert read == {"query": row["url"], "results": [{key: row[key] for key in ("title", "url", "text")}]}


def test_reading_a_page_of_the_demo_costs_next_to_nothing():
    with SearchHandler(HandlerConfig(index_corpus=str(DEMO), browse_any_url=True)) as handler:
        handler.handle([browse(FILM)])
        started = time.process_time()
        for i in range(200):
            handler.submit(browse(FILM), episode_id=f"e{i}").result(30)
        assert time.process_time() - started < 2
