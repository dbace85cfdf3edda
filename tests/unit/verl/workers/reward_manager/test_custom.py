"""A user's own reward: what may stand in the file, what is refused, and what one bad episode costs."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from scrl.types import Episode, Turn
from verl.trainer.config import load_config
from verl.trainer.config.schema import RewardConfig
from verl.trainer.config.validation import check_inputs
from verl.workers.reward_manager.naive import NaiveRewardManager


@pytest.fixture
def manager(tmp_path):
    def make(body, name="reward", **changes):
        file = tmp_path / "mine.py"
        file.write_text(body, encoding="utf-8")
        return NaiveRewardManager(RewardConfig(custom=f"{file}:{name}", use_early_stop_penalty=False, **changes))

    return make


def answered(text, **changes):
    turn = Turn("answer", answer=text, span=(0, 2))
    made = Episode("g", 0, 0, "?", ["Paris"], "nq", [1], [5, 6], [1, 1], [0.0, 0.0], [turn], "answer")
    return replace(made, **changes)


def test_a_number_takes_the_place_of_the_outcome_and_the_rest_is_added(manager):
    rewards = manager("def reward(episode):\n    return len(episode.answer)\n", use_pbrs=True)
    scores, info = rewards([answered("Rome"), answered("Paris")], 3)
    assert scores.tolist() == [[0, 4, 0], [0, 5, 0]]
    assert info["outcome"].tolist() == [4, 5]
    assert info["f1"].tolist() == [0, 1]  # still measured
    assert info["valid"].all() and not info["custom_failed"].any()


def test_named_components_are_summed_and_logged(manager):
    body = """
import numpy as np
def reward(episode):
    parts = {"short": np.float32(0.5)}
    if episode.answer == "Rome":
        parts["rome"] = 2
    return parts
"""
    _, info = manager(body)([answered("Paris"), answered("Rome")], 2)
    assert info["outcome"].tolist() == [0.5, 2.5]
    assert info["custom/short"].tolist() == [0.5, 0.5] and info["custom/rome"].tolist() == [0, 2]


def test_a_tensor_of_one_number_and_a_bool_are_numbers(manager):
    body = "import torch\ndef reward(episode):\n    return {'a': torch.tensor(0.25), 'b': episode.answer == 'Paris'}\n"
    assert manager(body)([answered("Paris")], 2)[1]["outcome"].tolist() == [1.25]


@pytest.mark.parametrize("bad", ["1 / 0", "float('nan')", "'high'", "None", "{}", "{'a': [1]}", "{1: 2.0}", "[1.0]"])
def test_an_episode_it_fails_on_is_left_out_counted_and_logged_once(manager, caplog, bad):
    rewards = manager(f"def reward(episode):\n    return {bad} if episode.answer == 'Rome' else 0.5\n")
    with caplog.at_level(logging.WARNING):
        scores, info = rewards([answered("Rome"), answered("Paris"), answered("Rome")], 2)
    assert scores.tolist() == [[0, 0], [0, 0.5], [0, 0]]
    assert info["valid"].tolist() == [False, True, False]
    assert info["custom_failed"].tolist() == [True, False, True]
    assert info["phi"][0] == [] and info["outcome"].tolist() == [0, 0.5, 0]
    assert rewards.custom.failures == 2 and "mine.py" in rewards.custom.first_failure
    assert sum("failed on an episode" in record.message for record in caplog.records) == 1


def test_an_exception_on_the_made_up_episode_is_a_warning_with_the_users_line(manager, caplog):
    body = "def reward(episode):\n    known = {'nq': 1.0}\n    return known[episode.data_source]\n"
    with caplog.at_level(logging.WARNING):
        rewards = manager(body)
    assert "KeyError: 'example' (mine.py, line 3)" in caplog.text
    assert rewards([answered("x")], 2)[1]["outcome"].tolist() == [1]


def test_failed_episodes_are_not_shown_to_it(manager):
    rewards = manager("def reward(episode):\n    assert episode.finish != 'error'\n    return 1.0\n")
    _, info = rewards([answered("x", finish="error"), answered("x")], 2)
    assert rewards.custom.failures == 0 and info["valid"].tolist() == [False, True]


REFUSED = {
    "def reward(episode):\n    return 'good'\n": "it returned good; it must be a finite number, or a dictionary",
    "def reward(episode):\n    return None\n": "it returned None",
    "def rewrad(episode):\n    return 1\n": "mine.py has no function reward; did you mean rewrad?",
    "x = 1\n": "mine.py has no function reward; it has no functions",
    "def reward(episode, golds):\n    return 1\n": "must take one argument, the episode",
    "async def reward(episode):\n    return 1\n": "is async; give an ordinary function",
    "def reward(episode)\n    return 1\n": r"raised SyntaxError: .*\(line 1\); mend it first",
    "\nimport no_such_module\n": r"raised ModuleNotFoundError: No module named 'no_such_module' \(line 2\)",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_can_not_work_is_refused_at_the_start(manager, body):
    with pytest.raises(ValueError, match=REFUSED[body]) as caught:
        manager(body)
    assert str(caught.value).startswith("reward_model.custom=") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:reward", "there is no file nowhere.py here or in the repository"),
        ("reward", "is not path.py:function; write reward_model.custom=my_reward.py:reward"),
        ("README.md:reward", "README.md is not a Python file; name it README.py"),
        ("mine.py:", "is not path.py:function"),
    ],
)
def test_a_wrong_path_is_refused_before_anything_starts(spec, message):
    config = load_config(["profile=cpu_demo", f"reward_model.custom={spec}"])
    with pytest.raises(ValueError, match=message):
        check_inputs(config)


def test_a_relative_path_is_found_like_data_files(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def reward(episode):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(["profile=cpu_demo", "reward_model.custom=mine.py:reward"])
    assert config.reward_model.custom == f"{tmp_path / 'mine.py'}:reward"
    check_inputs(config)
    monkeypatch.chdir("/")
    _, info = NaiveRewardManager(replace(config.reward_model, use_early_stop_penalty=False))([answered("x")], 2)
    np.testing.assert_array_equal(info["score"], [0.75])
