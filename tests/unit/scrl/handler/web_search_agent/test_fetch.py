"""Fetching: where it may go, how much it takes, how long; against a server of bytes on this machine."""

import gzip
import os
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from ipaddress import ip_address

import pytest

from scrl.handler.web_search_agent import fetch_address
from scrl.handler.web_search_agent.fetch import HTML, PDF, TEXT, PageError, PageFetcher
from scrl.handler.web_search_agent.fetch_address import is_elsewhere

ANY_PORT = range(65536)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it trusts nobody; the default one takes its time to load
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 9\r\n\r\n<p>hi</p>"
Reply = bytes | Callable[[socket.socket], None]


class ByteServer:
    """Sends each path's bytes, as they are, and closes. ``asked``: the request heads."""

    def __init__(self, replies: dict[str, Reply], context: ssl.SSLContext | None = None) -> None:
        self.replies, self.asked, self._context = replies, [], context
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with self._context.wrap_socket(connection, server_side=True) if self._context else connection as channel:
                head = b""
                while b"\r\n\r\n" not in head:
                    part = channel.recv(65536)
                    if not part:
                        return
                    head += part
                self.asked.append(head.decode())
                reply = self.replies[head.split(b" ")[1].decode()]
                if callable(reply):
                    reply(channel)
                else:
                    channel.sendall(reply)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def serve():
    servers = []

    def start(replies: dict[str, Reply], context: ssl.SSLContext | None = None) -> ByteServer:
        servers.append(ByteServer(replies, context))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def to_loopback(host: str, port: int, deadline: float) -> list[str]:
    return ["127.0.0.1"]


def open_fetcher(**options) -> PageFetcher:
    anywhere = {"resolve": to_loopback, "is_allowed": lambda address: True, "ports": ANY_PORT}
    return PageFetcher(**{**anywhere, "ssl_context": NO_TLS, **options})


def get(server: ByteServer, path: str = "/", fetcher: PageFetcher | None = None, seconds: float = 60.0):
    fetcher = fetcher or open_fetcher()
    return fetcher.fetch(f"http://site.example:{server.port}{path}", time.monotonic() + seconds)


def failure(*args, **options) -> PageError:
    with pytest.raises(PageError) as caught:
        get(*args, **options)
    return caught.value


def response(body: bytes, kind: str = "text/html", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(where: str) -> bytes:
    return response(b"", "text/html", "302 Found", f"Location: {where}")


def test_a_page(serve):
    server = serve({"/a?b=%20c": PAGE})
    page = get(server, "/a?b=%20c#part")
    assert (page.url, page.kind, page.charset, page.body, page.truncated) == (
        f"http://site.example:{server.port}/a?b=%20c", HTML, "utf-8", b"<p>hi</p>", False,
    )  # fmt: skip
    head = server.asked[0].lower()
    assert head.startswith("get /a?b=%20c http/1.1\r\n") and f"host: site.example:{server.port}\r\n" in head
    assert "cookie" not in head and "referer" not in head and "accept-encoding: gzip, deflate\r\n" in head


@pytest.mark.parametrize(
    "url",
    ["ftp://a.example/", "file:///etc/passwd", "javascript:alert(1)", "data:text/html,x", "gopher://a/",
     "//a.example/x", "a.example", "", "http://", "http:///x", "http://[::1", "http://a.example:99999/",
     "http://a\x00b/", "http://" + "a" * 70000, "http://xn--/", "http://xn--a.example/"],
)  # fmt: skip
def test_only_http_urls(url):
    with pytest.raises(PageError) as caught:
        open_fetcher(resolve=lambda *_: pytest.fail("it looked the host up")).fetch(url, time.monotonic() + 5)
    assert caught.value.kind == "bad_request" and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "[::ffff:127.0.0.1]", "10.0.0.1",
     "169.254.169.254", "[fd00:ec2::254]", "0.0.0.0", "[::]", "user:pw@127.0.0.1", "①②⑦.0.0.1"],
)  # fmt: skip
def test_the_systems_own_resolver_and_policy_reach_no_server_of_this_machine(serve, host):
    server = serve({"/": PAGE})
    with pytest.raises(PageError) as caught:
        PageFetcher(ssl_context=NO_TLS, ports=ANY_PORT).fetch(f"http://{host}:{server.port}/", time.monotonic() + 20)
    assert caught.value.kind in ("bad_request", "connection")
    assert server.connections == 0
    assert "10.0.0" not in str(caught.value).replace(host, "")  # nothing told of what the name resolves to


def test_one_refused_address_refuses_the_name(serve):
    server = serve({"/": PAGE})
    fetcher = PageFetcher(ssl_context=NO_TLS, ports=ANY_PORT, resolve=lambda *_: ["8.8.8.8", "127.0.0.1"])
    assert failure(server, fetcher=fetcher).kind == "bad_request"
    nowhere = PageFetcher(ssl_context=NO_TLS, ports=ANY_PORT, resolve=lambda *_: [])
    assert failure(server, fetcher=nowhere).kind == "bad_request"


def test_a_name_is_looked_up_once_a_connection_and_the_checked_address_is_used(serve):
    """DNS rebinding: the second answer would be another address, and there is no second question."""
    server, asked = serve({"/": PAGE}), []

    def rebinding(host: str, port: int, deadline: float) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    page = get(server, fetcher=open_fetcher(resolve=rebinding, is_allowed=lambda address: address == "127.0.0.1"))
    assert page.body == b"<p>hi</p>" and asked == [("site.example", server.port)]


def test_a_name_and_password_in_a_url_go_nowhere(serve):
    server = serve({"/": PAGE})
    page = open_fetcher().fetch(f"http://me:secret@site.example:{server.port}/", time.monotonic() + 20)
    assert page.url == f"http://site.example:{server.port}/"
    assert "secret" not in server.asked[0] and "authorization" not in server.asked[0].lower()


def test_a_redirect_is_followed_and_named(serve):
    server = serve({"/": redirect("/next?x=1"), "/next?x=1": redirect("//other.example:{port}/end"), "/end": PAGE})
    server.replies["/next?x=1"] = redirect(f"//other.example:{server.port}/end")
    server.replies["/no-name"] = redirect("http://xn--/")
    assert failure(server, "/no-name").kind == "bad_request"
    server.asked.clear()
    assert get(server).url == f"http://other.example:{server.port}/end"
    assert f"Host: other.example:{server.port}" in server.asked[2]


def test_no_port_but_the_webs(serve):
    server = serve({"/": PAGE})
    error = failure(server, fetcher=PageFetcher(ssl_context=NO_TLS, resolve=to_loopback, is_allowed=lambda _: True))
    assert (error.kind, server.connections) == ("bad_request", 0)
    assert f"site.example:{server.port} is on another port" in str(error) and "(80, 443, 8080, 8443)" in str(error)
    from_one_to_another = open_fetcher(ports=(server.port,))
    server.replies["/"] = redirect("http://site.example:22/")
    assert "site.example:22 is on another port" in str(failure(server, fetcher=from_one_to_another))


def test_this_machines_own_public_address_is_refused(monkeypatch):
    assert ip_address("127.0.0.1") in fetch_address.own_addresses()
    monkeypatch.setattr(fetch_address, "own_addresses", lambda: {ip_address("8.8.8.8"), ip_address("2606:4700::1")})
    assert is_elsewhere("1.1.1.1") and is_elsewhere("2606:4700::2")
    own = ("8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700:0::1", "10.0.0.1")
    assert not any(map(is_elsewhere, own))


@pytest.mark.parametrize("where", ["http://inside.example:{port}/", "http://127.0.0.1:{port}/", "//[::1]:{port}/"])
def test_a_redirect_to_a_refused_address_is_not_followed(serve, where):
    server = serve({})
    server.replies.update({"/out": redirect(where.format(port=server.port)), "/": PAGE})
    names = {"site.example": "127.0.0.1", "inside.example": "127.0.0.2", "127.0.0.1": "127.0.0.3", "::1": "::1"}
    fetcher = open_fetcher(resolve=lambda host, *_: [names[host]], is_allowed=lambda address: address == "127.0.0.1")
    assert failure(server, "/out", fetcher).kind == "bad_request"
    assert len(server.asked) == 1


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://a/", "http://[::1", "http://" + "b" * 70000, "\x01"])
def test_a_redirect_to_no_page_is_an_error(serve, where):
    server = serve({"/": redirect(where)})
    assert failure(server).kind in ("bad_request", "bad_reply")
    assert len(server.asked) == 1


def test_redirects_end(serve):
    server = serve({"/": redirect("/")})
    assert "redirects more than 5 times" in str(failure(server))
    assert len(server.asked) == 6


def test_no_cookie_comes_back(serve):
    server = serve(
        {"/": response(b"", "text/html", "302 Found", "Set-Cookie: a=1; Path=/", "Location: /b"), "/b": PAGE}
    )
    fetcher = open_fetcher()
    get(server, fetcher=fetcher)
    get(server, "/b", fetcher)
    assert not any("cookie" in head.lower() for head in server.asked)


def test_the_environments_proxies_are_not_used(serve, monkeypatch):
    proxy, server = serve({}), serve({"/": PAGE})
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    get(server)
    assert proxy.connections == 0


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error", "304 Not Modified", "403 Forbidden"])
def test_a_status_that_is_no_page(serve, status):
    error = failure(serve({"/": response(b"no", "text/html", status)}))
    assert error.kind == "bad_reply" and status[:3] in str(error)


def test_too_many_requests(serve):
    assert failure(serve({"/": response(b"no", "text/html", "429 Too Many Requests")})).kind == "rate_limited"


@pytest.mark.parametrize(
    ("said", "body", "kind"),
    [
        ("text/html", b"<p>x", HTML),
        ("TEXT/HTML;charset=utf-8", b"<p>x", HTML),
        ("application/xhtml+xml", b"<p>x", HTML),
        ("text/plain", b"plain", TEXT),
        ("application/json", b"{}", TEXT),
        ("application/pdf", b"%PDF-1.7 ...", PDF),
        ("application/octet-stream", b"%PDF-1.7 ...", PDF),
        ("text/html", b"%PDF-1.7 ...", PDF),
        ("", b"<!DOCTYPE html><p>x", HTML),
        ("application/pdf", b"<html>not found", None),
        ("application/octet-stream", b"\x7fELF", None),
        ("text/plain", b"\x7fELF\0\0", None),
        ("image/png", b"\x89PNG", None),
        ("application/zip", b"PK", None),
        ("text/html text/html", b"<p>", None),
        ("", b"hello", None),
    ],
)
def test_types(serve, said, body, kind):
    server = serve({"/": response(body, said)})
    if kind is None:
        assert failure(server).kind == "bad_reply"
    else:
        assert get(server).kind == kind


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("Deflate", lambda body: zlib.compress(body, wbits=-15)),
        ("identity", bytes),
    ],
)
def test_packed_bodies(serve, encoding, pack):
    body = b"<p>" + b"hello " * 1000
    assert get(serve({"/": response(pack(body), "text/html", "200 OK", f"Content-Encoding: {encoding}")})).body == body


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "\xff"])
def test_a_packing_that_was_not_offered(serve, encoding):
    assert (
        failure(serve({"/": response(b"x", "text/html", "200 OK", f"Content-Encoding: {encoding}")})).kind
        == "bad_reply"
    )


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_damaged_packed_body(serve, encoding):
    error = failure(
        serve({"/": response(b"\x78\x9cno such thing", "text/html", "200 OK", f"Content-Encoding: {encoding}")})
    )
    assert (error.kind, "damaged" in str(error)) == ("bad_reply", True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_cut_at_the_limit(serve, encoding):
    """60 MB in 60 kB: what is unpacked is what fits, and the rest isn't even read."""
    packer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join([packer.compress(b"\0" * 1_000_000) for _ in range(60)]) + packer.flush()
    assert len(bomb) < 100_000
    page = get(serve({"/": response(bomb, "text/html", "200 OK", f"Content-Encoding: {encoding}")}))
    assert (len(page.body), page.truncated) == (5_000_000, True)


def test_a_large_page_is_cut_and_a_large_pdf_refused(serve):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"

    def endless(channel: socket.socket, start: bytes = b"") -> None:
        channel.sendall(head + start)
        while True:
            channel.sendall(b"a" * 65536)

    server = serve({"/": endless, "/pdf": lambda channel: endless(channel, b"%PDF-1.7")})
    page = get(server)
    assert (len(page.body), page.truncated) == (5_000_000, True)
    assert "PDF of more than 5 MB" in str(failure(server, "/pdf"))
    exact = get(serve({"/": response(b"a" * 5_000_000, "text/plain")}))
    assert (len(exact.body), exact.truncated) == (5_000_000, False)


def drip(start: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(channel: socket.socket) -> None:
        channel.sendall(start)
        while True:
            channel.sendall(piece)
            time.sleep(0.02)

    return send


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


@pytest.mark.parametrize(
    "slow",
    [
        drip(b"", b"H"),  # a status line that never ends
        drip(HEAD, b"X-A: b\r\n"),  # headers
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drip(HEAD + b"\r\n", b"a"),  # the body
        drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),  # a chunk's extension
        lambda channel: time.sleep(30),
    ],
    ids=["status", "headers", "continue", "body", "chunks", "chunk extension", "silence"],
)
def test_dripping_ends_at_the_deadline(serve, slow):
    server = serve({"/": slow})
    started = time.monotonic()
    error = failure(server, fetcher=open_fetcher(max_seconds=0.5))
    assert time.monotonic() - started < 10  # it could go on for minutes
    assert error.kind in ("timeout", "bad_reply") and (error.kind == "bad_reply" or error.lasting)
    assert not failure(server, seconds=0.3).lasting  # the caller's haste says nothing about the page


@pytest.mark.parametrize(
    "start",
    [
        b"",
        HEAD,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;",
    ],
    ids=["interim answers", "headers", "trailers", "chunk extension"],
)
def test_a_flood_of_what_is_no_body_ends_too(serve, start):
    filler = (
        b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" if not start else b"X-A: b\r\n" if start[-1:] != b";" else b"x" * 8
    )

    def flood(channel: socket.socket) -> None:
        channel.sendall(start)
        while True:
            channel.sendall(filler * 10_000)

    assert failure(serve({"/": flood})).kind == "bad_reply"


def test_a_resolver_that_hangs_ends_at_the_deadline(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(fetch_address.socket, "getaddrinfo", lambda *_, **__: gate.wait(30) and [])
    started = time.monotonic()
    with pytest.raises(PageError) as caught:
        PageFetcher(max_seconds=0.2).fetch("http://a.example/", time.monotonic() + 60)
    gate.set()
    assert caught.value.kind == "timeout" and time.monotonic() - started < 10


def test_nobody_listens_and_a_name_that_does_not_exist():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PageError) as caught:
        open_fetcher().fetch(f"http://a.example:{port}/", time.monotonic() + 20)
    assert caught.value.kind == "connection"

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(PageError) as caught:
        PageFetcher(resolve=unknown).fetch("http://nowhere.example/", time.monotonic() + 20)
    assert (caught.value.kind, str(caught.value)) == ("connection", "nowhere.example has no address")


def test_a_second_address_is_tried(serve):
    server = serve({"/": PAGE})
    assert get(server, fetcher=open_fetcher(resolve=lambda *_: ["127.0.0.77", "127.0.0.1"])).body == b"<p>hi</p>"


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\0" * 100,
        b"HTTP/9.9 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nContent-Type: text/html\r\n\r\nshort",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_what_is_no_http(serve, junk):
    assert failure(serve({"/": junk})).kind in ("bad_reply", "connection")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    command += ["-days", "2", "-subj", "/CN=site.example", "-addext", "subjectAltName=DNS:site.example"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60, env=os.environ)
    return folder


def test_tls_names_and_checks_the_urls_host_not_the_address(serve, certificate):
    names = []
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    theirs.sni_callback = lambda channel, name, context: names.append(name)
    server = serve({"/": PAGE}, theirs)
    ours = ssl.create_default_context(cafile=certificate / "cert.pem")
    fetcher = open_fetcher(ssl_context=ours)
    page = fetcher.fetch(f"https://site.example:{server.port}/", time.monotonic() + 30)
    assert page.body == b"<p>hi</p>" and names == ["site.example"]
    for other in (
        lambda: fetcher.fetch(f"https://other.example:{server.port}/", time.monotonic() + 30),  # its name
        lambda: open_fetcher().fetch(f"https://site.example:{server.port}/", time.monotonic() + 30),
    ):  # its signer
        with pytest.raises(PageError) as caught:
            other()
        assert caught.value.kind == "connection"
