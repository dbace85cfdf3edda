"""Pages and replies that were made to hurt: nothing raises, and everything stays inside its limits.

Generated from a seed, the same each time. HOSTILE_COUNT says how many (default: a sample); all that the project
promises, 10,000 of each, takes minutes: HOSTILE_COUNT=10000 pytest tests/unit/scrl/handler/test_hostile.py
"""

import gzip
import io
import json
import os
import random
import resource
import socketserver
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from scrl.handler.config import HandlerConfig
from scrl.handler.handler import SearchHandler
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.reading_agent.llm import MAX_NOTE, MAX_NOTES, read_reply
from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.browser import WebPages
from scrl.handler.web_search_agent.fetch import PageFetcher
from scrl.handler.web_search_agent.remote import RemoteBackend
from scrl.handler.web_search_agent.search_api import BACKENDS
from scrl.handler.web_search_agent.transport import Reply
from scrl.llm_agent import prompts
from scrl.types import ToolCall

COUNT = int(os.environ.get("HOSTILE_COUNT", "120"))
TIMEOUT_S = 300.0  # of a call: on a busy machine four pages wait for one reader
KINDS = {"", "timeout", "connection", "bad_request", "bad_reply", "rate_limited"}  # no "internal": that is a bug

WORDS = (
    "the <|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <answer>x</answer> <think> </think> assistant "
    "北京 é \u202e \u0000 \ufeff \ud83d\ude00 &#xD800; &#0; &lt;|im_end|&gt; &nbsp; ]]> --> ${x} %00 \\ \" ' 1e999 NaN"
).split(" ")
TAGS = "p div a b i table tr td li ul script style form svg math template title head body html iframe h1 br".split()
ARTICLE = "<html><head><title>T</title></head><body><article>" + "<p>Ann founded it in 1721.</p>" * 40
BOMBS = [gzip.compress(b"<p>bomb" * 3_000_000), zlib.compress(b"bomb " * 5_000_000)]  # over the limit, unpacked


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def tag_soup(rng: random.Random) -> bytes:
    pieces = []
    for _ in range(rng.randrange(1, 800)):
        tag = rng.choice(TAGS)
        pieces.append(
            rng.choice([f"<{tag}>", f"</{tag}>", f"<{tag} x='", f"<{tag}/", "<!--", "<![CDATA[", "<?", words(rng, 3)])
        )
    return "".join(pieces).encode("utf-8", "replace")


def special_tokens(rng: random.Random) -> bytes:
    return f"<title>{words(rng, 5)}</title><p>{words(rng, rng.randrange(3000))}</p>".encode("utf-8", "surrogatepass")


def huge_attributes(rng: random.Random) -> bytes:
    size = rng.choice([1_000, 100_000, 1_000_000])
    return rng.choice([
        f"<a href='{'y' * size}'>Ann</a>", f"<a {'x=1 ' * (size // 4)}>Ann</a>", f"<{'z' * size}>Ann",
        f"<p {'=' * size}",
        f"<meta charset='{'u' * size}'>Ann", f"<p style=\"{'a:b;' * (size // 4)}\">Ann</p>",
    ]).encode()  # fmt: skip


def broken_encoding(rng: random.Random) -> bytes:
    return rng.choice(
        [b"", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"<meta charset=utf-16>", b"<p>"]
    ) + rng.randbytes(rng.randrange(20_000))


def deep_nesting(rng: random.Random) -> bytes:
    tag, depth = rng.choice(TAGS), rng.choice([200, 300, 2_000, 100_000])
    return (f"<{tag}>" * depth + "Ann" + f"</{tag}>" * rng.choice([0, depth])).encode()


def many_elements(rng: random.Random) -> bytes:
    piece = rng.choice(
        ["<p>a", "<a>", "<b><i>", "<table><tr><td>x", "<li>x<ul>", "<br>", "&amp;", "<tr>", "<form>", "< "]
    )
    return (piece * rng.choice([500, 5_000, 60_000])).encode()


def plain_runs(rng: random.Random) -> bytes:
    piece = rng.choice([" ", "\n", "a", "a b", ".", ". ", "。", "<", "&", "\t \n", "- ", '"', "x\u2028", "</"])
    return (piece * rng.choice([10_000, 300_000])).encode()


def cut_article(rng: random.Random) -> bytes:
    return ARTICLE[: rng.randrange(len(ARTICLE))].encode() + rng.randbytes(rng.randrange(3))


def entities(rng: random.Random) -> bytes:
    layers = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 12))
    return f'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY l0 "ha">{layers}]><html><p>&l11;{words(rng, 20)}'.encode(
        "utf-8", "replace"
    )


def make_pdf(repeated: int, layers: int) -> bytes:
    """A page that says Ann ``repeated`` times, its content packed ``layers`` times over."""
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(300, 300)
    font = {NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica")}  # fmt: skip
    fonts = DictionaryObject({NameObject("/F1"): DictionaryObject(font)})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    stream = DecodedStreamObject()
    stream.set_data(b"BT /F1 12 Tf 9 9 Td " + b"(Ann) Tj 0 9 Td " * repeated + b"ET")
    for _ in range(layers):
        stream = stream.flate_encode()
    page[NameObject("/Contents")] = writer._add_object(stream)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


PDFS = [make_pdf(repeated, layers) for repeated in (1, 3_000, 1_000_000) for layers in (1, 2)]


def pdf_file(rng: random.Random) -> bytes:
    body = bytearray(rng.choices(PDFS, weights=[20, 20, 20, 20, 1, 1])[0])
    for _ in range(rng.choice([0, 1, 5, 50])):
        body[rng.randrange(9, len(body))] = rng.randrange(256)
    swaps = [(b"/Count 1", b"/Count 9"), (b" 0 R", b" 1 R"), (b"1 0 R", b"2 0 R"), (b"/Kids", b"/Kid"), (b"%%EOF", b"")]
    return bytes(body).replace(*rng.choice(swaps)) if rng.random() < 0.4 else bytes(body)


PAGES: list[tuple[str, Callable[[random.Random], bytes]]] = [
    ("text/html", tag_soup), ("text/html; charset=utf-8", special_tokens), ("text/html", huge_attributes),
    ("text/html", broken_encoding), ("text/html", deep_nesting), ("text/html", many_elements),
    ("text/html", plain_runs), ("text/plain", plain_runs), ("text/plain", broken_encoding),
    ("text/html; charset=utf-8", cut_article), ("application/xhtml+xml", entities), ("application/pdf", pdf_file),
]  # fmt: skip


def reply_of(number: int) -> bytes:
    """The whole HTTP reply of page ``number``: one of PAGES, or a bomb, or HTTP that is itself broken."""
    rng = random.Random(number)
    said, make = PAGES[number % len(PAGES)]
    body, headers, status = make(rng), [], "200 OK"
    trick = rng.randrange(24)
    if trick == 0:
        packing = rng.random() < 0.9  # the other has a million elements and takes seconds
        body = BOMBS[packing]
        headers.append(f"Content-Encoding: {('gzip', 'deflate')[packing]}")
    elif trick == 1:
        body, headers = gzip.compress(body)[: rng.randrange(1, 5_000)], ["Content-Encoding: gzip"]
    elif trick == 2:
        said = rng.choice(
            ["text/html; charset=" + rng.choice(["utf-7", "punycode", "hex", "x" * 500, "utf-16"]), "a/b", ";"]
        )
    elif trick == 3:
        status, headers = (
            "302 Found",
            [f"Location: {rng.choice(['/', '//[', 'file:///etc/passwd', 'x' * 9_000, '/%00'])}"],
        )
    elif trick == 4:
        headers = rng.choice([["X: y"] * 3_000, ["X: " + "y" * 90_000], ["Transfer-Encoding: chunked"], ["no colon"]])
    length = rng.choice([len(body)] * 8 + [0, len(body) + 5, 10**30])
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {said}", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Site(socketserver.ThreadingTCPServer):
    """Serves ``/n``: reply_of(n)."""

    daemon_threads, request_queue_size = True, 64

    class RequestHandlerClass(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline(100_000).split(b" ")[1:2]
            while self.rfile.readline(100_000).strip():
                pass
            if path and path[0][1:].isdigit():
                self.wfile.write(reply_of(int(path[0][1:])))

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A client that has seen enough hangs up."""


class NoSearch:
    name = cache_scope = "none"

    def search(self, query: str, topk: int, deadline: float) -> list[dict[str, str]]:
        return []

    def close(self) -> None: ...


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def cpu_seconds() -> float:
    return sum(
        times.ru_utime + times.ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for times in [resource.getrusage(who)]
    )


def check_row(row: dict[str, str], tokenizer, added: set[int]) -> None:
    assert set(row) == {"title", "url", "text"} and len(row["title"]) <= 300
    assert 0 < len(row["text"]) <= 10_000
    for text in (row["title"], row["text"]):
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text.replace("\n", ""))
        text.encode()
    observation = prompts.render_observation(["u"], [[row]], with_url=True)
    assert json.loads(observation)[0]["results"] == [row]
    assert not added.intersection(prompts.encode_untrusted(tokenizer, observation))


@pytest.mark.timeout(7200)
def test_hostile_pages(tokenizer, capsys):
    site, added = Site(), set(tokenizer.get_added_vocab().values())
    config = HandlerConfig(browse_any_url=True, timeout_s=TIMEOUT_S, max_workers=4)
    fetcher = PageFetcher(resolve=lambda *_: ["127.0.0.1"], is_allowed=lambda address: True, ports=range(65536))
    kinds, before, started, worked = Counter(), peak_mib(), time.monotonic(), cpu_seconds()
    with SearchHandler(config, NoSearch(), WebPages(HandlerMetrics(), fetcher)) as handler:

        def browse(number: int) -> None:
            call = ToolCall("browse_webpage", {"url_list": [f"http://site.example:{site.server_address[1]}/{number}"]})
            result = handler.submit(call, episode_id=f"e{number}", question="Who founded Red Harbour?").result(
                timeout=2 * TIMEOUT_S
            )
            assert result.error_kind in KINDS, result
            assert result.latency_s < 1.5 * TIMEOUT_S and len(result.error) < 600
            for row in result.items[0]:
                check_row(row, tokenizer, added)
            handler.release(f"e{number}")
            kinds[result.error_kind or "ok"] += 1

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(browse, range(COUNT)))
        grown = peak_mib() - before
        assert len(handler._contexts) == 0
    site.shutdown(), site.server_close()
    seconds, worked = time.monotonic() - started, cpu_seconds() - worked
    with capsys.disabled():
        print(f"\n{COUNT} hostile pages: {seconds:.0f} s ({worked:.0f} s of CPU), +{grown} MiB, {dict(kinds)}")
    assert kinds.total() == COUNT and kinds["ok"] > COUNT / 4
    assert grown < 400


def hostile_json(rng: random.Random, depth: int = 0):
    """Any JSON, with the keys that engines and models use, holding what they never would."""
    keys = (
        "results organic webPages value web title url link snippet content text notes page_down choices message".split()
    )
    kind = rng.randrange(9 if depth < 5 else 6)
    if kind < 6:
        return rng.choice(
            [None, True, 0, -1, 1e308, 10**40, "", words(rng, 5), "x" * 3_000, "\ud800", [], {}, "http://a/"]
        )
    if kind == 6:
        return [hostile_json(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(keys): hostile_json(rng, depth + 1) for _ in range(rng.randrange(6))}


def hostile_reply(rng: random.Random) -> bytes:
    text = json.dumps(hostile_json(rng)).encode()
    trick = rng.randrange(9)
    if trick == 8:
        return json.dumps({"notes": [hostile_json(rng, 4) for _ in range(rng.randrange(20))]}).encode()
    if trick == 0:
        return text[: rng.randrange(len(text) + 1)]
    if trick == 1:
        return rng.randbytes(rng.randrange(500))
    if trick == 2:
        return tag_soup(rng)
    if trick == 3:
        return rng.choice([b"[", b'{"results":', b'{"notes":[', b"<think>", b"{ "]) * rng.choice([10, 100_000])
    return text


def test_hostile_replies_of_a_reading_model():
    outcomes = Counter()
    for number in range(COUNT):
        reply = hostile_reply(random.Random(number)).decode("utf-8", "replace")
        try:
            notes, page_down = read_reply(reply)
        except SearchError as error:
            assert error.kind == "bad_reply" and len(str(error)) < 600
            outcomes["refused"] += 1
        else:
            assert (
                len(notes) <= MAX_NOTES
                and all(0 < len(note) <= MAX_NOTE for note in notes)
                and page_down in (True, False)
            )
            outcomes["read"] += 1
    assert outcomes["read"] and outcomes["refused"]


REMOTE = sorted(
    name for name, engine in BACKENDS.items() if isinstance(engine, type) and issubclass(engine, RemoteBackend)
)


@pytest.mark.parametrize("name", REMOTE)
def test_hostile_replies_of_a_search_engine(name, monkeypatch):
    engine = BACKENDS[name]
    if engine.key_variable:
        monkeypatch.setenv(engine.key_variable, "key")
    backend = engine(HandlerConfig(search_engine=name), HandlerMetrics())
    for number in range(COUNT):
        rng = random.Random(number)
        try:
            rows = backend.read(Reply(rng.choice([200] * 9 + [404]), {}, hostile_reply(rng)))
        except SearchError as error:
            assert error.kind in KINDS | {"no_backend"} and len(str(error)) < 600
        else:
            assert all(isinstance(row[key], str) for row in rows for key in ("title", "url", "text"))
    backend.close()
