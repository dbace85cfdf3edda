"""Noise in the search results: some queries get what the search engine says to another one."""

import hashlib
from dataclasses import replace

from scrl.types import EpisodeRequest, ToolCall


def with_noise(call: ToolCall, request: EpisodeRequest) -> tuple[ToolCall, int]:
    """The call to send in place of ``call``, and how many of its queries were replaced.

    Each query is replaced with ``request.noise.probability``, by one of ``request.noise.queries`` that isn't the
    episode's own question. The draw depends on (seed, group, query) alone: within a group the same query always meets
    the same results, so that differences of reward tell of the policy and not of its luck, and a query that is noisy
    at one probability is noisy at every higher one.
    """
    noise = request.noise
    if noise is None or call.name != "web_search":
        return call, 0
    others = [query for query in noise.queries if query != request.question]
    sent, replaced = [], 0
    for query in call.arguments["query"]:
        share, choice = _draws(noise.seed, request.uid, query)
        noisy = bool(others) and share < noise.probability
        sent.append(others[choice % len(others)] if noisy else query)
        replaced += noisy
    return (replace(call, arguments={"query": sent}), replaced) if replaced else (call, 0)


def _draws(seed: int, uid: str, query: str) -> tuple[float, int]:
    """A number in [0, 1) and a whole number of 32 bits, the same in every process (``hash`` is salted)."""
    name = repr((seed, uid, " ".join(query.casefold().split()))).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "big") / 2**32, int.from_bytes(digest[4:], "big")
