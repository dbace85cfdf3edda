"""The episode loop: the policy thinks and acts, tools answer, until it gives its answer. One coroutine an episode.

Token ids are appended as the engine sampled them, with their log-probs and their mask at the same moment: nothing is
decoded and encoded again to build a training batch.
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from scrl.llm_agent import prompts
from scrl.llm_agent.noise import with_noise
from scrl.llm_agent.parsing import Answer, Malformed, parse_turn, split_think
from scrl.types import Episode, EpisodeRequest, ToolCall, ToolResult, Turn
from verl.workers.rollout.base import Completion, RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)

_TOOL_GRACE_S = 5.0  # the handler keeps its own deadline; this is how much later the loop gives up on it
_CHARS_PER_TOKEN = 16  # a result's text is cut here before it is encoded, so that a huge page costs little


class ToolHandler(Protocol):
    """Runs tool calls elsewhere (threads, a server). A tool's failure is the future's value, not its exception."""

    def submit(self, call: ToolCall, *, episode_id: str, question: str) -> "Future[ToolResult]":
        """``episode_id`` is used by one episode only: what its calls found is kept under it until ``release``."""
        ...

    def release(self, episode_id: str) -> None:
        """The episode has ended, however it did. Neither blocks nor raises."""
        ...


class EpisodeListener(Protocol):
    """Hears how an episode goes, to show it to somebody. ``token`` is called on the engine's thread."""

    def token(self, token_id: int) -> None: ...

    def turn(self, turn: Turn) -> None:
        """The policy's turn is whole; its tool, if it called one, is about to run."""

    def observation(self, turn: Turn) -> None:
        """``turn.observation`` is there."""


@dataclass(frozen=True)
class GenerationSettings:
    """Limits of an episode, in tokens, except ``tool_timeout_s``."""

    max_model_len: int  # prompt and response together
    max_response_length: int  # all turns, observations and frames
    max_turn_tokens: int  # sampled in one turn
    max_obs_length: int  # one observation, its frame left out
    tools: tuple[str, ...] = ("web_search",)
    tool_timeout_s: float = 30.0


class LLMGenerationManager:
    """Plays episodes on an engine. Raises ValueError when the limits leave no room for a turn after an observation."""

    def __init__(
        self, engine: RolloutEngine, tokenizer: Any, handler: ToolHandler, settings: GenerationSettings
    ) -> None:
        unknown = set(settings.tools) - prompts.TOOLS.keys()
        if unknown:
            raise ValueError(f"tools={list(settings.tools)} names {sorted(unknown)}; known are {sorted(prompts.TOOLS)}")
        self._engine, self._tokenizer, self._handler, self._settings = engine, tokenizer, handler, settings
        self._frame = prompts.ChatFrame(tokenizer, settings.tools)
        stops = (self._frame.end_of_turn_id, tokenizer.eos_token_id)
        self._stop_ids = tuple(dict.fromkeys(i for i in stops if i is not None))
        needed = self._frame.overhead(last=True) + settings.max_obs_length
        for name in ("max_model_len", "max_response_length"):
            limit = getattr(settings, name)
            if needed >= limit:
                raise ValueError(
                    f"max_obs_length={settings.max_obs_length} leaves no room for a turn in {name}={limit}; lower it "
                    f"below {settings.max_obs_length - (needed - limit)} or raise {name}"
                )

    async def run(self, requests: Sequence[EpisodeRequest], listener: EpisodeListener | None = None) -> list[Episode]:
        """All episodes side by side, results in the order of ``requests``. An episode's failure is that episode's.

        ``listener`` hears of all of them: one request is what makes sense with it.
        """
        for _ in requests:  # all before any starts: a deterministic engine waits until it has heard from every one
            self._engine.begin_episode()
        tasks = [asyncio.ensure_future(self._play_safely(request, listener)) for request in requests]
        for task in tasks:  # a callback, because a task cancelled before its first step never gets to a finally
            task.add_done_callback(lambda _: self._engine.end_episode())
        return list(await asyncio.gather(*tasks))

    async def run_episode(self, request: EpisodeRequest, listener: EpisodeListener | None = None) -> Episode:
        return (await self.run([request], listener))[0]

    async def _play_safely(self, request: EpisodeRequest, listener: EpisodeListener | None) -> Episode:
        episode = Episode(
            uid=request.uid,
            sample_index=request.sample_index,
            index=request.index,
            question=request.question,
            ground_truths=request.ground_truths,
            data_source=request.data_source,
            prompt_ids=list(request.prompt_ids),
        )
        episode_id = f"{request.uid}/{request.sample_index}/{uuid.uuid4().hex}"
        try:
            await self._play(request, episode, episode_id, listener)
        except Exception as error:  # whatever it was, the other episodes of the batch must live
            logger.exception("episode %s/%d failed", request.uid, request.sample_index)
            episode.finish = "error"
            episode.error = f"Turn {len(episode.turns)} failed: {type(error).__name__}: {error}"
        finally:  # also when cancelled
            self._handler.release(episode_id)
        episode.message_str = self._text([*episode.prompt_ids, *episode.response_ids])
        return episode

    async def _play(
        self, request: EpisodeRequest, episode: Episode, episode_id: str, listener: EpisodeListener | None
    ) -> None:
        tool_turns = 0
        while True:
            budget = min(self._settings.max_turn_tokens, self._room(episode))
            if budget < 1:
                episode.finish = "length"
                return
            turn, parsed, completion = await self._policy_turn(request, episode, budget, listener)
            if listener is not None:
                listener.turn(turn)
            if isinstance(parsed, Answer):
                episode.finish = "answer"
                return
            if isinstance(parsed, Malformed):
                cut_by_context = completion.finish_reason == "length" and budget < self._settings.max_turn_tokens
                episode.finish = "length" if cut_by_context else "malformed"
                return
            if tool_turns >= request.max_turns:
                # Not a tool turn: nothing was searched, so it must not count towards the search depth.
                turn.kind, turn.reason = "malformed", "it called a tool when no calls were left"
                episode.finish = "max_turns"
                return
            sent, turn.noisy_queries = with_noise(parsed, request)
            observation, observation_ids = await self._tool_turn(parsed, sent, turn, episode_id, request.question)
            tool_turns += 1
            framed = self._frame.wrap(
                observation_ids,
                turn_ended=completion.token_ids[-1:] == [self._frame.end_of_turn_id],
                last=tool_turns >= request.max_turns,
            )
            if len(framed) >= self._room(episode):
                episode.finish = "length"
                return
            turn.observation, turn.observation_tokens = observation, len(observation_ids)
            _append(episode, framed, [0.0] * len(framed), mask=0)
            if listener is not None:
                listener.observation(turn)

    async def _policy_turn(
        self, request: EpisodeRequest, episode: Episode, budget: int, listener: EpisodeListener | None
    ) -> tuple[Turn, Answer | ToolCall | Malformed, Completion]:
        """Samples one turn of at most ``budget`` tokens, appends it, and says what it means."""
        order = (request.uid, request.sample_index, len(episode.turns))
        params = SamplingParams(
            max_new_tokens=budget,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=None if request.seed is None else turn_seed(request.seed, *order),
            stop_token_ids=self._stop_ids,
            order=order,
            on_token=None if listener is None else listener.token,
        )
        started = time.perf_counter()
        completion = await self._engine.generate([*episode.prompt_ids, *episode.response_ids], params)
        generate_s = time.perf_counter() - started
        assert len(completion.token_ids) == len(completion.logprobs) <= budget, "the engine broke its contract"
        spoken = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
        text = prompts.FORCED_PREFIX + self._text(spoken)
        parsed = parse_turn(text)
        start = len(episode.response_ids)
        _append(episode, completion.token_ids, completion.logprobs, mask=1)
        turn = _describe(text, parsed)
        turn.span = (start, len(episode.response_ids))
        turn.generate_s, turn.version = generate_s, completion.version
        if not episode.turns:
            episode.version = completion.version
        episode.turns.append(turn)
        return turn, parsed, completion

    async def _tool_turn(
        self, call: ToolCall, sent: ToolCall, turn: Turn, episode_id: str, question: str
    ) -> tuple[str, list[int]]:
        """Runs ``sent`` as the policy's ``call``; (observation, its token ids), at most ``max_obs_length`` of them. A
        failure is told in it."""
        started = time.perf_counter()
        if call.name in self._settings.tools:
            result = await self._run_tool(sent, episode_id, question)
        else:
            message = f"{call.name} is not available; use {' or '.join(self._settings.tools)}."
            result = ToolResult(ok=False, error=message, error_kind="bad_request")
        turn.latency_s = time.perf_counter() - started
        turn.search_ok = result.ok
        if not result.ok:
            fitting = self._fit(lambda n: prompts.render_error(result.error[:n]), len(result.error))
            return fitting[:2] if fitting else ("", [])
        (asked,) = call.arguments.values()
        text, ids, shown = self._fit_results(asked, result.items)
        rows = [row for rows in result.items for row in rows][:shown]
        turn.sources = [(row.get("title", ""), row.get("url", "")) for row in rows]
        return text, ids

    async def _run_tool(self, call: ToolCall, episode_id: str, question: str) -> ToolResult:
        deadline = self._settings.tool_timeout_s + _TOOL_GRACE_S
        future = self._handler.submit(call, episode_id=episode_id, question=question)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline)
        except TimeoutError:
            return ToolResult(ok=False, error=f"{call.name} took more than {deadline:g} s.", error_kind="timeout")

    def _fit_results(self, asked: list[str], items: list[list[dict[str, str]]]) -> tuple[str, list[int], int]:
        """As many whole results as fit, from the first on, else the first with its text shortened; valid JSON. (Text,
        its token ids, results in it)"""
        longest = self._settings.max_obs_length * _CHARS_PER_TOKEN
        items = [[{k: v[:longest] for k, v in result.items()} for result in results] for results in items]
        with_url = "browse_webpage" in self._settings.tools

        def first(n: int, text_length: int | None = None) -> str:
            kept, left = [], n
            for results in items:
                kept.append([{**r, "text": r.get("text", "")[:text_length]} for r in results[:left]])
                left -= len(kept[-1])
            return prompts.render_observation(asked, kept, with_url)

        total = sum(map(len, items))
        if total and (fitting := self._fit(first, total, least=1)):
            return fitting
        if total and (fitting := self._fit(lambda n: first(1, n), longest)):
            return *fitting[:2], 1
        fitting = self._fit(lambda n: prompts.render_observation(asked[:n], [[]] * len(asked[:n])), len(asked))
        return (*fitting[:2], 0) if fitting else ("", [], 0)

    def _fit(self, render: Callable[[int], str], most: int, least: int = 0) -> tuple[str, list[int], int] | None:
        """The rendering of the largest n in [least, most] within ``max_obs_length`` tokens, by bisection, and n."""
        best = None
        n = most
        while least <= most:
            text = prompts.writable(render(n))
            ids = prompts.encode_untrusted(self._tokenizer, text)
            if len(ids) <= self._settings.max_obs_length:
                best, least = (text, ids, n), n + 1
            else:
                most = n - 1
            n = (least + most + 1) // 2
        return best

    def _text(self, ids: list[int]) -> str:
        """Special tokens stay: here they are words like any other, and the record should show them."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _room(self, episode: Episode) -> int:
        """Tokens that still fit."""
        used = len(episode.response_ids)
        return min(
            self._settings.max_model_len - len(episode.prompt_ids) - used, self._settings.max_response_length - used
        )


def turn_seed(seed: int, uid: str, sample_index: int, turn: int) -> int:
    """The seed of one turn's token draws: the same in every process and Python (``hash`` is salted), 63 bits."""
    name = repr((seed, uid, sample_index, turn)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def _append(episode: Episode, ids: list[int], logprobs: list[float], mask: int) -> None:
    episode.response_ids.extend(ids)
    episode.rollout_logprobs.extend(logprobs)
    episode.response_mask.extend([mask] * len(ids))


def _describe(text: str, parsed: Answer | ToolCall | Malformed) -> Turn:
    think = split_think(text)[0] or ""
    match parsed:
        case Answer():
            return Turn("answer", text, think, answer=parsed.text, trailing=parsed.trailing)
        case ToolCall():
            queries = parsed.arguments.get("query", [])
            return Turn("tool_call", text, think, tool_call=parsed, queries=queries, trailing=parsed.trailing)
        case Malformed():
            return Turn("malformed", text, think, reason=parsed.reason)
