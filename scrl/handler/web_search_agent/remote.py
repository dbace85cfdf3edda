"""What all search engines on the network have in common; each engine adds its request and how to read its reply."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from scrl.handler.config import HandlerConfig
from scrl.handler.metrics import HandlerMetrics
from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.local_index import Row
from scrl.handler.web_search_agent.resilience import Guard, Limits
from scrl.handler.web_search_agent.transport import (
    Fetcher,
    HttpxTransport,
    Reply,
    Request,
    Transport,
    check_status,
    read_json,
)
from scrl.llm_agent.prompts import writable

MAX_TITLE, MAX_URL, MAX_TEXT = 1000, 4000, 20_000  # characters


class RemoteBackend:
    """Base of the engines. The environment's ``url_variable`` overrides ``default_url``: by a whole address, or by a
    server, to which the usual path is added.

    Counts ``backend/{name}/requests, retries, throttled, breaker_opened, empty`` and ``backend/{name}/errors/{kind}``.
    """

    name: ClassVar[str]
    url_variable: ClassVar[str]
    default_url: ClassVar[str]
    key_variable: ClassVar[str] = ""  # "": needs no key
    key_source: ClassVar[str] = ""  # where one gets it
    limits: ClassVar[Limits]
    max_query_chars: ClassVar[int] = 2000  # a longer query is cut, since engines refuse it
    remark: ClassVar[str] = ""  # added to every error
    uses_region: ClassVar[bool] = False
    uses_language: ClassVar[bool] = False

    def __init__(
        self,
        config: HandlerConfig,
        metrics: HandlerMetrics | None = None,
        *,
        url: str | None = None,
        guard: Callable[..., Guard] = Guard,
    ) -> None:
        self._url = self.address(os.environ, url)
        self._key = self.key(os.environ)
        self.region = config.region if self.uses_region else ""
        self.language = config.language if self.uses_language else ""
        self.cache_scope = "|".join((self.name, self.region, self.language)).rstrip("|")
        if self._url != self.default_url:  # what is found depends on which server is asked
            self.cache_scope += f"|{self._url}"
        self._metrics = metrics or HandlerMetrics()
        limits = self.limits
        if config.rate_limit is not None:
            limits = replace(limits, rate=config.rate_limit, burst=max(config.rate_limit, 1.0))
        self._guard = guard(limits, count=self._count)
        self._fetcher = Fetcher(self.transport(), self.name)

    @classmethod
    def check(cls, environ: Mapping[str, str]) -> None:
        """ValueError where the environment lacks the key, or names an address that is none."""
        cls.address(environ)
        cls.key(environ)

    @classmethod
    def key(cls, environ: Mapping[str, str]) -> str:
        value = environ.get(cls.key_variable, "").strip() if cls.key_variable else ""
        if cls.key_variable and not value:
            raise ValueError(
                f"search_engine={cls.name} needs a key, and {cls.key_variable} is not set; {cls.key_source}, then "
                f"export {cls.key_variable}=...{' (' + cls.remark + ')' if cls.remark else ''}"
            )
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"{cls.key_variable} holds characters that no key has; copy it again")
        return value

    @classmethod
    def address(cls, environ: Mapping[str, str], given: str | None = None) -> str:
        url = (given or environ.get(cls.url_variable, "").strip() or cls.default_url).rstrip("/")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"{cls.url_variable}={url!r} is not an address; write it as in {cls.default_url}")
        path = urlsplit(cls.default_url).path
        return url if parts.path.endswith(path) else url + path

    def transport(self) -> Transport:
        return HttpxTransport()

    def request(self, query: str, topk: int) -> Request:
        raise NotImplementedError

    def localised(self, region: str, language: str) -> dict[str, str]:
        """Region and language as far as they are set, under the names that the engine gives them."""
        return {name: code for name, code in ((region, self.region), (language, self.language)) if code}

    def rows(self, body: Any) -> list[Row]:
        """The rows of a reply's JSON. Whatever the JSON holds, raises nothing but SearchError."""
        raise NotImplementedError

    def read(self, reply: Reply) -> list[Row]:
        check_status(reply)
        return self.rows(read_json(reply))

    def search(self, query: str, topk: int, deadline: float) -> list[Row]:
        request = self.request(writable(query[: self.max_query_chars]), topk)
        try:
            rows = self._guard.run(lambda seconds: self.read(self._fetch(request, seconds)), deadline)
        except SearchError as error:
            self._count(f"errors/{error.kind}")
            raise SearchError(error.kind, self._told(error), fault=error.fault) from None  # a cause may hold the key
        if not rows:
            self._count("empty")
        return rows[:topk]

    def close(self) -> None:
        self._guard.close()
        self._fetcher.close()

    def _fetch(self, request: Request, seconds: float) -> Reply:
        reply = self._fetcher.fetch(request, seconds)
        # A server may send back what it was sent; the key must reach neither an error nor a result.
        return replace(reply, body=reply.body.replace(self._key.encode(), b"***")) if self._key else reply

    def _count(self, name: str) -> None:
        self._metrics.count(f"backend/{self.name}/{name}")

    def _told(self, error: SearchError) -> str:
        message = f"{self.name} {error}"
        for secret in {self._key, quote(self._key, safe="")} - {""}:
            message = message.replace(secret, "***")
        return f"{message} ({self.remark})" if self.remark else message


def at(body: Any, *keys: str, default: Any = None) -> Any:
    """``body[key][key]…``; ``default`` where a key is missing or null and there is a default, else SearchError."""
    for key in keys:
        if not isinstance(body, dict):
            raise SearchError("bad_reply", f"sent a JSON {type(body).__name__} where {key!r} was expected")
        body = body.get(key)
        if body is None:
            if default is None:
                raise SearchError("bad_reply", f"sent JSON without {key!r}")
            return default
    return body


def rows_of(items: Any, title: str, url: str, text: str) -> list[Row]:
    """Rows from a list of objects; what isn't an object, or has neither title nor text, is left out.

    Long titles and texts are cut, so that a cache of results has a bound; a URL that long is no URL.
    """
    if not isinstance(items, list):
        raise SearchError("bad_reply", f"sent a JSON {type(items).__name__} where results were expected")
    rows = []
    for item in items:
        if isinstance(item, dict):
            link = as_text(item.get(url))
            row = {
                "title": as_text(item.get(title))[:MAX_TITLE],
                "url": link if len(link) <= MAX_URL else "",
                "text": as_text(item.get(text))[:MAX_TEXT],
            }
            if row["title"] or row["text"]:
                rows.append(row)
    return rows


def as_text(value: Any) -> str:
    """``value`` if it is a string, without lone surrogates (which JSON may name and UTF-8 can't hold); else ""."""
    return writable(value.strip()) if isinstance(value, str) else ""
