"""Whole runs as a person starts them: a process of its own, on the demo's data and policy."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (  # 8 episodes a step, seconds a step
    "profile=cpu_demo",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "agent_grpo.n=4",
    "data.val_max_samples=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
)


@dataclass
class Run:
    """A training in its own process group. Every process of it, Ray's too, carries ``mark`` in its environment."""

    folder: Path
    process: subprocess.Popen
    mark: str
    output: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        with contextlib.suppress(ValueError):
            return [json.loads(line) for line in lines]
        return [json.loads(line) for line in lines[:-1]]

    def finish(self, timeout_s: float = 280) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {timeout_s} s:\n{self.text[-3000:]}")

    def wait_for(self, what: Callable[[], bool], timeout_s: float = 280) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"the run ended or took too long (exit {self.process.poll()}):\n{self.text[-3000:]}")
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C reaches the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def alive(self) -> list[int]:
        """Processes of this run that still live."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if self.mark.encode() in (entry / "environ").read_bytes():
                    if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(entry.name))
        return found

    def wait_gone(self, timeout_s: float = 30) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Run]]:
    """``start(*overrides, folder=..., environment=...)``: a run in the background, from a foreign working directory."""
    runs: list[Run] = []

    def begin(
        *overrides: str,
        folder: Path | None = None,
        base: tuple[str, ...] = SMALL,
        environment: dict[str, str] | None = None,
    ) -> Run:
        folder = folder or tmp_path / "run"
        mark = f"MINIRESEARCHER_TEST={uuid.uuid4()}"
        name, _, value = mark.partition("=")
        output = tmp_path / f"output_{len(runs)}.txt"
        inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        own = {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "verl.trainer.main_ppo", *base]
                + [f"trainer.default_local_dir={folder}", *overrides],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=tmp_path,
                env=inherited | own | (environment or {}),
                start_new_session=True,
            )
        runs.append(Run(folder, process, mark, output))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
