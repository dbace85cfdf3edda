"""The search engines on the network: what each is asked, and what its reply looks like. Shapes as of 2026."""

import html
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.local_index import Row
from scrl.handler.web_search_agent.remote import RemoteBackend, as_text, at, rows_of
from scrl.handler.web_search_agent.resilience import Limits
from scrl.handler.web_search_agent.transport import Reply, Request, first_line

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")  # not the text between "a < b" and "c > d"


class RetrieverBackend(RemoteBackend):
    """Search-R1's retrieval server (Jin et al. 2025): any index behind ``POST /retrieve``, such as wiki-18 under E5.

    A document is ``{"contents": "\\"title\\"\\ntext"}``; one with ``title`` and ``text`` of its own is taken too. Its
    URL is empty unless the server gives one.
    """

    name = "retriever"
    url_variable = "RETRIEVER_URL"
    default_url = "http://127.0.0.1:8000/retrieve"
    limits = Limits(rate=1000.0, burst=1000.0)  # one's own server

    def request(self, query: str, topk: int) -> Request:
        return Request("POST", self._url, json={"queries": [query], "topk": topk, "return_scores": True})

    def rows(self, body: Any) -> list[Row]:
        results = at(body, "result")
        hits = results[0] if isinstance(results, list) and len(results) == 1 else None
        if not isinstance(hits, list):
            raise SearchError("bad_reply", "sent a result that isn't one list of documents for the one query")
        # With scores each hit is {document, score}, without (as some forks answer all the same) the document itself.
        documents = [hit.get("document", hit) for hit in hits if isinstance(hit, dict)]
        return rows_of([_split_contents(document) for document in documents], "title", "url", "text")


def _split_contents(document: Any) -> Any:
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        return document
    first, _, rest = document["contents"].partition("\n")
    given = {name: value for name, value in document.items() if value is not None}
    return {"title": first.strip().strip('"'), "text": rest.strip(), **given}


class SearxngBackend(RemoteBackend):
    """A SearXNG of one's own, with ``json`` among ``search.formats`` and ``server.limiter: false`` in settings.yml."""

    name = "searxng"
    url_variable = "SEARXNG_URL"
    default_url = "http://127.0.0.1:8080/search"
    limits = Limits(rate=5.0, burst=10.0)  # the engines behind it ban who asks faster for long
    uses_language = True

    def request(self, query: str, topk: int) -> Request:
        params = {"q": query, "format": "json"} | ({"language": self.language} if self.language else {})
        return Request("GET", self._url, params=params)

    def read(self, reply: Reply) -> list[Row]:
        if reply.status == 403:
            raise SearchError(
                "no_backend",
                "answered 403; add json to search.formats in its settings.yml and set server.limiter: false",
            )
        return super().read(reply)

    def rows(self, body: Any) -> list[Row]:
        rows = rows_of(at(body, "results"), "title", "url", "content")
        silent = at(body, "unresponsive_engines", default=[])
        if not rows and silent and isinstance(silent, list):
            # Nothing found because nobody looked: no empty result, or the cache would keep it.
            names = [": ".join(map(as_text, pair)) for pair in silent if isinstance(pair, list)]
            raise SearchError(
                "bad_reply", f"found nothing, as engines behind it didn't answer ({', '.join(names)[:200]})"
            )
        return rows


class ProxyBackend(SearxngBackend):
    """``scripts/search_proxy.py`` on a machine with internet: SearXNG's protocol and a bearer token.

    Region and language are what the proxy was started with.
    """

    name = "proxy"
    uses_language = False
    url_variable = "SEARCH_PROXY_URL"
    default_url = "http://127.0.0.1:8890/search"
    key_variable = "SCRL_TOKEN"
    key_source = "take the token that scripts/search_proxy.py was started with"

    @classmethod
    def key(cls, environ: Mapping[str, str]) -> str:
        """The token may be missing where the proxy needs none: on this machine, or at the end of a tunnel."""
        local = urlsplit(cls.address(environ)).hostname in _LOOPBACK
        return "" if local and not environ.get(cls.key_variable) else super().key(environ)

    def request(self, query: str, topk: int) -> Request:
        request = super().request(query, topk)
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def read(self, reply: Reply) -> list[Row]:
        return RemoteBackend.read(self, reply)  # its 403 has nothing to do with settings.yml


class GoogleBackend(RemoteBackend):
    """Google's results from serper.dev."""

    name = "google"
    url_variable = "SERPER_URL"
    default_url = "https://google.serper.dev/search"
    key_variable = "SERPER_API_KEY"
    key_source = "get one at https://serper.dev"
    limits = Limits(rate=20.0, burst=20.0)
    uses_region = uses_language = True

    def request(self, query: str, topk: int) -> Request:
        body = {"q": query, "num": topk} | self.localised("gl", "hl")
        return Request("POST", self._url, headers={"X-API-KEY": self._key}, json=body)

    def read(self, reply: Reply) -> list[Row]:
        if reply.status == 400 and b"credits" in reply.body:  # its code for an empty account, no fault of the query
            raise SearchError("no_backend", f"answered 400: {first_line(reply.text)}")
        return super().read(reply)

    def rows(self, body: Any) -> list[Row]:
        return rows_of(at(body, "organic", default=[]), "title", "link", "snippet")


class SerpApiBackend(RemoteBackend):
    """Google's results from serpapi.com."""

    name = "serpapi"
    url_variable = "SERPAPI_URL"
    default_url = "https://serpapi.com/search.json"
    key_variable = "SERPAPI_API_KEY"
    key_source = "get one at https://serpapi.com/manage-api-key"
    limits = Limits(rate=2.0, burst=4.0)  # its own is an hourly one, a fifth of the month's searches
    uses_region = uses_language = True

    def request(self, query: str, topk: int) -> Request:
        params = {"engine": "google", "q": query, "num": str(topk), "api_key": self._key}
        params |= self.localised("gl", "hl")
        return Request("GET", self._url, params=params)

    def rows(self, body: Any) -> list[Row]:
        error = as_text(at(body, "error", default=""))
        if error and "any results" not in error:  # "Google hasn't returned any results for this query."
            raise SearchError("bad_reply", f"reports: {first_line(error)}")
        return rows_of(at(body, "organic_results", default=[]), "title", "link", "snippet")


class BingBackend(RemoteBackend):
    """The Bing Web Search API v7, kept for gateways that still speak it."""

    name = "bing"
    url_variable = "BING_SEARCH_URL"
    default_url = "https://api.bing.microsoft.com/v7.0/search"
    key_variable = "BING_SEARCH_KEY"
    key_source = "Microsoft gives out no new ones"
    remark = "Microsoft retired the Bing Search API on 11 August 2025; use another engine"
    limits = Limits(rate=3.0)
    uses_region = uses_language = True

    def request(self, query: str, topk: int) -> Request:
        params = {"q": query, "count": str(topk), "responseFilter": "Webpages"} | self.localised("cc", "setLang")
        return Request("GET", self._url, params=params, headers={"Ocp-Apim-Subscription-Key": self._key})

    def rows(self, body: Any) -> list[Row]:
        return rows_of(at(body, "webPages", "value", default=[]), "name", "url", "snippet")


class BaiduBackend(RemoteBackend):
    """Baidu's search from Qianfan (百度智能云千帆, 百度搜索)."""

    name = "baidu"
    url_variable = "QIANFAN_URL"
    default_url = "https://qianfan.baidubce.com/v2/ai_search/web_search"
    key_variable = "QIANFAN_API_KEY"
    key_source = "get one at https://console.bce.baidu.com/qianfan/ais/console/apiKey"
    limits = Limits(rate=1.0)
    max_query_chars = 72  # it takes 72 characters

    def request(self, query: str, topk: int) -> Request:
        body = {
            "messages": [{"role": "user", "content": query}],
            "search_source": "baidu_search_v2",
            "resource_type_filter": [{"type": "web", "top_k": min(topk, 50)}],
        }
        return Request("POST", self._url, headers={"Authorization": f"Bearer {self._key}"}, json=body)

    def rows(self, body: Any) -> list[Row]:
        code = at(body, "code", default="")
        if code and "references" not in body:  # an error under status 200
            raise SearchError("bad_reply", f"reports {code}: {first_line(as_text(at(body, 'message', default='')))}")
        return rows_of(at(body, "references", default=[]), "title", "url", "content")


class TavilyBackend(RemoteBackend):
    """tavily.com: snippets cut for language models."""

    name = "tavily"
    url_variable = "TAVILY_URL"
    default_url = "https://api.tavily.com/search"
    key_variable = "TAVILY_API_KEY"
    key_source = "get one at https://app.tavily.com"
    limits = Limits(rate=1.5)  # 100 a minute with a development key
    max_query_chars = 400

    def request(self, query: str, topk: int) -> Request:
        body = {"query": query, "max_results": min(topk, 20), "search_depth": "basic"}
        return Request("POST", self._url, headers={"Authorization": f"Bearer {self._key}"}, json=body)

    def rows(self, body: Any) -> list[Row]:
        return rows_of(at(body, "results"), "title", "url", "content")


class BraveBackend(RemoteBackend):
    """Brave Search's own index."""

    name = "brave"
    url_variable = "BRAVE_URL"
    default_url = "https://api.search.brave.com/res/v1/web/search"
    key_variable = "BRAVE_API_KEY"
    key_source = "get one at https://brave.com/search/api"
    limits = Limits(rate=1.0, burst=1.0)
    max_query_chars = 400
    uses_region = uses_language = True

    _LANGUAGES = {"zh": "zh-hans", "ja": "jp", "pt": "pt-br"}  # where it has a code of its own

    def request(self, query: str, topk: int) -> Request:
        words = " ".join(query.split()[:50])  # it takes 400 characters and 50 words
        params = {"q": words, "count": str(min(topk, 20)), "text_decorations": "false"}
        params |= {"country": self.region.upper()} if self.region else {}
        params |= {"search_lang": self._LANGUAGES.get(self.language, self.language)} if self.language else {}
        headers = {"X-Subscription-Token": self._key, "Accept": "application/json"}
        return Request("GET", self._url, params=params, headers=headers)

    def rows(self, body: Any) -> list[Row]:
        results = [] if at(body, "web", default={}) == {} else at(body, "web", "results", default=[])
        rows = rows_of(results, "title", "url", "description")
        return [row | {name: html.unescape(_TAG.sub("", row[name])) for name in ("title", "text")} for row in rows]
