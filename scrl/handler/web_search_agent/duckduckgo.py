"""DuckDuckGo, which has no API: its HTML page, fetched and read with the parts of the package ``ddgs``."""

from collections.abc import AsyncIterator
from typing import Any

import primp
from ddgs.engines.duckduckgo import Duckduckgo
from lxml.etree import LxmlError

from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.local_index import Row
from scrl.handler.web_search_agent.remote import RemoteBackend, rows_of
from scrl.handler.web_search_agent.resilience import Limits
from scrl.handler.web_search_agent.transport import Reply, Request, Transport, check_status, first_line, read_bounded


class PrimpTransport:
    """primp, whose TLS handshake and headers are a browser's; DuckDuckGo turns others away."""

    def __init__(self) -> None:
        self._client = primp.AsyncClient(
            impersonate="random", impersonate_os="random", cookie_store=False, follow_redirects=False
        )

    async def fetch(self, request: Request) -> Reply:
        try:
            response = await self._client.request(
                request.method, request.url, headers=request.headers, data=request.form, stream=True
            )
            headers = {name.lower(): value for name, value in response.headers.items()}
            body = await read_bounded(headers, _chunks(response))
            return Reply(response.status_code, headers, body)
        except primp.PrimpError as error:  # it has one class for a body cut off and a body that can't be decoded
            raise SearchError("connection", f"can't be reached or hung up ({error})", retryable=True) from error

    async def aclose(self) -> None:
        pass  # it has nothing to close


async def _chunks(response: primp.AsyncResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    finally:
        await response.aclose()


class DuckDuckGoBackend(RemoteBackend):
    """DuckDuckGo without a key, and without a promise: it slows down who asks often.

    ``ddgs`` itself reports every failure as "no results". So its request, its transport and its parser are used, and
    the reply's status is judged here.
    """

    name = "duckduckgo"
    url_variable = "DUCKDUCKGO_URL"
    default_url = "https://html.duckduckgo.com/html"
    limits = Limits(rate=1.0, burst=2.0)
    max_query_chars = 500
    uses_region = uses_language = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._page = Duckduckgo()

    def transport(self) -> Transport:
        return PrimpTransport()

    def request(self, query: str, topk: int) -> Request:
        # Its region is country-language, and wt-wt is none.
        region = f"{self.region or 'us'}-{self.language or 'en'}" if self.region or self.language else "wt-wt"
        form = self._page.build_payload(query=query, region=region, safesearch="moderate", timelimit=None)
        return Request(self._page.search_method, f"{self._url}/", form=form)

    def read(self, reply: Reply) -> list[Row]:
        check_status(reply)
        if reply.status == 202:  # its page for those who ask too often
            raise SearchError("rate_limited", "answered 202, a check for robots", retryable=True)
        try:
            found = self._page.post_extract_results(self._page.extract_results(reply.text))
        except (LxmlError, ValueError) as error:
            raise SearchError("bad_reply", f"sent a page that can't be read ({error})") from error
        rows = rows_of([vars(result) for result in found], "title", "href", "body")
        if not rows and "no-results" not in reply.text:
            raise SearchError("bad_reply", f"sent a page without results: {first_line(reply.text)}")
        return rows
