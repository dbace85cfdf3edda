"""A killed run goes on as if nothing had happened, to the last bit."""

import json

import pytest

STEPS = ("trainer.deterministic=true", "trainer.total_training_steps=6", "trainer.save_freq=3")


PERF = ("time", "throughput", "gen_tokens", "overhead", "engine_busy", "max_mem")


def learned(run) -> list[dict]:
    """What a step says about data, episodes and weights: everything but the clock."""
    # A resumed run's search cache is cold: the same results, fewer hits.
    timed = ("timing_s/", "search/cache_", *(f"perf/{name}" for name in PERF))
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in run.metrics]


def timeless(value):
    """A rollout row, or what is in it, without clocks."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in ("latency_s", "generate_s")}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_uninterrupted_to_the_last_bit(start, tmp_path):
    whole = start(*STEPS, folder=tmp_path / "whole")
    assert whole.finish() == 0, whole.text

    first = start(*STEPS, folder=tmp_path / "parts")
    first.wait_for(lambda: (tmp_path / "parts/checkpoints/global_step_3/trainer.json").exists())
    first.wait_for(lambda: len(first.metrics) >= 3)
    first.kill()
    assert not first.wait_gone()
    second = start(*STEPS, folder=tmp_path / "parts")
    assert second.finish() == 0, second.text

    expected, resumed = learned(whole), learned(second)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert resumed == expected
    assert max(row["actor/grad_norm"] for row in expected) > 0, "nothing was trained, so nothing was tested"
    assert len({row["actor/grad_norm"] for row in expected}) == 6
    assert "global_step_3" in second.text, "the resumed run says where it goes on from"
    whole_rows, resumed_rows = (
        json.loads((tmp_path / name / "rollout/rollout_step_6.json").read_text()) for name in ("whole", "parts")
    )
    assert len(whole_rows) == 8
    assert timeless(whole_rows) == timeless(resumed_rows)
