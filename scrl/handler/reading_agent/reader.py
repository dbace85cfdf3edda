"""What reads a page for an episode: the interface, and the choice between a model and none."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadTask:
    """A page to read for a question. ``views``: its viewports in order, those within the budget.

    ``query``: the search that found it ("" unknown). ``known``: notes that the episode has already, not to be made
    again. ``deadline``: ``time.monotonic()`` seconds.
    """

    title: str
    views: tuple[str, ...]
    question: str
    query: str = ""
    known: frozenset[str] = frozenset()
    deadline: float = float("inf")


class Reader(Protocol):
    """Reads pages. Many threads call ``read`` at once."""

    name: str

    def read(self, task: ReadTask) -> list[str]:
        """What the page says that helps with the question and is not known yet, a note each. Doesn't raise."""
        ...

    def close(self) -> None: ...


def make_reader(environ: Mapping[str, str], count: Callable[[str], None] = lambda name: None) -> Reader:
    """A model where READER_MODEL names one (nobody pays by surprise), else the extractive reader, which needs none.

    READER_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY say which model, where, and with which key; ``count`` is told of
    requests, retries and fallbacks. Raises ValueError for a base URL that is none.
    """
    from scrl.handler.reading_agent.extractive import ExtractiveReader
    from scrl.handler.reading_agent.llm import LlmReader, ReaderModel

    model = ReaderModel.from_env(environ)
    if model is None:
        return ExtractiveReader()
    logger.info("web pages are read by %s at %s", model.name, model.base_url)
    return LlmReader(model, count=count)
