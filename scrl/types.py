"""The records an episode is made of. Plain dataclasses: no torch, no ray, cheap to send anywhere."""

from array import array
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["answer", "malformed", "max_turns", "length", "error"]
TurnKind = Literal["tool_call", "answer", "malformed"]


@dataclass
class ToolCall:
    """A tool call the policy made. ``arguments`` are normalised: ``{"query": [...]}`` or ``{"url_list": [...]}``.

    ``coerced``: the policy's form was repaired (a lone string, arguments as JSON text, dropped items, a code fence).
    ``trailing``: something followed the action; it was ignored.
    """

    name: str
    arguments: dict[str, list[str]]
    coerced: bool = False
    trailing: bool = False


@dataclass
class ToolResult:
    """What a tool gave back: one item a query or URL, each a list of ``{title, url, text}``.

    A failure is a value here, never an exception: ``ok`` is False, ``error`` is one sentence for people and
    ``error_kind`` one of timeout, connection, bad_request, bad_reply, rate_limited, no_backend, internal, and
    not_recorded: a replay has nothing for it.
    """

    items: list[list[dict[str, str]]] = field(default_factory=list)
    ok: bool = True
    error: str = ""
    error_kind: str = ""
    latency_s: float = 0.0
    cached: bool = False


@dataclass
class Turn:
    """One policy turn. ``span`` is the (start, end) of its sampled tokens within ``Episode.response_ids``."""

    kind: TurnKind
    text: str = ""
    think: str = ""
    tool_call: ToolCall | None = None
    queries: list[str] = field(default_factory=list)
    answer: str | None = None
    reason: str = ""
    trailing: bool = False
    observation: str = ""
    observation_tokens: int = 0
    sources: list[tuple[str, str]] = field(default_factory=list)  # (title, URL) of each result
    span: tuple[int, int] = (0, 0)
    search_ok: bool = True
    noisy_queries: int = 0  # of ``queries``, how many got another query's results on purpose (SearchNoise)
    latency_s: float = 0.0
    generate_s: float = 0.0
    version: int = -1


@dataclass(frozen=True)
class SearchNoise:
    """With ``probability`` a query gets the results of one of ``queries``; drawn from ``seed``."""

    probability: float
    queries: tuple[str, ...]
    seed: int


@dataclass
class EpisodeRequest:
    """What the driver asks a rollout worker for: one sample of one question.

    ``uid`` names the group, ``sample_index`` the sample in it. ``seed`` is None (random), or the run's seed for this
    step: token draws then depend on (seed, uid, sample_index, turn) alone.
    """

    uid: str
    sample_index: int
    index: int
    question: str
    ground_truths: list[str]
    data_source: str
    prompt_ids: list[int]
    max_turns: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    noise: SearchNoise | None = None


@dataclass
class Episode:
    """A finished episode. ``response_mask`` is 1 where the policy sampled the token, 0 on observations and frames;
    ``message_str`` is all of it as text, prompt and special tokens too. What there is of each token is an array, not a
    list: a step has millions of them, which travel between processes and become tensors."""

    uid: str
    sample_index: int
    index: int
    question: str
    ground_truths: list[str]
    data_source: str
    prompt_ids: list[int]
    response_ids: "array[int]" = field(default_factory=lambda: array("i"))
    response_mask: "array[int]" = field(default_factory=lambda: array("b"))
    rollout_logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    turns: list[Turn] = field(default_factory=list)
    finish: FinishReason = "error"
    error: str = ""
    version: int = -1
    message_str: str = ""

    @property
    def search_depth(self) -> int:
        """Number of tool turns."""
        return sum(turn.kind == "tool_call" for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """The final answer's text; None when the episode didn't end with one. Only the last policy turn counts."""
        return self.turns[-1].answer if self.turns and self.turns[-1].kind == "answer" else None
