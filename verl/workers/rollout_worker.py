"""The rollout worker as a Ray actor: wiring only. An engine, and beside it the episode loop and the search handler."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from scrl.llm_agent.generation import EpisodeListener, GenerationSettings, LLMGenerationManager
from scrl.types import Episode, EpisodeRequest
from verl.trainer.config.schema import Config
from verl.utils.tokenizer import load_tokenizer
from verl.workers.rollout import build_engine
from verl.workers.search import open_search

logger = logging.getLogger(__name__)


class RolloutWorker:
    """Plays episodes with the weights it was last given. Its methods are coroutines: many calls run side by side."""

    def __init__(self, config: Config, worker_index: int) -> None:
        self._config, self._index = config, worker_index

    async def ready(self, weights: dict[str, Any] | None = None, version: int = 0) -> int:
        """Load the model and open the search, once, before anything else is asked; take ``weights``, if any, as
        ``update_weights`` does. Returns the version now held.

        Here and not in the constructor, whose errors Ray wraps beyond recognition.
        Raises ValueError for a model path, a search engine or limits that can't work.
        """
        config, device = self._config, "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            torch.set_num_threads(1)  # several processes with several threads each slow one another tenfold
        self._handler = await open_search(config)
        self._engine = build_engine(config, device)
        settings = GenerationSettings(
            max_model_len=config.actor_rollout_ref.rollout.max_model_len,
            max_response_length=config.data.max_response_length,
            max_turn_tokens=config.actor_rollout_ref.rollout.max_turn_tokens,
            max_obs_length=config.search.max_obs_length,
            tools=config.tools,
            tool_timeout_s=config.search.timeout_s,
        )
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        self._manager = LLMGenerationManager(self._engine, tokenizer, self._handler, settings)
        return self._engine.version if weights is None else await self.update_weights(weights, version)

    async def generate(self, requests: Sequence[EpisodeRequest]) -> list[Episode]:
        """The requests' episodes, in their order; one that failed has finish ``error``."""
        episodes = await self._manager.run(requests)
        self._end_if_failed()
        return episodes

    async def play(self, request: EpisodeRequest, listener: EpisodeListener | None = None) -> Episode:
        """One episode with somebody watching."""
        return await self._manager.run_episode(request, listener)

    async def update_weights(self, weights: dict[str, Any], version: int) -> int:
        """``weights``: what ``ActorRefWorker.export_weights`` gave. Returns the version now held."""
        try:
            await self._engine.update_weights(weights, version)
        finally:
            self._end_if_failed()
        return self._engine.version

    @property
    def failed(self) -> bool:
        return self._engine.failed

    def _end_if_failed(self) -> None:
        """An engine that died takes its worker with it: the driver replaces it, and has its episodes played again."""
        if self.failed:
            logger.error("worker %d: its engine died", self._index)
            os._exit(1)

    async def metrics(self) -> dict[str, float]:
        return {**self._engine.metrics(), **self._handler.metrics()}

    def close(self) -> None:
        """Let search and engine go. A Ray actor just ends; this is for a worker in somebody's own process."""
        self._handler.close()
        self._engine.close()
