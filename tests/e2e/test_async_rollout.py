"""One step ahead: the next batch is generated while this one trains; a killed run comes back to the same questions."""

import json

import pytest

AHEAD = (
    "trainer.async_rollout=1",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.total_training_steps=5",
    "trainer.save_freq=2",
)


def questions(run) -> list[list[int]]:
    """Of each step, which questions it was trained on."""
    files = [run.folder / f"rollout/rollout_step_{row['step']}.json" for row in run.metrics]
    return [[episode["idx"] for episode in json.loads(file.read_text(encoding="utf-8"))] for file in files]


@pytest.mark.timeout(900)
def test_one_step_ahead_is_told_corrected_and_resumes_with_the_same_questions(start, tmp_path):
    whole = start(*AHEAD, folder=tmp_path / "whole")
    assert whole.finish() == 0, whole.text
    steps = whole.metrics
    assert [row["rollout/staleness"] for row in steps] == [0, 1, 1, 1, 1]
    # The engine's probabilities are those of the weights before: the gap is real, and the correction is at work, after
    # each step that moved them (one whose groups are all alike doesn't).
    gaps = [row["training/rollout_probs_diff_max"] for row in steps]
    after = [gap for row, gap in zip(steps, gaps[1:], strict=False) if row["actor/grad_norm"] > 0.01]
    assert gaps[0] < 5e-4 and after and min(after) > max(1e-4, 2 * gaps[0]), gaps  # the largest of float32's
    assert max(row["episodes/finish/error"] for row in steps) == 0

    first = start(*AHEAD, folder=tmp_path / "parts")
    first.wait_for(lambda: len(first.metrics) >= 3)
    first.kill()
    second = start(*AHEAD, folder=tmp_path / "parts")
    assert second.finish() == 0, second.text
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4, 5]
    resumed = int(second.text.split("going on from global_step_")[1].split()[0])
    assert second.metrics[resumed]["rollout/staleness"] == 0, "the batch that was lost is generated anew"
    assert questions(second) == questions(whole)
