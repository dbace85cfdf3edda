"""Pages into text, viewports, the page cache, and what an episode may read."""

import io
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from scrl.handler.config import HandlerConfig
from scrl.handler.contexts import EpisodeContexts
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.reading_agent.reader import ReadTask
from scrl.handler.web_search_agent import browser_extract
from scrl.handler.web_search_agent.browser import (
    NOTHING_NEW,
    Browser,
    CorpusPages,
    NoPages,
    Page,
    PageSource,
    WebPages,
    make_source,
    split_views,
)
from scrl.handler.web_search_agent.browser_cache import SingleFlightCache
from scrl.handler.web_search_agent.browser_pool import ExtractorPool
from scrl.handler.web_search_agent.fetch import HTML, PDF, TEXT, PageError, RawPage

DEMO = Path(__file__).parents[5] / "data/demo/corpus.jsonl"
ARTICLE = """<!DOCTYPE html><html><head><title>Red  Harbour - Wiki</title><script>var x = "no";</script></head><body>
<nav><a href="/">Home</a> <a href="/about">About us</a></nav><article><h1>Red Harbour</h1>
<p>Red Harbour is a port in the north of the country, known for its lighthouse and its old market square.</p>
<p>It was founded in 1721 by Ann Keller, who had come from the south with two ships and forty people.</p>
<table><tr><td>Population</td><td>12,345</td></tr></table></article><footer>Cookie settings</footer></body></html>"""


def later(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


# Bytes into text: in this process, then through the worker processes.


def test_html_gives_the_article_and_its_title():
    page = browser_extract.extract(HTML, ARTICLE.encode())
    assert page["title"] == "Red Harbour - Wiki" and page["plain"] is False
    assert "founded in 1721 by Ann Keller" in page["text"] and "12,345" in page["text"]
    assert "Home" not in page["text"] and "Cookie" not in page["text"] and "var x" not in page["text"]


def test_xhtml_may_declare_its_encoding():
    declared = '<?xml version="1.0" encoding="iso-8859-1"?>' + ARTICLE.replace("Keller", "Këller")
    assert "Ann Këller" in browser_extract.extract(HTML, declared.encode(), "utf-8")["text"]


def test_a_page_without_an_article_is_read_whole_without_its_scripts():
    body = b"<title>T</title><style>p{}</style>" + b"<div>a<br>b</div><script>no()</script>" * 60_000
    page = browser_extract.extract(HTML, body)
    assert (page["title"], page["plain"]) == ("T", True)
    assert page["text"].startswith("a\nb\na\nb") and "no()" not in page["text"] and "p{}" not in page["text"]


@pytest.mark.parametrize(
    ("body", "said", "text"),
    [
        ("é ü 北京".encode(), "", "é ü 北京"),
        ("é ü".encode("latin-1"), "", "é ü"),
        ("“é”".encode("cp1252"), "iso-8859-1", "“é”"),
        ("\ufeff北京".encode("utf-16-le"), "utf-8", "北京"),
        (b"\xef\xbb\xbfabc", "latin-1", "abc"),
        ("北京".encode("gb2312"), "gb2312", "北京"),
        ('<meta charset="shift_jis">東京'.encode("shift_jis"), "", '<meta charset="shift_jis">東京'),
        (b"ab\xffc", "utf-8", "ab\ufffdc"),
        (b"plain", "zlib_codec", "plain"),
        (b"plain", "punycode", "plain"),
        (b"plain", "no-such", "plain"),
        (b"", "utf-8", ""),
    ],
)
def test_charsets(body, said, text):
    assert browser_extract.decode(body, said) == text


def test_text_is_cleaned():
    text = browser_extract.extract(TEXT, "a\0b\x1b[31m  c\r\n\r\n\n d\u2028e\x07\tf".encode())["text"]
    assert text == "ab[31m c\nd e f"
    assert len(browser_extract.extract(TEXT, b"a" * 3_000_000)["text"]) == browser_extract.MAX_TEXT


def pdf(*texts: str, title: str = "", packed: bool = False, password: str = "") -> bytes:
    writer = pypdf.PdfWriter()
    font = DictionaryObject({
        NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
        NameObject("/BaseFont"): NameObject("/Helvetica"),
    })  # fmt: skip
    for text in texts:
        page = writer.add_blank_page(300, 300)
        page[NameObject("/Resources")] = DictionaryObject({
            NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})
        })  # fmt: skip
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream.flate_encode() if packed else stream)
    writer.add_metadata({"/Title": title})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_pdf_gives_its_pages_text():
    page = browser_extract.extract(PDF, pdf("First page.", "Second page.", title="A Report"))
    assert (page["title"], page["text"]) == ("A Report", "First page.\nSecond page.")


@pytest.mark.parametrize(
    "body", [b"%PDF-1.7 nothing", b"%PDF-1.4\n" + b"\0" * 1000, pdf("x")[:300], pdf("x", password="a")]
)
def test_a_pdf_that_cannot_be_read(body):
    with pytest.raises(ValueError, match="PDF"):
        browser_extract.extract(PDF, body)


@pytest.fixture(scope="module")
def pool():
    pool = ExtractorPool(1)
    ballast = b"x" * (browser_extract.RETIRE_MEMORY + (50 << 20))  # a trainer is large, and its readers must not mind
    pool.extract(RawPage("http://a/", TEXT, "", b"warm"), later(120))
    del ballast
    yield pool
    pool.close()


def test_worker_processes_read_pages_one_after_the_other(pool):
    process = pool._workers.queue[-1]._process
    for number in range(20):
        body = ARTICLE.replace("Ann", f"Ann{number}").encode()
        page = pool.extract(RawPage("http://a/", HTML, "utf-8", body), later())
        assert f"Ann{number} Keller" in page.text and page.title == "Red Harbour - Wiki"
    assert pool._workers.queue[-1]._process is process and process.poll() is None
    with pytest.raises(PageError, match="damaged"):
        pool.extract(RawPage("http://a/", PDF, "", b"%PDF-1.4"), later())
    assert process.poll() is None


def test_a_worker_that_dies_costs_one_page(pool):
    process = pool._workers.queue[-1]._process
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(PageError) as caught:
        pool.extract(RawPage("http://a/", HTML, "", b"<p>x"), later())
    assert caught.value.kind == "bad_reply" and "broke its parser" in str(caught.value)
    assert pool.extract(RawPage("http://a/", TEXT, "", b"next"), later(120)).text == "next"


def test_a_worker_in_the_middle_of_a_page_is_never_used_again(pool, monkeypatch):
    worker = pool._workers.queue[-1]
    monkeypatch.setattr(worker, "_receive", lambda limit: json.loads("{"))
    with pytest.raises(ValueError):
        pool.extract(RawPage("http://a/", TEXT, "", b"one"), later())
    assert worker._process.poll() is not None
    assert pool.extract(RawPage("http://a/", TEXT, "", b"next"), later(120)).text == "next"


def test_a_worker_that_hangs_is_replaced_at_the_deadline(pool):
    process = pool._workers.queue[-1]._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(PageError) as caught:
        pool.extract(RawPage("http://a/", HTML, "", b"<p>x" * 1_000_000), later(0.3))
    assert (caught.value.kind, caught.value.lasting) == ("timeout", False)
    assert process.poll() is not None
    assert pool.extract(RawPage("http://a/", TEXT, "", b"next"), later(120)).text == "next"


def test_what_takes_too_much_cpu_or_memory_ends():
    pool = ExtractorPool(1, cpu_seconds=0.3, memory=400 << 20)
    assert pool.extract(RawPage("http://a/", HTML, "", ARTICLE.encode()), later(120)).title
    with pytest.raises(PageError) as caught:
        pool.extract(RawPage("http://a/", HTML, "", b"<p>x" * 40_000), later(120))
    assert (caught.value.kind, caught.value.lasting) == ("timeout", True) and "too long to read" in str(caught.value)
    pool.close()
    pool = ExtractorPool(1, cpu_seconds=60.0, memory=220 << 20)
    with pytest.raises(PageError) as caught:
        pool.extract(RawPage("http://a/", HTML, "", b"<a>" * 1_600_000), later(120))
    assert caught.value.kind == "bad_reply"
    assert pool.extract(RawPage("http://a/", HTML, "", ARTICLE.encode()), later(120)).title
    pool.close()


def test_workers_get_no_secret_and_leave_when_their_owner_does(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "abc123")
    monkeypatch.setenv("DATABASE", "postgres://me:def456@db")  # a secret by no name
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    pool = ExtractorPool(2)
    pool.extract(RawPage("http://a/", TEXT, "", b"x"), later(120))
    worker = pool._workers.queue[-1]
    environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    assert b"abc123" not in environment and b"def456" not in environment
    assert b"\0LC_TIME=C.UTF-8\0" in environment and b"PATH=" in environment
    worker._channel.close()  # as the kernel does when this process is killed
    assert worker._process.wait(timeout=30) == 0
    pool.close()
    with pytest.raises(PageError, match="closed"):
        pool.extract(RawPage("http://a/", TEXT, "", b"x"), later())


# Viewports.


def test_views_hold_the_whole_text_and_are_cut_at_lines_then_words():
    text = "\n".join(f"line {i} " + "word " * (i % 7) for i in range(500))
    views = list(split_views(text, 200))
    assert "".join(" ".join(views).split()) == "".join(text.split())
    assert max(map(len, views)) <= 200 and min(map(len, views[:-1])) >= 100
    assert all(view.startswith("line") for view in views)
    assert [len(view) for view in split_views("x" * 1000, 300)] == [300, 300, 300, 100]
    assert list(split_views("one two three four", 16)) == ["one two three", "four"]
    assert list(split_views("", 100)) == list(split_views(" \n ", 100)) == []


# The cache.


def test_a_value_is_made_once_for_all_who_ask_at_once():
    cache, made, gate = SingleFlightCache(100, lambda value: 1), [], threading.Event()

    def make():
        made.append(1)
        assert gate.wait(30)
        return "value", 60.0

    with ThreadPoolExecutor(50) as threads:
        waiting = [threads.submit(cache.get, "k", make, later()) for _ in range(50)]
        with pytest.raises(TimeoutError):
            cache.get("k", make, later(0.05))
        gate.set()
        assert {future.result(timeout=30) for future in waiting} == {"value"}
    assert made == [1] and cache.get("k", make, later()) == "value"


def test_an_error_is_everybodys_unless_it_is_passing():
    calls, entered, gate = [], threading.Event(), threading.Event()
    cache = SingleFlightCache(100, lambda value: 1, is_passing=lambda error: isinstance(error, PageError))

    def failing(error: Exception):
        calls.append(error)
        if len(calls) == 1:
            entered.set()
            assert gate.wait(30)
            raise error
        return "value", 60.0

    for error, expected in ((PageError("timeout", "hurried"), "value"), (KeyError("x"), KeyError)):
        calls.clear(), entered.clear(), gate.clear()
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(cache.get, error, lambda e=error: failing(e), later())
            assert entered.wait(30)
            second = threads.submit(cache.get, error, lambda e=error: failing(e), later())
            while not cache._flights[error]._condition._waiters:  # until it waits for the first one's
                time.sleep(0.001)
            gate.set()
            assert first.exception(timeout=30) is error
            if expected == "value":
                assert second.result(timeout=30) == "value" and len(calls) == 2
            else:
                assert second.exception(timeout=30) is error and len(calls) == 1


def test_the_cache_keeps_within_its_weight_and_its_time():
    cache, made = SingleFlightCache(10, len), []

    def put(key: str, value: str, seconds: float = 60.0) -> str:
        return cache.get(key, lambda: (made.append(key), (value, seconds))[1], later())

    put("a", "xxx"), put("b", "xxxx"), put("a", "xxx"), put("c", "xxxx")  # 4 + 5 + 5 weigh too much: b goes
    put("a", "xxx"), put("b", "xxxx")
    assert made == ["a", "b", "c", "b"]
    put("huge", "x" * 50), put("never", "x", 0.0), put("never", "x", 0.0)
    assert made[4:] == ["huge", "never", "never"] and cache._weight <= 10


# Sources.


def test_the_demos_pages_are_read_from_its_corpus():
    source = make_source(HandlerConfig(index_corpus=str(DEMO)), HandlerMetrics())
    rows = [json.loads(line) for line in DEMO.read_text().splitlines()]
    assert isinstance(source, CorpusPages) and len(rows) > 3000
    assert all(row["text"] in source.load(row["url"], later()).text for row in rows)
    with pytest.raises(PageError) as caught:
        source.load("https://elsewhere.example/", later())
    assert caught.value.kind == "bad_request"


def test_rows_of_one_url_are_one_page_and_those_without_none(tmp_path):
    rows = [("A", "https://a.example/", "one"), ("A", "https://A.example", "two"), ("B", "", "no page")]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(dict(zip(("title", "url", "text"), row, strict=True))) + "\n" for row in rows))
    assert CorpusPages(corpus).load("https://a.example/", later()) == Page("A", "one\ntwo")


def test_of_a_corpus_too_large_to_hold_what_searches_found_can_be_read(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "A", "url": "https://a.example/", "text": "one"}\n')
    monkeypatch.setattr("scrl.handler.web_search_agent.browser._LOOKUP_BYTES", 10)
    monkeypatch.setattr("scrl.handler.web_search_agent.browser._SEEN_ROWS", 2)
    chained = {"search_engine": ("local", "duckduckgo"), "cache_mode": "replay", "cache_path": "cache"}
    for source in (
        CorpusPages(corpus),
        make_source(HandlerConfig(index_corpus=str(corpus), **chained), HandlerMetrics()),
    ):
        _, browser = make_browser(source)
        for name in "abc":
            browser.remember([{"title": name, "url": f"https://{name}.example/", "text": f"text {name}"}])
        assert source.load("https://c.example", later()) == Page("c", "text c")
        with pytest.raises(PageError):
            source.load("https://a.example/", later())


def test_where_pages_come_from(tmp_path):
    def source(**values):
        return make_source(HandlerConfig(**values), HandlerMetrics())

    web = source(search_engine="duckduckgo")
    assert isinstance(web, WebPages)
    web.close()
    assert isinstance(source(search_engine=("duckduckgo", "local")), WebPages)
    assert isinstance(source(index_corpus=str(tmp_path / "none.jsonl")), NoPages)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "A", "url": "https://a.example/", "text": "one"}\n')
    chain = source(
        search_engine=("local", "duckduckgo"), index_corpus=str(corpus), cache_mode="replay", cache_path="cache"
    )
    assert chain.load("https://a.example", later()) == Page("A", "one")
    with pytest.raises(PageError, match="no recording of web pages"):  # the web's turn
        chain.load("https://b.example", later())
    chain.close()
    replay = source(search_engine="duckduckgo", cache_mode="replay", cache_path=str(tmp_path / "cache"))
    with pytest.raises(PageError) as caught:
        replay.load("https://a.example/", later())
    assert caught.value.kind == "no_backend"


# Reading for an episode.


class Pages(PageSource):
    """A source of pages by URL; an error is raised. ``loads`` counts."""

    def __init__(self, **pages: str | PageError) -> None:
        self.pages, self.loads = pages, []

    def load(self, url: str, deadline: float) -> Page:
        url = url.partition("#")[0]
        self.loads.append(url)
        page = self.pages[url.rpartition("/")[2]]
        if isinstance(page, PageError):
            raise page
        return Page("Title", page)


class Recorder:
    """A reader that gives the first words of each view, those not known."""

    name = "recorder"

    def __init__(self) -> None:
        self.tasks: list[ReadTask] = []

    def read(self, task: ReadTask) -> list[str]:
        self.tasks.append(task)
        return [note for view in task.views if (note := view[:7]) not in task.known]

    def close(self) -> None: ...


def make_browser(source: Pages, reader=None, **values):
    contexts = EpisodeContexts()
    return contexts, Browser(
        HandlerConfig(**values), contexts, HandlerMetrics(), source, reader or Recorder(), environ={}
    )


def test_an_episode_reads_what_its_searches_found_and_is_told_each_thing_once():
    reader = Recorder()
    contexts, browser = make_browser(Pages(a="view 1 " * 20 + "view 2 " * 20), reader, page_view_port_size=140)
    contexts.record("e", ["https://p.example/a"], "the query")
    read = lambda: browser.read("https://p.example/a#x", browser.visit("e", "Why?"), later())  # noqa: E731
    assert read() == {"title": "Title", "url": "https://p.example/a#x", "text": "view 1  view 2 "}
    assert read()["text"] == NOTHING_NEW
    task = reader.tasks[1]
    assert (task.question, task.query, task.known) == ("Why?", "the query", {"view 1 ", "view 2 "})
    contexts.record("other", ["https://p.example/a"])
    assert browser.read("https://p.example/a", browser.visit("other", "Why?"), later())["text"] == "view 1  view 2 "


def test_no_more_views_than_the_budget():
    reader = Recorder()
    _, browser = make_browser(
        Pages(a="word " * 10_000), reader, browse_any_url=True, page_view_port_size=100, max_page_views=3
    )
    browser.read("https://p.example/a", browser.visit("", ""), later())
    assert len(reader.tasks[0].views) == 3


def test_what_no_search_found_is_not_read():
    source, reader = Pages(a="text"), Recorder()
    contexts, browser = make_browser(source, reader)
    contexts.record("e", ["https://p.example/b"])
    for visit in (browser.visit("e", ""), browser.visit("", ""), browser.visit("e", "", {"https://p.example/c": "q"}),
                  browser.visit("e", "", {})):  # fmt: skip
        with pytest.raises(PageError) as caught:
            browser.read("https://p.example/a", visit, later())
        assert caught.value.kind == "bad_request" and "search results" in str(caught.value)
    assert source.loads == []
    told = browser.visit("e", "", {"https://P.example/a": "what its client remembers"})
    assert browser.read("https://p.example/a", told, later())["text"] == "text"
    assert reader.tasks[0].query == "what its client remembers"
    _, unlimited = make_browser(Pages(a="text"), browse_any_url=True)
    assert unlimited.read("https://p.example/a", unlimited.visit("", ""), later())["text"] == "text"


def test_a_page_is_loaded_once_and_so_is_a_lasting_failure():
    source = Pages(a="text", gone=PageError("bad_reply", "404"), slow=PageError("timeout", "hurried", lasting=False))
    _, browser = make_browser(source, browse_any_url=True)
    for _ in range(3):
        for name, kind in (("a", ""), ("gone", "bad_reply"), ("slow", "timeout")):
            try:
                browser.read(f"https://p.example/{name}", browser.visit("", ""), later())
                assert not kind
            except PageError as error:
                assert error.kind == kind
    assert [url.rpartition("/")[2] for url in source.loads].count("a") == 1
    assert [url.rpartition("/")[2] for url in source.loads].count("gone") == 1
    assert [url.rpartition("/")[2] for url in source.loads].count("slow") == 3
