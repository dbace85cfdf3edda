"""How a run ends when it can't go on: one clear sentence, nothing lost, nothing left behind."""

import os
import subprocess

import pytest

LONG = ("trainer.total_training_steps=500", "trainer.save_freq=0")


@pytest.mark.timeout(600)
def test_ctrl_c_leaves_a_checkpoint_that_resumes_and_no_process(start, tmp_path):
    run = start(*LONG)
    run.wait_for(lambda: len(run.metrics) >= 2)
    run.interrupt()
    assert run.finish(90) == 130
    assert not run.wait_gone(), "processes are left behind"
    assert "Traceback" not in run.text
    done = len(run.metrics)
    saved = (run.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip()
    assert saved == str(done)
    assert f"step {done} is saved" in run.text

    again = start(f"trainer.total_training_steps={done + 1}", folder=run.folder)
    assert again.finish() == 0, again.text
    assert [row["step"] for row in again.metrics] == list(range(1, done + 2))


@pytest.mark.timeout(600)
def test_a_full_disk_at_checkpoint_time_is_one_sentence_and_keeps_the_last_checkpoint(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=12m"  # one checkpoint of the demo (adapter and moments, 4 MB) and the rollouts fit, a third doesn't
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        run = start(*LONG[:1], "trainer.save_freq=1", "trainer.max_ckpt_to_keep=null", folder=disk / "run")
        assert run.finish() == 1, run.text
        assert "the disk is full" in run.text and "is intact" in run.text
        assert "Traceback" not in run.text
        latest = int((disk / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
        kept = disk / f"run/checkpoints/global_step_{latest}"
        assert {path.name for path in kept.iterdir()} == {
            "actor.json",
            "adapter",
            "optimizer.safetensors",
            "trainer.json",
        }
        assert not run.wait_gone()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


MISTAKES = {
    "a wrong model path": (["actor_rollout_ref.model.path=/nowhere/policy"], "/nowhere/policy"),
    "a wrong data path": (["data.train_files=[nowhere.parquet]"], "nowhere.parquet"),
    "an unknown key": (["trainer.total_trainig_steps=3"], "trainer.total_training_steps"),
    "a group of one": (["agent_grpo.n=1"], "agent_grpo.n"),
    "a prompt too long": (["data.max_prompt_length=100"], "max_prompt_length"),
    "an unknown engine": (["search_engine=googel"], "googel"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(start, mistake):
    overrides, named = MISTAKES[mistake]
    run = start(*overrides)
    assert run.finish() == 2, run.text
    lines = [line for line in run.text.splitlines() if line.strip()]
    assert named in lines[-1]
    assert "Traceback" not in run.text
    assert not run.wait_gone()
