"""Two real rollout workers on a local Ray, playing the demo: who plays what, and what happens when one is killed."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
import ray
from safetensors.torch import load_file

from scrl.llm_agent import prompts
from scrl.types import EpisodeRequest
from verl.single_controller import ResourcePool, WorkerDied, connect
from verl.trainer.config.schema import (
    ActorRolloutRefConfig,
    Config,
    DataConfig,
    ModelConfig,
    RayConfig,
    RolloutConfig,
    SearchConfig,
)
from verl.trainer.ppo import rollout_pool
from verl.trainer.ppo.rollout_pool import RolloutPool
from verl.utils.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(900)
DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"
CONFIG = Config(
    data=DataConfig(max_response_length=1000),
    actor_rollout_ref=ActorRolloutRefConfig(
        model=ModelConfig(path=str(DEMO / "policy")),
        # Two sequences at once, so four episodes a worker: most groups of a batch have to wait for their turn.
        rollout=RolloutConfig(name="hf", num_workers=2, max_model_len=1500, max_turn_tokens=60, max_batch_size=2),
    ),
    search=SearchConfig(index_corpus=str(DEMO / "corpus.jsonl"), topk=2, max_obs_length=200),
)
GROUPS, SIZE = 10, 2


@pytest.fixture(scope="module")
def pool():
    with connect(RayConfig(num_cpus=3)):
        places = ResourcePool(2, cpu_per_process=0.1)
        env = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        pool = RolloutPool(CONFIG, lambda index: places.beside(index, 0.4) | env)
        pool.wait_ready()
        yield pool


@pytest.fixture(scope="module")
def requests() -> list[EpisodeRequest]:
    """A group's episodes lie apart: the order of the answers is that of the requests, not of the groups."""
    prompt = prompts.encode_prompt(load_tokenizer(str(DEMO / "policy")), "Where was the director of X born?")
    return [
        EpisodeRequest(f"g{group}", sample, group, "q", ["a"], "demo", prompt, max_turns=2, seed=5)
        for sample in range(SIZE)
        for group in range(GROUPS)
    ]


def workers() -> list[int]:
    """Process ids of this test's rollout workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("RolloutWorker" in part for part in process.cmdline()[:1]):
                found.append(process.pid)
    return sorted(found)


def play(pool, requests, tick=lambda done: None):
    return pool.generate(requests, timeout_s=600, tick=tick)


def names(episodes) -> list[tuple[str, int]]:
    return [(episode.uid, episode.sample_index) for episode in episodes]


def test_every_request_is_answered_in_order_and_progress_is_told(pool, requests):
    told: list[int] = []
    episodes = play(pool, requests, told.append)
    assert names(episodes) == [(r.uid, r.sample_index) for r in requests]
    assert {episode.finish for episode in episodes} <= {"answer", "malformed", "max_turns", "length"}
    assert told == sorted(told) and told[-1] == len(requests)
    assert len(set(told)) > 3, "groups should come back as they are done"
    assert [member.episodes for member in pool._members] == [0, 0]
    assert all(member.counters == {} for member in pool._members)
    share = pool.step_metrics(1.0)
    assert share["rollout/workers_replaced"] == 0
    generated = [member.counters["rollout/completions"] for member in pool._members]
    assert min(generated) > 4, f"both workers should have had their groups: {generated}"


def test_a_worker_killed_while_it_plays_is_replaced_and_its_episodes_are_played_again(pool, requests):
    weights = {"weights": load_file(DEMO / "policy" / "model.safetensors"), "peft_config": None}
    pool.update_weights(lambda: ray.put(weights), 7)
    before, killed = workers(), []

    def kill_one(done: int) -> None:
        if not killed:
            killed.append(before[0])
            os.kill(before[0], signal.SIGKILL)

    episodes = play(pool, requests, kill_one)
    assert killed and names(episodes) == [(r.uid, r.sample_index) for r in requests]
    assert {episode.version for episode in episodes} == {7}, "the new worker plays with the current weights"
    assert "error" not in {episode.finish for episode in episodes}
    assert pool.step_metrics(1.0)["rollout/workers_replaced"] == 1
    assert pool.step_metrics(1.0)["rollout/workers_replaced"] == 0
    pool.wait_ready()
    after = workers()
    assert len(after) == 2 and killed[0] not in after


def test_a_worker_killed_between_batches_is_replaced_by_one_with_the_new_weights(pool, requests):
    weights = {"weights": load_file(DEMO / "policy" / "model.safetensors"), "peft_config": None}
    os.kill(workers()[1], signal.SIGKILL)
    pool.update_weights(lambda: ray.put(weights), 8)
    assert {episode.version for episode in play(pool, requests[:4])} == {8}
    assert pool.step_metrics(1.0)["rollout/workers_replaced"] == 1
    assert len(workers()) == 2


def test_workers_that_go_on_dying_end_it(pool, requests, monkeypatch):
    monkeypatch.setattr(rollout_pool, "_MAX_REPLACED", 0)

    def kill_one(done: int) -> None:
        os.kill(workers()[0], signal.SIGKILL)

    with pytest.raises(WorkerDied, match="1 rollout workers died within one batch; the last one: .*worker [01]"):
        play(pool, requests, kill_one)
