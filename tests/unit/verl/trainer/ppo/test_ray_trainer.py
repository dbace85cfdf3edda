"""Parts of the trainer that need no workers: what has no reward, noise, and where to go back to."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from scrl.types import Episode, Turn
from verl.trainer.config import load_config
from verl.trainer.ppo.batch import assemble
from verl.trainer.ppo.dynamic_sampling import Sample
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.checkpoint import save_json

REWARD = """
def reward(episode):
    if episode.answer == "Rome":
        raise ConnectionError("the judge is down")
    return 0.5
"""


@pytest.fixture
def trainer(tmp_path):
    def make(*overrides):
        return RayPPOTrainer(load_config(["profile=cpu_demo", f"trainer.default_local_dir={tmp_path}", *overrides]))

    return make


def answered(text, sample=0):
    turn = Turn("answer", answer=text, span=(0, 2))
    return Episode("1-0", sample, 0, "?", ["Paris"], "nq", [1], [5, 6], [1, 1], [0.0, 0.0], [turn], "answer")


def test_an_episode_that_the_users_reward_failed_on_teaches_nothing(trainer, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    made = trainer(f"reward_model.custom={tmp_path / 'mine.py'}:reward", "algorithm.adv_estimator=rloo")
    episodes = [answered(text, i) for i, text in enumerate(("Paris", "Rome", "Oslo"))]
    batch = assemble(episodes, 0)
    info = made.reward(batch, episodes)
    assert info["custom_failed"].tolist() == [False, True, False]
    assert batch.batch["response_mask"].tolist() == [[1, 1], [0, 0], [1, 1]]
    batch.batch["token_level_scores"][0, 1] = 1.0
    made.advantage(batch)
    # Each against the one other that has a reward, not against two.
    assert batch.batch["advantages"].tolist() == [[1, 1], [0, 0], [-1, -1]]

    with pytest.raises(ValueError, match=r"mine.py:reward failed on every episode.*ConnectionError: the judge is down"):
        made.reward(assemble(episodes[1:2], 0), episodes[1:2])


def test_a_greedy_episode_that_failed_gives_its_group_the_mean_as_baseline(trainer, caplog):
    """Not 0, which would make every episode of the group better than expected."""
    made = trainer("algorithm.adv_estimator=remax", "reward_model.use_pbrs=false", "reward_model.format_score=0")
    episodes = [answered(text, i) for i, text in enumerate(("Paris", "Rome", "Oslo", "Paris"))]
    episodes += [replace(answered(text, i), uid="1-1", index=1) for i, text in enumerate(("Paris", "Rome"))]
    batch = assemble(episodes, 0)
    sample = Sample([made.train_set[0], made.train_set[1]], episodes, batch, made.reward(batch, episodes))
    made._play = lambda requests: [
        replace(answered(""), turns=[], finish="error", error="the engine died"),
        replace(answered("Paris"), uid="1-1", index=1),
    ]
    returns = sample.info["return"].tolist()
    assert returns[0] == returns[3] > returns[1] == returns[2]
    baselines = made._greedy_returns(sample, 1).tolist()
    assert baselines == pytest.approx([sum(returns[:4]) / 4] * 4 + [returns[0]] * 2)
    assert "the greedy episode of 1-0 failed (the engine died)" in caplog.text


def test_what_was_generated_ahead_is_dropped_and_its_questions_come_again(trainer):
    made = trainer("trainer.async_rollout=1", "algorithm.rollout_correction.rollout_is=token")
    made.stream.next_batch(8)
    made._stream_state = made.stream.state_dict()
    ahead = [question.question for question in made.stream.next_batch(8)]
    made._drop_ahead()
    after = made.stream.state_dict()
    assert after != made._stream_state, "nothing is under way, so nothing is taken back"
    made._ahead = Future()
    made._drop_ahead()
    assert made._ahead is None and [question.question for question in made.stream.next_batch(8)] == ahead


def test_noise_is_of_the_training_questions_the_same_for_a_step_and_grows(trainer):
    made = trainer("curriculum.search_noise.start=0.1", "curriculum.search_noise.end=0.5")
    first, again, last = made._search_noise(1), made._search_noise(1), made._search_noise(made.total_steps)
    assert first == again and first.queries != last.queries
    assert 0.1 < first.probability < last.probability == 0.5
    known = {made.train_set[i].question for i in range(len(made.train_set))}
    assert len(set(first.queries)) == 16 and set(first.queries) <= known


def test_without_noise_nothing_is_drawn(trainer):
    assert trainer()._search_noise(3) is None


def test_it_goes_back_to_the_newest_checkpoint_without_an_alert(trainer):
    made = trainer()
    made.step = 40
    assert made._healthy_checkpoint() is None
    for step, state in {10: {}, 20: {"healthy": True}, 30: {"healthy": False}, 50: {"healthy": True}}.items():
        folder = made.checkpoints.directory / f"global_step_{step}"
        folder.mkdir(parents=True)
        save_json(folder / "trainer.json", {"step": step, **state})
    assert made._healthy_checkpoint().name == "global_step_20"  # 50 is another run's, from before it went back
    made.step = 15
    assert made._healthy_checkpoint().name == "global_step_10"  # written by a version without the flag
