"""What gets harder as the run goes on: stages of ``max_turns``, and noise in the search results. Pure Python."""

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from verl.trainer.config.schema import CurriculumConfig, SearchNoiseConfig

Event = Literal["promote", "rollback"]


def noise_probability(config: "SearchNoiseConfig", step: int, total_steps: int) -> float:
    """How likely a query gets another query's results in ``step`` of 1 .. ``total_steps``.

    ``p_s + (b^(i/m) - 1) / (b - 1) * (p_e - p_s)``, ZeroSearch's curve (Sun et al. 2025, arXiv:2505.04588, eq. 2;
    there b = 4): with b above 1 most of the change comes late, b = 1 is its limit, a straight line. A function of the
    step alone, so there is nothing to save. Steps beyond the last count as the last.
    """
    done = min(1.0, step / max(total_steps, 1))
    grown = done if config.base == 1 else (config.base**done - 1) / (config.base - 1)
    return config.start + grown * (config.end - config.start)


class CurriculumScheduler:
    """Holds the stage that the next training step runs in.

    **By score** (``steps`` empty): promoted when the mean F1 of the last ``window`` steps, all of them in this stage,
    is above ``thresholds[stage]``. Rolled back when, ``patience`` steps in a row, the mean of what the stage has seen
    (at most ``window`` steps) is below ``thresholds[stage - 1] - hysteresis``: the score that let it in, less a
    margin. The means start anew with each stage, because F1 under other ``max_turns`` is another quantity. So a
    promotion needs ``window`` good steps and a roll-back ``patience`` bad ones, and a score that hovers at the
    threshold does neither twice in a row: it can't flutter. A policy that loses a stage again and again can't either:
    each loss raises what is asked to enter it by another ``hysteresis``.

    **By step** (``steps`` given): stage i + 1 starts at training step ``steps[i]`` (the first step is 1).

    Disabled, it stays at the defaults. That the configuration's parts fit one another is for its validation to see.
    """

    def __init__(self, config: "CurriculumConfig", default_max_turns: int, default_min_turns: int) -> None:
        self._config = config
        self._stages: tuple[int, ...] = tuple(config.stages) if config.enable else (default_max_turns,)
        own_min_turns = tuple(config.min_turns) if config.enable else ()
        self._min_turns = own_min_turns or (default_min_turns,) * len(self._stages)
        self._history: deque[float] = deque(maxlen=config.window)
        self._below = 0
        self._lost = [0] * (len(self._stages) - 1)  # how often the stage behind each gate was left by roll-back
        self._stage = self._stage_at(1) if self._by_step else 0

    @property
    def _by_step(self) -> bool:
        return bool(self._config.enable and self._config.steps)

    def _stage_at(self, step: int) -> int:
        return sum(start <= step for start in self._config.steps)

    @property
    def stage(self) -> int:
        """0 for the first."""
        return self._stage

    @property
    def max_turns(self) -> int:
        """Tool turns an episode may take."""
        return self._stages[self._stage]

    @property
    def min_turns(self) -> int:
        """Tool turns below which an answer costs the early-stop penalty."""
        return self._min_turns[self._stage]

    def update(self, f1: float, step: int) -> Event | None:
        """Take in the mean training F1 of ``step``, just done. Returns what happened to the stage, if anything did.

        A step without a finite F1 (every episode failed) says nothing about the policy and is passed over.
        """
        if not self._config.enable:
            return None
        if math.isfinite(f1):
            self._history.append(f1)
        if self._by_step:
            return self._move_to(self._stage_at(step + 1))
        if not math.isfinite(f1):
            return None
        mean = sum(self._history) / len(self._history)
        self._below = self._below + 1 if mean < self._roll_back_line else 0
        if self._below >= self._config.patience:
            return self._move_to(self._stage - 1)
        full = len(self._history) == self._config.window
        if full and mean > self._promotion_line:
            return self._move_to(self._stage + 1)
        return None

    @property
    def _promotion_line(self) -> float:
        if self._stage + 1 == len(self._stages):
            return math.inf
        return self._config.thresholds[self._stage] + self._lost[self._stage] * self._config.hysteresis

    @property
    def _roll_back_line(self) -> float:
        if self._stage == 0:
            return -math.inf
        return self._config.thresholds[self._stage - 1] - self._config.hysteresis

    def _move_to(self, stage: int) -> Event | None:
        if stage == self._stage:
            return None
        event: Event = "promote" if stage > self._stage else "rollback"
        if event == "rollback":
            self._lost[stage] += 1
        self._stage, self._below = stage, 0
        self._history.clear()
        return event

    def metrics(self) -> dict[str, float]:
        """``curriculum/*``; ``f1_mean`` only once the stage has seen a step."""
        values = {"stage": self._stage, "max_turns": self.max_turns, "min_turns": self.min_turns, "below": self._below}
        if self._history:
            values["f1_mean"] = sum(self._history) / len(self._history)
        return {f"curriculum/{name}": float(value) for name, value in values.items()}

    # ------------------------------------------------------------------------------------------------------- resuming
    def _plan(self) -> dict[str, Any]:
        """What the saved numbers mean something under. A disabled curriculum has none: max_turns may be changed."""
        config = self._config
        if not config.enable:
            return {"enable": False}
        return {
            "enable": True,
            "stages": list(self._stages),
            "thresholds": list(config.thresholds),
            "steps": list(config.steps),
            "window": config.window,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, so that it can be written as JSON."""
        return {
            "stage": self._stage,
            "below": self._below,
            "lost": list(self._lost),
            "history": list(self._history),
            "plan": self._plan(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: ValueError where the state is of another curriculum, or isn't one."""
        expected = {"stage", "below", "lost", "history", "plan"}
        if set(state) != expected:
            raise ValueError(
                f"a curriculum state holds {sorted(expected)}, this one {sorted(state)}; "
                "resume from a checkpoint of this version, or set trainer.resume_mode=disable"
            )
        for name, value in self._plan().items():
            saved = state["plan"].get(name)
            if saved != value:
                raise ValueError(
                    f"curriculum {name}={value} but the checkpoint was written under {name}={saved}; "
                    "give it the same value, or start afresh with trainer.resume_mode=disable"
                )
        self._stage, self._below = int(state["stage"]), int(state["below"])
        self._lost = [int(times) for times in state["lost"]]
        self._history = deque((float(f1) for f1 in state["history"]), maxlen=self._config.window)
