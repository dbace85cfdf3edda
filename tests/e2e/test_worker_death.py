"""``kill -9`` in the middle of a run: of a rollout worker, which is replaced, and of the actor, which ends the run."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

ENDLESS = ("trainer.total_training_steps=500", "trainer.save_freq=1", "actor_rollout_ref.rollout.num_workers=2")


def process_of(run, name: str) -> int:
    """A process of the run that Ray has named after its actor class."""
    for pid in run.alive():
        with contextlib.suppress(OSError):
            if f"ray::{name}" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise AssertionError(f"the run has no {name}")


@pytest.mark.timeout(1800)
def test_a_killed_rollout_worker_is_replaced_and_a_killed_actor_ends_the_run_which_resumes(start):
    run = start(*ENDLESS)
    run.wait_for(lambda: len(run.metrics) >= 1, 600)
    os.kill(process_of(run, "RolloutWorker"), signal.SIGKILL)
    run.wait_for(lambda: sum(row["rollout/workers_replaced"] for row in run.metrics) == 1, 600)
    seen = len(run.metrics)
    run.wait_for(lambda: len(run.metrics) >= seen + 1, 600)
    assert max(row["episodes/finish/error"] for row in run.metrics) == 0

    os.kill(process_of(run, "ActorRefWorker"), signal.SIGKILL)
    killed = time.monotonic()
    assert run.finish(120) == 1, run.text
    assert time.monotonic() - killed < 60
    assert not run.wait_gone(), "processes are left behind"
    assert "Traceback" not in run.text
    said = [line for line in run.text.splitlines() if "ActorRefWorker" in line]
    assert len(said) == 1 and said[0].startswith("main_ppo: ActorRefWorker."), run.text
    assert "the worker's process died" in said[0]

    done = len(run.metrics)
    again = start(f"trainer.total_training_steps={done + 1}", *ENDLESS[1:], folder=run.folder)
    assert again.finish() == 0, again.text
    assert [row["step"] for row in again.metrics] == list(range(1, done + 2))
