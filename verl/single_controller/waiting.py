"""Waiting on remote calls: always with a deadline, and the first failure at once."""

import re
import time
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

Key = TypeVar("Key", bound=Hashable)


class WorkerDied(RuntimeError):
    """A worker's process is gone: killed (out of memory, ``kill -9``), crashed, or its node was lost."""


def wait_all(refs: Mapping[Key, ray.ObjectRef], what: str, timeout_s: float) -> dict[Key, Any]:
    """Results of remote calls; ``refs`` maps who was called (``"rank 0"``) to its ObjectRef.

    Raises, as soon as any of them fails (others may wait for the failed one in a collective, and never return):
    the remote exception with its own type and message (who, what and the remote traceback are its notes),
    ``WorkerDied``, or ``TimeoutError`` when not all have answered after ``timeout_s``.
    """
    by_ref = {ref: who for who, ref in refs.items()}
    results: dict[Key, Any] = {}
    deadline = time.monotonic() + timeout_s
    pending = list(by_ref)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(by_ref[ref]) for ref in pending)
            raise TimeoutError(
                f"{what}: no answer from {late} within {timeout_s:g} s; it hangs, or needs a longer deadline"
            )
        for ref in ready:
            results[by_ref[ref]] = _result(ref, f"{what} on {by_ref[ref]}", max(1.0, deadline - time.monotonic()))
    return {who: results[who] for who in refs}


def _result(ref: ray.ObjectRef, where: str, timeout_s: float) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise _original(error, where) from None
    except RayActorError as error:
        raise WorkerDied(
            f"{where}: the worker's process died ({_first_line(error)}); its last words are in {_logs()}"
        ) from None
    except GetTimeoutError:
        raise TimeoutError(f"{where}: the answer is ready but didn't arrive within {timeout_s:g} s") from None
    except RayError as error:
        raise RuntimeError(f"{where}: {_first_line(error)}") from None


def _original(error: RayTaskError, where: str) -> BaseException:
    cause = error.cause
    # A cause that can't be pickled is lost on the way; Ray then gives another of its own errors.
    if not isinstance(cause, BaseException) or isinstance(cause, RayError):
        cause = RuntimeError(f"{where}: {_first_line(error)}")
    there = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours it
    cause.add_note(f"raised by {where}; there:\n{there}")
    return cause.with_traceback(None)


def _logs() -> str:
    node = ray._private.worker.global_worker.node
    return f"{node.get_logs_dir_path()}/worker-*.err of its machine" if node is not None else "Ray's log folder"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "reason" in line.lower()]
    return (told or lines or [type(error).__name__])[0].removesuffix(".")
