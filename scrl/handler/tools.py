"""What tools do that are neither search nor browsing. What the policy is told of them: scrl/llm_agent/prompts.py.

A tool takes one item of its call's list (a string that the policy wrote: trust nothing about it) and a deadline
(``time.monotonic()`` seconds); it returns rows {title, url, text}, or raises SearchError(kind, sentence). It runs on a
thread of its own; what it raises beyond that is counted and logged, and costs that call alone.
"""

from collections.abc import Callable

from scrl.handler.web_search_agent.local_index import Row

TOOL_FUNCTIONS: dict[str, Callable[[str, float], list[Row]]] = {}
