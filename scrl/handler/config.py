"""What the search handler needs to know. Free of the trainer: a search server runs without it."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class HandlerConfig:
    """Checked when made: ValueError with value, reason and remedy."""

    search_engine: str = "local"
    index_corpus: str = ""  # .jsonl or .parquet of {title, url, text}, for search_engine=local
    index_dir: str = ""  # "": a folder index/ beside the corpus
    topk: int = 3  # results a query
    max_queries: int = 3  # queries run of one call; the rest get no results
    timeout_s: float = 30.0  # a call, whole, its wait for a thread included
    max_workers: int = 16  # threads, and so searches at once
    cache_size: int = 4096  # queries whose results are kept in memory

    def __post_init__(self) -> None:
        for name, least in (("topk", 1), ("max_queries", 1), ("max_workers", 1), ("cache_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"search.{name}={getattr(self, name)} is too small; give {least} or more")
        if not self.timeout_s > 0:
            raise ValueError(f"search.timeout_s={self.timeout_s} leaves no time to search; give seconds above 0")

    @classmethod
    def from_config(cls, config: Any) -> "HandlerConfig":
        """From the trainer's configuration: ``search_engine`` at its top, the rest in its section ``search``."""
        names = {field.name for field in fields(cls)} - {"search_engine"}
        values = {name: getattr(config.search, name) for name in names if hasattr(config.search, name)}
        return cls(search_engine=config.search_engine, **values)
