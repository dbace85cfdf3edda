"""What the search handler needs to know. Free of the trainer: a search server runs without it."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

_LEAST = {
    "topk": 1,
    "max_queries": 1,
    "max_workers": 1,
    "cache_size": 0,
    "page_view_port_size": 100,
    "max_page_views": 1,
}
MAX_TIMEOUT_S = 86_400.0
CONFIG_FILE = Path(__file__).with_name("config.yaml")


@dataclass(frozen=True)
class HandlerConfig:
    """Checked when made: ValueError with value, reason and remedy."""

    search_engine: str | tuple[str, ...] = "local"  # several: in order of preference
    index_corpus: str = ""  # .jsonl or .parquet of {title, url, text}, for search_engine=local
    index_dir: str = ""  # "": a folder index/ beside the corpus
    topk: int = 3  # results a query
    max_queries: int = 3  # queries, or URLs, run of one call; the rest get no results
    timeout_s: float = 30.0  # a call, whole, its wait for a thread included
    max_workers: int = 16  # threads, and so searches at once
    rate_limit: float | None = None  # requests a second to each engine on the network; None: the engine's own default
    region: str = ""  # two letters of a country, such as us, for engines that have regions; "": the engine's default
    language: str = ""  # two letters, such as en; "": the engine's default
    browse_any_url: bool = False  # browse_webpage may read what no search of the episode found
    page_view_port_size: int = 8192  # characters of a page that the reading agent sees at once
    max_page_views: int = 8  # viewports read of a page, at most
    cache_size: int = 4096  # queries whose results are kept in memory
    cache_path: str = ""  # a file that keeps them for every process and run; "": memory only
    cache_mode: Literal["reuse", "record", "replay"] = "reuse"  # record and replay: a run is repeated offline exactly
    cache_ttl_s: float = 604800.0  # seconds that results count: 7 days
    cache_empty_ttl_s: float = 300.0  # seconds that an empty result counts
    cache_fuzzy_threshold: float = 0.0  # share of words that a similar query must have in common; 0: the same only
    host: str = "127.0.0.1"  # where the servers listen; another address needs SCRL_TOKEN in the environment
    port: int = 5005  # of the search server, server_handler.py
    proxy_port: int = 5004  # of the proxy, handler.py: the trainer's search.server_url
    server_url_list: tuple[str, ...] = ("http://127.0.0.1:5005",)  # the search servers behind the proxy

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"search.{name}={getattr(self, name)} is too small; give {least} or more")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"search.timeout_s={self.timeout_s} is no deadline; give seconds above 0, {MAX_TIMEOUT_S:g} at most"
            )
        if self.rate_limit is not None and not self.rate_limit > 0:
            raise ValueError(f"search.rate_limit={self.rate_limit} allows no request; give requests a second, or null")
        for name in ("region", "language"):
            code = getattr(self, name)
            if code and not (len(code) == 2 and code.isascii() and code.islower()):
                raise ValueError(f"search.{name}={code!r} is no code; write two small letters, such as us or en, or ''")
        self._check_cache()

    def _check_cache(self) -> None:
        mode, threshold = self.cache_mode, self.cache_fuzzy_threshold
        if mode not in ("reuse", "record", "replay"):
            raise ValueError(f"search.cache_mode={mode!r} is unknown; use reuse, record or replay")
        if mode != "reuse" and not self.cache_path:
            raise ValueError(f"search.cache_mode={mode} needs a file; set search.cache_path")
        for name, least in (("cache_ttl_s", 1.0), ("cache_empty_ttl_s", 0.0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"search.{name}={getattr(self, name)} is no time; give {least:g} seconds or more")
        if not (threshold == 0 or 0.3 <= threshold <= 1):
            raise ValueError(
                f"search.cache_fuzzy_threshold={threshold} is out of range; give 0.3 to 1 (0.8 is strict), or 0 for off"
            )
        if threshold and mode == "record":
            raise ValueError(
                f"search.cache_fuzzy_threshold={threshold} would record what happened to be there instead of results; "
                "set it to 0 with search.cache_mode=record"
            )

    @classmethod
    def from_config(cls, config: Any) -> "HandlerConfig":
        """From the trainer's configuration: ``search_engine`` at its top, the rest in its section ``search``."""
        names = {field.name for field in fields(cls)} - {"search_engine"}
        values = {name: getattr(config.search, name) for name in names if hasattr(config.search, name)}
        return cls(search_engine=config.search_engine, **values)


def config_from_arguments(
    description: str | None, arguments: Sequence[str] | None, defaults: Sequence[str] = ()
) -> HandlerConfig:
    """A server's configuration from its command line: a YAML file, and ``key=value`` over it.

    ``defaults``: a script's own, over the file and under the command line. Raises ValueError for an unknown key, a
    value that can't be, and a file that can't be read.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG_FILE, help="YAML file of keys (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the file, such as port=5006")
    options = parser.parse_args(arguments)
    return load_config(options.config, [*defaults, *options.overrides])


def load_config(path: Path | str = CONFIG_FILE, overrides: Sequence[str] = ()) -> HandlerConfig:
    """``path`` with ``overrides`` ("key=value", the value as in YAML) over it. ValueError as above."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} can't be read as YAML ({error}); give another --config") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no keys; write key: value, a line each")
    for override in overrides:
        key, given, text = override.partition("=")
        if not given:
            raise ValueError(f"{override!r} is no key=value; write it as port=5006")
        try:
            values[key.lstrip("+")] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[key.lstrip("+")] = text
    return _from_values(values)


def _from_values(values: dict[str, Any]) -> HandlerConfig:
    from pydantic import TypeAdapter, ValidationError

    known = [field.name for field in fields(HandlerConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ValueError(f"unknown key {key}; " + (f"did you mean {near[0]}?" if near else f"known: {known}"))
    corpus = values.get("index_corpus")
    if (
        isinstance(corpus, str) and corpus and not Path(corpus).exists()
    ):  # relative: from here, else from the repository
        values["index_corpus"] = str(CONFIG_FILE.parents[2] / corpus)
    try:
        return TypeAdapter(HandlerConfig).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        if own := first.get("ctx", {}).get("error"):  # raised by HandlerConfig itself: a whole sentence
            raise ValueError(str(own)) from None
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}={first['input']!r} can't be: {first['msg']}") from None
