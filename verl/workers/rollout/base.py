"""The contract every generation engine keeps: token ids in, token ids and log-probs out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion.

    ``seed`` fixes the draw: the same seed and the same logits give the same tokens, whatever else is in the batch.
    ``order`` sorts requests of one batch (uid, sample, turn) in deterministic mode.
    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep the whole vocabulary.
    ``on_token`` hears every sampled token as it comes, on the engine's own thread.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    order: tuple = ()
    on_token: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Completion:
    """``token_ids`` as sampled (the stop token included), ``logprobs`` at the sampling temperature, same length.

    ``finish_reason``: stop (a stop token was sampled) or length. ``version``: the weights that sampled it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


class RolloutEngine(Protocol):
    """An engine serves one rollout worker. ``version`` is the training step whose weights it holds.

    ``failed``: it will generate nothing any more, and its worker has to be replaced.
    """

    version: int

    @property
    def failed(self) -> bool: ...

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion: ...

    async def update_weights(self, weights: dict[str, Any], version: int) -> None:
        """``weights``: {"weights": name -> CPU tensor, "peft_config": dict or None}, as the actor exports them.

        With a ``peft_config`` they are an adapter's (PEFT names), without one all parameters. Once this returns,
        ``version`` is the new one; a batch under way is finished with the old weights first.
        """

    def begin_episode(self) -> None:
        """One more episode is alive and will ask for a completion, unless it waits for a tool."""

    def end_episode(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...
