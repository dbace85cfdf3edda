"""How a call on a worker group becomes one call on each rank, and how the answers become one answer. Without Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from verl.protocol import DataProto

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """ONE_TO_ALL: every rank gets the same arguments; the answer is the list of all answers, by rank.

    DP_COMPUTE_PROTO: each DataProto among the arguments is cut into one part a rank, in order (other arguments go to
    every rank as they are); the answers' rows are joined in the same order. Rows that were added to make the parts
    equal carry ``response_mask`` 0 and are taken off the answer.

    RANK_ZERO: every rank gets the same arguments (gathering needs them all); the answer is rank 0's, and the other
    ranks' answers don't leave their processes.
    """

    ONE_TO_ALL = "one_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    RANK_ZERO = "rank_zero"


@dataclass
class Calls:
    """``per_rank[i]``: the (args, kwargs) of rank i. ``pad_size``: rows added to make the ranks' parts equal."""

    per_rank: list[tuple[tuple, dict[str, Any]]]
    pad_size: int = 0


def register(mode: Dispatch) -> Callable[[Method], Method]:
    """Mark a method of a Worker as callable on its group, in this mode."""
    if not isinstance(mode, Dispatch):
        raise ValueError(f"register({mode!r}): use one of {[str(known) for known in Dispatch]}")

    def mark(method: Method) -> Method:
        method.dispatch_mode = mode  # type: ignore[attr-defined]
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Dispatch]:
    """The methods of a worker class that its group can call. An override inherits the mode it doesn't name."""
    modes: dict[str, Dispatch] = {}
    for cls in reversed(worker_cls.__mro__):
        modes.update({name: m.dispatch_mode for name, m in vars(cls).items() if hasattr(m, "dispatch_mode")})
    return modes


def _same_for_all(world_size: int, args: tuple, kwargs: dict[str, Any]) -> Calls:
    return Calls([(args, kwargs)] * world_size)


def _by_rows(world_size: int, args: tuple, kwargs: dict[str, Any]) -> Calls:
    lengths = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(f"a method dispatched by rows needs DataProto arguments of one length, got lengths {lengths}")
    pad_size = -lengths[0] % world_size

    def parts(value: Any) -> list[Any]:
        if isinstance(value, DataProto):
            return value.pad_to_divisor(world_size)[0].chunk(world_size)
        return [value] * world_size

    args_by_rank = zip(*map(parts, args), strict=True) if args else [()] * world_size
    split_kwargs = {name: parts(value) for name, value in kwargs.items()}
    per_rank = [
        (tuple(rank_args), {name: values[rank] for name, values in split_kwargs.items()})
        for rank, rank_args in enumerate(args_by_rank)
    ]
    return Calls(per_rank, pad_size)


def _all_answers(answers: list[Any], calls: Calls) -> list[Any]:
    return answers


def _first_answer(answers: list[Any], calls: Calls) -> Any:
    return answers[0]


def _joined_rows(answers: list[Any], calls: Calls) -> DataProto:
    if not all(isinstance(answer, DataProto) for answer in answers):
        kinds = [type(answer).__name__ for answer in answers]
        raise TypeError(f"a method dispatched by rows must return a DataProto on every rank, got {kinds}")
    joined = DataProto.concat(answers)
    # Without rows it is only meta_info (metrics of an update): nothing to take off.
    return joined.unpad(calls.pad_size) if len(joined) else joined


# mode -> (calls from arguments, answer from answers)
DISPATCH: dict[Dispatch, tuple[Callable[[int, tuple, dict], Calls], Callable[[list[Any], Calls], Any]]] = {
    Dispatch.ONE_TO_ALL: (_same_for_all, _all_answers),
    Dispatch.DP_COMPUTE_PROTO: (_by_rows, _joined_rows),
    Dispatch.RANK_ZERO: (_same_for_all, _first_answer),
}
