"""A user's own reward: ``reward_model.custom=path.py:function``.

    def reward(episode: scrl.types.Episode) -> float | dict[str, float]

is called once for each finished episode and takes the place of the outcome (the answer's F1, or ``format_score``);
shaping, penalties and extras are added to it as their switches say. A dictionary's values are summed, and each is
logged as ``reward/custom/{name}``. The function finds in the episode its ``question``, ``ground_truths``,
``data_source``, ``turns``, ``answer`` (None where there is none) and ``finish``, and must leave them as they are.
"""

import importlib.util
import inspect
import logging
import math
import sys
import traceback
from array import array
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

from scrl.types import Episode, ToolCall, Turn

log = logging.getLogger(__name__)
KEY = "reward_model.custom"
_EXPECTED = "it must be a finite number, or a dictionary of such numbers by name"


class CustomReward:
    """The function that ``spec`` (``path.py:function``) names, loaded and tried on a made-up episode.

    Raises ValueError for a file, a function, parameters or a result that can't work.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._function = load_function(spec)
        self.failures = 0
        self.first_failure = ""
        self._try_out()

    def __call__(self, episode: Episode) -> dict[str, float] | None:
        """Components by name ("" for a lone number); None where the function failed on this episode.

        Whatever the user's code raises costs that one episode, not the run: the first failure is logged with its
        traceback, all are counted.
        """
        try:
            return _components(self._function(episode))
        except Exception as error:  # it is not our code, so it may raise anything
            self.failures += 1
            if self.failures == 1:
                self.first_failure = f"{type(error).__name__}: {error} ({self._place(error)})"
                log.warning(
                    f"{KEY}={self._spec} failed on an episode, which is left out; further failures are only counted",
                    exc_info=error,
                )
            return None

    def _try_out(self) -> None:
        """A wrong result is the same for every episode, so it is refused before the run. An exception need not be:
        the function may count on something that only real episodes have."""
        try:
            result = self._function(example_episode())
        except Exception as error:  # as above
            log.warning(
                f"{KEY}={self._spec} raised {type(error).__name__}: {error} ({self._place(error)}) on a made-up "
                "episode; if it does on real ones, those are left out of the training"
            )
            return
        try:
            _components(result)
        except ValueError as error:
            raise ValueError(f"{KEY}={self._spec}: {error}") from None

    def _place(self, error: Exception) -> str:
        """The user's own line, not one in a library that it called."""
        file = self._spec.rpartition(":")[0]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"{Path(file).name}, line {frames[-1].lineno}" if frames else Path(file).name


def find_file(spec: str) -> tuple[Path, str]:
    """The file and the function's name in ``spec``. Nothing is run. Raises ValueError where there is no such file."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ValueError(f"{KEY}={spec} is not path.py:function; write {KEY}=my_reward.py:reward")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{KEY}={spec}: there is no file {path} here or in the repository; check the path")
    if file.suffix != ".py":
        raise ValueError(f"{KEY}={spec}: {file.name} is not a Python file; name it {file.stem}.py")
    return file, name


def load_function(spec: str) -> Callable[[Episode], Any]:
    """Raises ValueError, one sentence, where ``spec`` doesn't name a function of one episode."""
    file, name = find_file(spec)
    module_spec = importlib.util.spec_from_file_location(f"custom_reward_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look their module up
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # it is not our code, so it may raise anything
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = getattr(error, "lineno", None) or (frames[-1] if frames else "?")
        raise ValueError(
            f"{KEY}={spec}: importing {file.name} raised {type(error).__name__}: {error} (line {line}); mend it first"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'no functions'}"
        raise ValueError(f"{KEY}={spec}: {file.name} has no function {name}; {hint}")
    _check_parameters(spec, function)
    return function


def _check_parameters(spec: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{KEY}={spec} is async; give an ordinary function, which returns a number")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(f"{KEY}={spec} must take one argument, the episode ({error}); change its parameters") from None
    except ValueError:  # a builtin without a signature: calling it will tell
        pass


def _components(result: Any) -> dict[str, float]:
    values = result if isinstance(result, Mapping) else {"": result}
    if not values:
        raise ValueError(f"it returned {result!r}; {_EXPECTED}")
    for name, value in values.items():
        # NumPy's numbers are Real; a tensor or array of one element isn't, and converts.
        number = isinstance(value, Real) or getattr(value, "shape", None) == ()
        if not isinstance(name, str) or not number or not math.isfinite(float(value)):
            raise ValueError(f"it returned {str(result)[:120]}; {_EXPECTED}")
    return {name: float(value) for name, value in values.items()}


def example_episode() -> Episode:
    """A search and a right answer, as the episode loop records them."""
    call = ToolCall("web_search", {"query": ["capital of France"]})
    found = '[{"query": "capital of France", "results": [\n{"title": "France", "text": "Its capital is Paris."}\n]}]'
    turns = [
        Turn("tool_call", tool_call=call, queries=call.arguments["query"], observation=found, span=(0, 1)),
        Turn("answer", answer="Paris", span=(2, 3)),
    ]
    return Episode(
        uid="0-0",
        sample_index=0,
        index=0,
        question="What is the capital of France?",
        ground_truths=["Paris"],
        data_source="example",
        prompt_ids=[0],
        response_ids=array("i", [0, 0, 0]),
        response_mask=array("b", [1, 0, 1]),
        rollout_logprobs=array("d", [0.0, 0.0, 0.0]),
        turns=turns,
        finish="answer",
    )
