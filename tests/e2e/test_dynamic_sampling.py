"""Everything that changes what a step is made of, at once, in whole runs: refills, mini-batches, weights, two ranks."""

import json

import pytest

OPTIONS = (
    "trainer.deterministic=true",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    "trainer.n_gpus_per_node=2",
    "algorithm.adv_estimator=grpo_turn",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
    "actor_rollout_ref.actor.llds_coef=0.1",
    "data.train_batch_size=2",
    "agent_grpo.n=6",
)
STREAM = ("epoch", "position", "held")


def stream(run, step: int) -> dict:
    state = json.loads((run.folder / f"checkpoints/global_step_{step}/trainer.json").read_text())["stream"]
    return {name: state[name] for name in STREAM}


def learned(row: dict) -> dict:
    """A step's numbers but for those that a clock, the machine or what a process had searched before gave."""
    return {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/", "search/cache"))}


@pytest.mark.timeout(600)
def test_a_refilled_run_resumes_with_the_same_questions_to_the_last_bit(start, tmp_path):
    whole = start(*OPTIONS, "trainer.total_training_steps=2", "trainer.save_freq=1", folder=tmp_path / "whole")
    assert whole.finish() == 0, whole.text
    saved = whole.folder / "checkpoints/global_step_1"
    again = start(*OPTIONS, "trainer.total_training_steps=2", f"trainer.resume_mode={saved}", folder=tmp_path / "again")
    assert again.finish() == 0, again.text
    assert [learned(row) for row in again.metrics] == [learned(row) for row in whole.metrics[1:]]
    assert stream(again, 2) == stream(whole, 2)

    assert any(row["actor/grad_norm"] > 0 for row in whole.metrics), "nothing was trained, so nothing was tested"
    for row in whole.metrics:
        step, name = row["step"], "filter_groups/"
        played, silent = row[name + "groups_played"], row[name + "groups_silent"]
        assert played >= 2 and row[name + "gen_batches"] <= 3
        assert row[name + "groups_surplus"] - row[name + "groups_missing"] == played - silent - 2
        assert row["rollout_corr/token_eff_sample_size"] == pytest.approx(1, abs=1e-3)
        assert row["stability/skipped_steps"] == 0 and row["actor/llds"] >= 0
        rows = json.loads((whole.folder / f"rollout/rollout_step_{step}.json").read_text())
        assert len(rows) == 6 * played
        assert len({(r["uid"], r["sample_index"]) for r in rows}) == len(rows)
        assert all(r.get("filtered", False) != ("advantage" in r) for r in rows)
    asked = sum(row["filter_groups/groups_played"] for row in whole.metrics)
    state = stream(whole, 2)
    assert state["epoch"] == 0 and state["position"] - len(state["held"]) == asked
