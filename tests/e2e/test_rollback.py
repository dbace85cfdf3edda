"""What ``monitor.on_alert=rollback`` does to a run whose alert never goes away."""

import json

import pytest
from safetensors.torch import load_file

ALWAYS = (
    "trainer.deterministic=true",
    "monitor.min_depth=99",
    "monitor.on_alert=rollback",
    "monitor.max_rollbacks=2",
    "trainer.save_freq=0",
)


def adapter(folder, step):
    return load_file(folder / f"checkpoints/global_step_{step}/adapter/adapter_model.safetensors")


@pytest.mark.timeout(600)
def test_it_goes_back_to_healthy_weights_on_with_other_questions_and_then_halts(start):
    run = start(*ALWAYS, "trainer.total_training_steps=9")
    assert run.finish() == 0, run.text
    assert "rolled back to global_step_0 (1 of at most 2)" in run.text
    assert "halted after 2 rollbacks (monitor.max_rollbacks): step 3: search_depth is" in run.text
    assert "the last healthy checkpoint is" in run.text and "Traceback" not in run.text

    alerts = [json.loads(line) for line in (run.folder / "behavior_alerts.jsonl").read_text().splitlines()]
    assert [alert["step"] for alert in alerts] == [1, 2, 3]
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert [row["alerts/rollbacks"] for row in run.metrics] == [0, 1, 2]
    assert all(row["alerts/search_depth"] == 1 for row in run.metrics)
    assert any(row["actor/grad_norm"] > 0 for row in run.metrics[:2])  # so the weights had moved when it went back

    moments = load_file(run.folder / "checkpoints/global_step_2/optimizer.safetensors")
    assert not moments, "those of the step that was rejected go with it"
    start_of_run, after_second = adapter(run.folder, 0), adapter(run.folder, 2)
    assert all((start_of_run[name] == after_second[name]).all() for name in start_of_run)
    assert not (run.folder / "checkpoints/global_step_3").exists(), "what raised the alert is not saved"
    rollouts = [json.loads((run.folder / f"rollout/rollout_step_{n}.json").read_text()) for n in (1, 2, 3)]
    asked = [{row["question"] for row in rows} for rows in rollouts]
    assert not asked[0] & asked[1] and not asked[1] & asked[2], "it met the same questions again"

    again = start(*ALWAYS, "trainer.total_training_steps=9", folder=run.folder)
    assert again.finish() == 0, again.text
    assert "halted after 2 rollbacks" in again.text, "the rollbacks of the run before count"
    alerts = [json.loads(line) for line in (run.folder / "behavior_alerts.jsonl").read_text().splitlines()]
    assert [alert["step"] for alert in alerts] == [1, 2, 3], "step 3 was run again, its alert is there once"
