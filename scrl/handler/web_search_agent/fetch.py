"""Fetch one page of the open web for a policy that may ask for anything: GET, within limits of place, time and size.

Every connection, the one after a redirect too, is made here, to a port of the web: the host's addresses are looked up
once, all must be public and not this machine's, and the socket goes to one of those very addresses, so that a second
look-up can't lead elsewhere (DNS rebinding). The URL's host stays in the Host header and in TLS's SNI and certificate
check. Proxies named in the environment are left out on purpose: a proxy looks names up itself, behind the check. No
cookie is kept, so nothing passes from one episode to another.
"""

import codecs
import ssl
import time
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from email.message import Message

import httpcore
import httpx

from scrl.handler.web_search_agent.fetch_address import Resolver, is_elsewhere, resolve
from scrl.handler.web_search_agent.transport import unpacker

MAX_BYTES = 5_000_000  # of a page, as sent and unpacked
MAX_SECONDS = 10.0  # for a page: look-up, connections, redirects and body together
MAX_REDIRECTS = 5
PORTS = (80, 443, 8080, 8443)  # where web servers are; others may be anything that takes a line of text for a command
_MAX_HEADER_BYTES = 256_000  # of what stands before a body (interim answers too), and of the framing around its chunks

HTML, PDF, TEXT = "html", "pdf", "text"
_KINDS = {
    "text/html": HTML,
    "application/xhtml+xml": HTML,
    "application/pdf": PDF,
    "application/x-pdf": PDF,
    "text/plain": TEXT,
    "text/markdown": TEXT,
    "text/csv": TEXT,
    "application/json": TEXT,
}
_UNSAID = ("", "application/octet-stream", "binary/octet-stream")  # such a body is judged by its first bytes
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; MiniResearcher)",
    "Accept": "text/html,application/xhtml+xml,application/pdf,text/plain;q=0.9",
    "Accept-Encoding": "gzip, deflate",  # what zlib can unpack piece by piece; a server that sends br is refused
    "Accept-Language": "en,*;q=0.5",
}


class PageError(Exception):
    """A page that can't be had. ``kind`` is one of ToolResult's error kinds, the message one sentence for people.

    ``lasting``: asking again at once would end the same way, so the failure may be remembered for a while.
    """

    def __init__(self, kind: str, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.kind, self.lasting = kind, lasting


@dataclass(frozen=True)
class RawPage:
    """``url``: where the redirects led. ``kind``: HTML, PDF or TEXT. ``charset``: as the server said, maybe ""."""

    url: str
    kind: str
    charset: str
    body: bytes
    truncated: bool = False  # cut at MAX_BYTES


class PageFetcher:
    """Threads may share one. Tests give their own ``resolve``, ``is_allowed``, ``ports`` and ``ssl_context``; no
    setting can."""

    def __init__(
        self,
        *,
        resolve: Resolver = resolve,
        is_allowed: Callable[[str], bool] = is_elsewhere,
        ports: Container[int] = PORTS,
        ssl_context: ssl.SSLContext | None = None,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._resolve, self._is_allowed, self._ports = resolve, is_allowed, ports
        self._ssl_context = ssl_context or httpcore.default_ssl_context()
        self._max_bytes, self._max_seconds = max_bytes, max_seconds

    def fetch(self, url: str, deadline: float) -> RawPage:
        """The page at ``url``, within MAX_SECONDS and by ``deadline`` (``time.monotonic()``). Raises PageError."""
        limit = time.monotonic() + self._max_seconds
        hurried = deadline < limit  # then a timeout says nothing about the page
        target = _parse(url)
        network = _CheckedNetwork(self._resolve, self._is_allowed, self._ports, min(limit, deadline))
        try:
            for _ in range(MAX_REDIRECTS + 1):
                page = self._get(target, network)
                if isinstance(page, RawPage):
                    return page
                target = page
        except httpcore.TimeoutException as error:
            raise PageError("timeout", f"{_name(target)} took too long", lasting=not hurried) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            kind = "connection" if isinstance(error, httpcore.NetworkError) else "bad_reply"
            raise PageError(kind, f"{_name(target)}: {str(error)[:200] or type(error).__name__}") from error
        raise PageError("bad_reply", f"{_name(_parse(url))} redirects more than {MAX_REDIRECTS} times")

    def _get(self, url: httpx.URL, network: "_CheckedNetwork") -> RawPage | httpx.URL:
        """One exchange: the page, or where to go for it."""
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        network.allowance = _MAX_HEADER_BYTES
        # A pool of its own for each exchange: nothing is left open, and the deadline is this fetch's alone.
        with (
            httpcore.ConnectionPool(self._ssl_context, network_backend=network, max_connections=1) as pool,
            pool.stream("GET", target, headers=_HEADERS) as response,
        ):
            network.allowance += self._max_bytes
            headers = {name.decode("latin-1").lower(): value for name, value in reversed(response.headers)}
            if response.status in (301, 302, 303, 307, 308) and "location" in headers:
                return _parse(headers["location"].decode("utf-8", "replace"), base=url)
            if response.status == 429:
                raise PageError("rate_limited", f"{_name(url)} says that there were too many requests")
            if not 200 <= response.status < 300:
                raise PageError("bad_reply", f"{_name(url)} answered with HTTP status {response.status}")
            said, charset = _content_type(headers.get("content-type", b"").decode("latin-1"))
            if said not in _KINDS and said not in _UNSAID:
                raise PageError("bad_reply", f"{_name(url)} is {said[:80]!r}, not HTML, PDF or text")
            body, truncated = self._read(response, headers.get("content-encoding", b""), url)
        kind = _kind_of(said, body)
        if kind is None:
            raise PageError("bad_reply", f"{_name(url)} is neither HTML, PDF nor text")
        if kind == PDF and truncated:  # its table of contents is at its end
            raise PageError("bad_reply", f"{_name(url)} is a PDF of more than {self._max_bytes / 1e6:g} MB")
        return RawPage(str(url), kind, charset, body, truncated)

    def _read(self, response: httpcore.Response, encoding: bytes, url: httpx.URL) -> tuple[bytes, bool]:
        """The body, unpacked and cut at the limit, and whether it was cut."""
        try:
            unpack = unpacker(encoding.decode("latin-1"))
        except ValueError as error:
            raise PageError("bad_reply", f"{_name(url)} {error}") from None
        pieces, size = [], 0
        chunks: Iterator[bytes] = response.iter_stream()
        for chunk in chunks:
            room = self._max_bytes - size
            try:
                piece = unpack(chunk, room + 1)  # one more than fits shows that there is more
            except zlib.error as error:
                raise PageError("bad_reply", f"{_name(url)} sent a damaged compressed body") from error
            pieces.append(piece[:room])
            size += len(piece)
            if size > self._max_bytes:
                return b"".join(pieces), True
        return b"".join(pieces), False


class _CheckedNetwork(httpcore.NetworkBackend):
    """Connects to allowed addresses only. Its streams share one deadline and one allowance of bytes to receive."""

    def __init__(
        self, resolve: Resolver, is_allowed: Callable[[str], bool], ports: Container[int], deadline: float
    ) -> None:
        self._resolve, self._is_allowed, self._ports = resolve, is_allowed, ports
        self._system = httpcore.SyncBackend()
        self.deadline, self.allowance = deadline, 0

    def left(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise httpcore.ReadTimeout("the deadline has passed")
        return seconds

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ANN001, ANN201
        if port not in self._ports:
            allowed = ", ".join(map(str, PORTS))
            raise PageError("bad_request", f"{host[:100]}:{port} is on another port than those of the web ({allowed})")
        try:
            addresses = self._resolve(host, port, self.deadline)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("the look-up of its address took too long") from error
        except OSError as error:
            raise PageError("connection", f"{host[:100]} has no address") from error
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise PageError("bad_request", f"{host[:100]} is not a public web server")
        for i, address in enumerate(addresses, start=1):
            try:
                share = self.left() / (len(addresses) - i + 1)
                return _LimitedStream(self._system.connect_tcp(address, port, timeout=share), self)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if i == len(addresses):
                    raise
        raise AssertionError("unreachable")


class _LimitedStream(httpcore.NetworkStream):
    """A socket whose every wait ends at the fetch's deadline, however slowly the other side drips."""

    def __init__(self, stream: httpcore.NetworkStream, network: _CheckedNetwork) -> None:
        self._stream, self._network = stream, network

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._network.allowance <= 0:
            raise PageError("bad_reply", "the server sent more than a page may have")
        data = self._stream.read(min(max_bytes, self._network.allowance), timeout=self._network.left())
        self._network.allowance -= len(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout=self._network.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):  # noqa: ANN001, ANN201
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout=self._network.left())
        return _LimitedStream(stream, self._network)

    def get_extra_info(self, info: str):  # noqa: ANN201
        return self._stream.get_extra_info(info)


def _parse(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """``url`` (from ``base``) as one that can be fetched. Raises PageError."""
    try:
        parsed = httpx.URL(url.strip()) if base is None else base.join(url.strip())
        # The user's name and password, should it hold any, are for nobody; the fragment isn't sent.
        parsed = parsed.copy_with(userinfo=b"", fragment=None)
        host = parsed.host  # decoded only here, which may fail
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise PageError("bad_request", f"{url[:200]!r} is not a URL") from error
    if parsed.scheme not in ("http", "https") or not host or not 0 < (parsed.port or 80) < 65536:
        raise PageError("bad_request", f"{url[:200]!r} is not an http or https URL")
    return parsed


def _name(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}{url.path}"[:200]


def _content_type(header: str) -> tuple[str, str]:
    """(media type, charset), in lower case, "" where it isn't said."""
    message = Message()
    message["Content-Type"] = header.replace("\r", " ").replace("\n", " ")
    said = header.partition(";")[0].strip().lower()
    charset = message.get_param("charset", "")
    return said, charset.strip().lower()[:40] if isinstance(charset, str) else ""


def _kind_of(said: str, body: bytes) -> str | None:
    """The kind that the body is of, its first bytes counting more than what the server said of it."""
    start = body[:1024].lstrip()
    if start.startswith(b"%PDF-"):
        return PDF
    kind = _KINDS.get(said)
    if kind is None and start[:15].lower().startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        kind = HTML
    if kind == PDF or (kind == TEXT and b"\0" in body[:1024] and not body.startswith(_UTF16)):
        return None  # it was said to be one and isn't
    return kind


_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
