"""Checkpoints on disk: written beside and renamed, so that a crash at any moment leaves the last whole one.

A run's folder of checkpoints holds ``global_step_{n}/`` and ``latest_checkpointed_iteration.txt``. Nothing here is
pickled: driver state is JSON, tensors are the worker's own safetensors files.
"""

import base64
import errno
import fcntl
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

LATEST = "latest_checkpointed_iteration.txt"
STEP_DIR = re.compile(r"global_step_(\d+)")
log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message is one sentence for people."""


class CheckpointManager:
    """The ``global_step_{n}`` folders under ``directory``. Leftovers of a crash are removed at the start, except where
    another process may be writing (``clean=False``).

    ``max_to_keep`` folders stay (None: all); one that was just written always does.
    """

    def __init__(self, directory: str | Path, max_to_keep: int | None = None, clean: bool = True) -> None:
        self.directory = Path(directory)
        self._max_to_keep = max_to_keep
        if clean:
            self._clean()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call ``write`` with an empty folder, make it durable, and put it in place as ``global_step_{step}``.

        Raises CheckpointError when the disk is full; another exception of ``write`` passes through. In either case
        nothing of this step stays, and the checkpoint before is intact and still the latest.
        """
        temporary, final = self.directory / f".global_step_{step}.tmp", self.directory / f"global_step_{step}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            _sync_tree(temporary)
            self._put_in_place(temporary, final)
            write_text(self.directory / LATEST, f"{step}\n")
        except BaseException as error:
            # Asked before the half-written folder goes: torch.save hides the errno ("unexpected pos 576 vs 534").
            full = isinstance(error, Exception) and (is_disk_full(error) or _free_bytes(self.directory) < 1 << 20)
            shutil.rmtree(temporary, ignore_errors=True)
            if full:
                latest = self._latest_step()
                kept = f"the one of step {latest} is intact" if latest is not None else "there is no earlier one"
                raise CheckpointError(
                    f"the disk is full, so the checkpoint of step {step} under {self.directory} was not written; "
                    f"{kept}; free some space (trainer.max_ckpt_to_keep keeps fewer) and start again to resume"
                ) from error
            raise
        self._prune(step)
        return final

    def find(self, resume_mode: str = "auto") -> Path | None:
        """The checkpoint to resume from: ``auto`` the latest, ``disable`` none, else a ``global_step_N`` folder's path.

        Raises ValueError for a path that is no checkpoint.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            step = self._latest_step()
            return None if step is None else self.directory / f"global_step_{step}"
        path = Path(resume_mode).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"trainer.resume_mode={resume_mode}: there is no such folder; give auto, disable, or a global_step_N "
                f"folder such as {self.directory / 'global_step_20'}"
            )
        if not STEP_DIR.fullmatch(path.resolve().name):
            held = sorted(p.name for p in path.glob("**/global_step_*") if p.is_dir())
            hint = f"it holds {', '.join(held)}; give one of them" if held else "give a global_step_N folder"
            raise ValueError(f"trainer.resume_mode={resume_mode} is not a checkpoint; {hint}")
        return path

    def newest_first(self, up_to: int) -> list[Path]:
        """The checkpoints of steps up to ``up_to``."""
        return [self.directory / f"global_step_{step}" for step in reversed(self._steps()) if step <= up_to]

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        found = (STEP_DIR.fullmatch(entry.name) for entry in self.directory.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def _latest_step(self) -> int | None:
        """The step in the text file; where that names no whole checkpoint, the newest folder."""
        steps = self._steps()
        try:
            named = int((self.directory / LATEST).read_text())
        except (OSError, ValueError):
            named = -1
        return named if named in steps else (steps[-1] if steps else None)

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        aside = self.directory / f".{final.name}.old"
        if final.exists():  # this step again, after resuming from an earlier one
            final.rename(aside)
        temporary.rename(final)
        _sync(self.directory)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Remove the oldest. Later steps than the one just saved (the run went back) are somebody's to remove."""
        if self._max_to_keep is None:
            return
        past = [s for s in self._steps() if s < step]
        for old in past[: max(0, len(past) - (self._max_to_keep - 1))]:
            try:
                shutil.rmtree(self.directory / f"global_step_{old}")
            except OSError as error:
                log.warning(f"the old checkpoint of step {old} could not be removed: {error}")

    def _clean(self) -> None:
        for aside in self.directory.glob(".global_step_*.old"):
            final = self.directory / aside.name.removeprefix(".").removesuffix(".old")
            if not final.exists():  # killed between the two renames: the old one is still the whole one
                aside.rename(final)
            else:
                shutil.rmtree(aside, ignore_errors=True)
        for left in self.directory.glob(".global_step_*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk (or quota) is behind an exception, also one that came back from a Ray worker or from Rust."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return False


def write_text(path: Path, text: str) -> None:
    """Replace a file's text atomically and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def lock_folder(folder: Path) -> IO[bytes]:
    """Hold ``folder`` for this process, as long as the file that is returned stays open; made if it isn't there.

    Raises ValueError while another process holds it: two runs would overwrite one another's checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"another run is writing to {folder}; wait for it, or give this one its own trainer.experiment_name"
        ) from None
    return file


def save_json(path: Path, state: dict[str, Any]) -> None:
    """Driver state. Floats come back to the last bit; NumPy and torch scalars become plain numbers, tuples lists."""
    write_text(path, json.dumps(state, default=_plain, ensure_ascii=False, indent=1))


def save_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A list of objects, a line each. Values as ``save_json`` takes them; without indents, ten times as fast."""
    lines = ",\n".join(json.dumps(row, default=_plain, ensure_ascii=False) for row in rows)
    write_text(path, f"[\n{lines}\n]\n" if rows else "[]\n")


def load_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, so it is no whole checkpoint; resume another"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read ({error}); resume from another checkpoint") from error


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's (CPU) generators in this process, JSON-able."""
    import numpy as np
    import torch

    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what ``rng_state`` took."""
    import numpy as np
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy and torch scalars and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a checkpoint's driver state; only plain values are stored")


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))
