"""Parts of the trainer that need no workers: what has no reward, noise, and where to go back to."""

import math
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from scrl.llm_agent.prompts import render_observation
from scrl.types import Episode, ToolCall, Turn
from verl.protocol import DataProto
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


class Rollouts:
    """Workers that play what they are told to, and remember what they were asked."""

    def __init__(self, play):
        self.play, self.asked = play, []

    def generate(self, requests, *, timeout_s, tick):
        self.asked += requests
        return [self.play(request) for request in requests]


class Tracker:
    def __init__(self):
        self.said = []

    def say(self, text, warn=False):
        self.said.append(text)

    def status(self, *_): ...
    def alert(self, *_): ...
    def log_samples(self, *_): ...


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


def of_group(uid, *episodes):
    return [replace(episode, uid=uid, sample_index=i, version=0) for i, episode in enumerate(episodes)]


def searched(text):
    """Two turns, a search and an answer, an observation between them."""
    found = render_observation(["a b"], [[{"title": "", "text": "new"}]])
    call = ToolCall("web_search", {"query": ["a b"]})
    turns = [
        Turn("tool_call", tool_call=call, queries=["a b"], observation=found, span=(0, 2)),
        Turn("answer", answer=text, span=(3, 5)),
    ]
    tokens = {"response_ids": [5, 6, 9, 7, 8], "response_mask": [1, 1, 0, 1, 1], "rollout_logprobs": [0.0] * 5}
    return replace(answered(text), turns=turns, **tokens)


def scored(made, episodes, questions=1):
    batch = assemble(episodes, 0)
    sample = Sample([made.train_set[i] for i in range(questions)], episodes, batch, made.reward(batch, episodes))
    made.advantage(batch)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
    return sample


def test_remax_plays_each_question_once_more_and_greedily(trainer):
    made = trainer("algorithm.adv_estimator=remax")
    made.tracking, made.rollouts = Tracker(), Rollouts(lambda request: replace(answered("Paris"), uid=request.uid))
    batch = assemble(of_group("1-0", answered("Paris"), answered("Rome")), 0)
    sample = Sample([made.train_set[0]], [], batch, {})
    made._greedy_returns(sample, 1)
    (request,) = made.rollouts.asked
    assert (request.temperature, request.top_p, request.top_k) == (0.0, 1.0, 0)
    assert request.max_turns == made.config.max_turns


def test_validation_plays_with_all_turns_whatever_the_curriculum_allows(trainer):
    made = trainer("data.val_max_samples=3", "curriculum.enable=true", "max_turns=4")
    assert made.curriculum.max_turns == 1
    made.tracking, made.rollouts = Tracker(), Rollouts(lambda request: replace(answered("x"), uid=request.uid))
    assert made.validate()["val/answered/mean"] == 1.0
    assert [request.max_turns for request in made.rollouts.asked] == [4] * 3
    assert {request.temperature for request in made.rollouts.asked} == {0.0}


def test_only_weights_of_the_step_before_may_have_played(trainer):
    made = trainer("agent_grpo.n=2")
    for version, fits in ((2, True), (1, False), (3, False)):
        played = replace(answered("x"), turns=[replace(answered("x").turns[0], version=version)])
        made.tracking, made.rollouts = Tracker(), Rollouts(lambda request, played=played: played)
        with nullcontext() if fits else pytest.raises(AssertionError, match="step 3 was generated with the weights of"):
            made.generate([made.train_set[0]], 3)


def test_what_the_policy_does_is_judged_by_the_left_out_groups_too(trainer):
    made = trainer("agent_grpo.n=2", "algorithm.filter_groups.enable=true", "reward_model.use_pbrs=false")
    made.step, made.tracking = 1, Tracker()
    sample = scored(made, of_group("1-0", searched("Paris"), searched("Rome")))
    left_out = scored(made, of_group("1-1", answered("Rome"), answered("Rome")))
    heard = []
    made.curriculum.update = lambda f1, step: heard.append(f1)
    metrics = made.learn(sample, left_out, {})
    assert metrics["behavior/search_depth"] == 0.5 and metrics["reward/f1"] == 0.25 == heard[0]
    assert made.learn(sample, None, {})["behavior/search_depth"] == 1.0


def test_an_episode_that_failed_lowers_no_score_that_the_curriculum_hears(trainer):
    made = trainer("agent_grpo.n=2", "reward_model.use_pbrs=false")
    made.step, made.tracking = 1, Tracker()
    failed = replace(answered(""), turns=[], finish="error", error="the engine died")
    heard = []
    made.curriculum.update = lambda f1, step: heard.append(f1)
    made.learn(scored(made, of_group("1-0", answered("Paris"), failed)), None, {})
    made.learn(scored(made, of_group("1-0", failed, failed)), None, {})
    assert heard[0] == 1.0 and math.isnan(heard[1])


@pytest.mark.parametrize(("estimator", "silent"), [("grpo", True), ("grpo_turn", False)])
def test_silence_is_judged_as_the_estimator_looks(trainer, estimator, silent):
    """Two episodes that earn the same, in different turns."""
    made = trainer("agent_grpo.n=2", f"algorithm.adv_estimator={estimator}")
    sample = scored(made, of_group("1-0", searched("Paris"), searched("Paris")))
    sample.batch.batch["token_level_scores"] = torch.tensor([[0, 0.5, 0, 0, 0.5], [0, 0, 0, 0, 1.0]])
    assert made._silent(sample) == [silent]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_question_is_in_one_mini_batch_and_rows_come_back_in_order(trainer, ranks):
    made = trainer("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "agent_grpo.n=2")
    episodes = [e for q in range(4) for e in of_group(f"1-{q}", answered("Paris"), answered("Rome"))]
    batch = assemble(episodes, 0)
    made.reward(batch, episodes)
    made.advantage(batch)
    batch.batch["input_ids"][:, 0] = torch.arange(8)  # says which row it is
    given = {}

    class Actor:
        world_size = ranks

        def update_actor(self, data):
            given["rows"], given["numbers"] = data.batch["input_ids"][:, 0].tolist(), data.batch["mini_batch"].tolist()
            old = data.batch["input_ids"][:, :1].float().expand(-1, data.batch["response_mask"].shape[1])
            return DataProto.from_dict({"old_log_probs": old}, {}, {"metrics": {}})

    made.actor = Actor()
    made.update(batch)
    assert given["rows"] == [row for rank in range(ranks) for row in range(rank, 8, ranks)]
    assert given["numbers"] == [row // 4 for row in given["rows"]]
    assert batch.batch["old_log_probs"][:, 0].tolist() == list(range(8))


def test_half_updated_weights_are_never_saved(trainer):
    made, saved = trainer(), []
    made.tracking, made.actor, made.step = Tracker(), SimpleNamespace(broken=False), 3
    made.save = lambda: saved.append(made.step)
    made._updating = True
    made._rescue()
    assert not saved
    made._updating = False
    made._rescue()
    assert saved == [3] and made.tracking.said == ["step 3 is saved"]


def test_going_back_takes_the_curriculum_back_and_drops_what_was_played_ahead(trainer):
    by_step = ("curriculum.enable=true", "curriculum.steps=[5,9]", "curriculum.thresholds=[]")
    ahead = ("trainer.async_rollout=1", "algorithm.rollout_correction.rollout_is=token")
    made = trainer(*by_step, *ahead, "monitor.on_alert=rollback")
    folder = made.checkpoints.directory / "global_step_4"
    folder.mkdir(parents=True)
    save_json(folder / "trainer.json", {"step": 4, "healthy": True, "curriculum": made.curriculum.state_dict()})
    for step in range(1, 6):
        made.curriculum.update(0.5, step)
    assert made.curriculum.max_turns == 3
    made.step, made._ahead, made.tracking, loaded = 5, Future(), Tracker(), []
    made.actor = SimpleNamespace(load_checkpoint=loaded.append)
    made.sync = made.save = lambda *_: None
    assert made._roll_back()
    assert loaded == [str(folder)] and made.curriculum.max_turns == 1 and made._ahead is None
    assert made._rollbacks == 1 and "rolled back to global_step_4" in made.tracking.said[0]
