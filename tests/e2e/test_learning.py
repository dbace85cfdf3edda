"""The demo in short: a policy that answers from the hip learns to search, and its answers get better for it."""

from statistics import fmean

import pytest

from verl.workers.rollout import vllm_problem

DEMO = ("profile=cpu_demo", "trainer.val_before_train=false", "trainer.test_freq=0", "data.val_max_samples=60")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine",
    [
        "hf",
        pytest.param("vllm", marks=pytest.mark.skipif(vllm_problem() is not None, reason="vllm is not installed")),
    ],
)
def test_reward_and_search_depth_rise(start, engine):
    run = start(
        "trainer.total_training_steps=10",
        "trainer.save_freq=0",
        "trainer.seed=3",
        f"actor_rollout_ref.rollout.name={engine}",
        base=DEMO,
    )
    assert run.finish(800) == 0, run.text
    steps = run.metrics
    assert [row["step"] for row in steps] == list(range(1, 11))

    def mean(name: str, rows: list[dict]) -> float:
        return fmean(row[name] for row in rows)

    first, last = steps[:1], steps[-3:]
    assert mean("behavior/search_depth", first) < 0.5, "the cold policy should have the habit"
    assert mean("behavior/search_depth", last) > 1.2
    assert mean("critic/score/mean", last) > mean("critic/score/mean", first) + 0.4
    assert mean("reward/f1", last) > mean("reward/f1", first) + 0.2
    assert steps[-1]["val/search_depth/mean"] > 1.2

    # What must hold at every step of a healthy run.
    # Float32's rounding: 5e-7 on average, up to 1.4e-4 at the most sensitive of some 200,000 tokens.
    assert max(row["training/rollout_probs_diff_mean"] for row in steps) < 2e-6
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 5e-4
    assert max(row["stability/skipped_steps"] for row in steps) == 0
    assert max(row["episodes/finish/error"] for row in steps) == 0
    assert fmean(row["perf/overhead_share"] for row in steps) < 0.15
