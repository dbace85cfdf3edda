import json
import math
import random
from dataclasses import replace

import pytest

from verl.trainer.config.schema import CurriculumConfig
from verl.trainer.ppo.curriculum_scheduler import CurriculumScheduler

CONFIG = CurriculumConfig(
    enable=True, stages=(1, 3, 6), thresholds=(0.2, 0.35), window=3, patience=2, hysteresis=0.05, min_turns=(0, 1, 2)
)


def scheduler(**changes):
    return CurriculumScheduler(replace(CONFIG, **changes), default_max_turns=4, default_min_turns=1)


def feed(curriculum, scores, start=1):
    """Every (step, event) that happened."""
    events = [(step, curriculum.update(f1, step)) for step, f1 in enumerate(scores, start)]
    return [(step, event) for step, event in events if event]


def test_disabled_it_stays_at_the_defaults():
    curriculum = scheduler(enable=False)
    assert feed(curriculum, [1.0] * 50) == []
    assert (curriculum.max_turns, curriculum.min_turns) == (4, 1)


def test_promotes_when_a_full_window_is_above_the_threshold():
    curriculum = scheduler()
    assert (curriculum.max_turns, curriculum.min_turns) == (1, 0)
    assert feed(curriculum, [0.9, 0.9]) == []  # the mean is high, but of two steps only
    assert feed(curriculum, [0.9], 3) == [(3, "promote")]
    assert (curriculum.stage, curriculum.max_turns, curriculum.min_turns) == (1, 3, 1)
    assert feed(curriculum, [0.3, 0.3, 0.3, 0.5], 4) == [(7, "promote")]  # the last three: .367
    assert curriculum.max_turns == 6
    assert feed(curriculum, [1.0] * 20, 8) == []  # there is no stage beyond the last


def test_exactly_the_threshold_is_not_above_it():
    assert feed(scheduler(thresholds=(0.25, 0.5)), [0.25] * 10) == []


def test_rolls_back_after_patience_below_the_line():
    curriculum = scheduler()
    feed(curriculum, [0.5] * 3)
    assert feed(curriculum, [0.1], 4) == []
    assert feed(curriculum, [0.1], 5) == [(5, "rollback")]
    assert curriculum.max_turns == 1
    assert feed(curriculum, [0.0] * 20, 6) == []  # there is no stage before the first


def test_patience_starts_again_after_a_better_step():
    curriculum = scheduler(window=1)
    feed(curriculum, [0.5])
    assert feed(curriculum, [0.1, 0.2, 0.1, 0.2, 0.1, 0.2]) == []
    assert feed(curriculum, [0.1, 0.1]) == [(2, "rollback")]


def test_hysteresis_a_score_at_the_threshold_does_not_flutter():
    curriculum = scheduler(thresholds=(0.2, 0.9))
    events = feed(curriculum, [0.2 + 0.04 * math.sin(step) for step in range(500)])
    assert [event for _, event in events] in ([], ["promote"])
    assert curriculum.metrics()["curriculum/below"] == 0
    noisy = random.Random(0)
    events = feed(scheduler(window=10, patience=10), [noisy.uniform(0, 0.4) for _ in range(1000)])
    assert len(events) < 40  # 1000 coin flips; changes are at least a window or the patience apart
    steps = [step for step, _ in events]
    assert all(b - a >= 10 for a, b in zip(steps, steps[1:], strict=False))


def test_the_mean_of_the_old_stage_does_not_count_in_the_new():
    curriculum = scheduler()
    feed(curriculum, [1.0] * 3)
    assert "curriculum/f1_mean" not in curriculum.metrics()
    curriculum.update(0.3, 4)
    assert curriculum.metrics() == {
        "curriculum/stage": 1,
        "curriculum/max_turns": 3,
        "curriculum/min_turns": 1,
        "curriculum/below": 0,
        "curriculum/f1_mean": 0.3,
    }


def test_steps_without_a_score_are_passed_over():
    curriculum = scheduler()
    assert feed(curriculum, [0.9, float("nan"), 0.9, float("nan"), 0.9]) == [(5, "promote")]


def test_by_step_the_score_does_not_matter():
    curriculum = scheduler(steps=(3, 5), thresholds=())
    turns = []
    for step in range(1, 7):
        turns.append(curriculum.max_turns)
        curriculum.update(float("nan") if step == 2 else 0.0, step)
    assert turns == [1, 1, 3, 3, 6, 6]
    assert scheduler(steps=(1, 5)).max_turns == 3


def test_min_turns_default_to_the_reward_models():
    curriculum = scheduler(min_turns=())
    feed(curriculum, [1.0] * 3)
    assert curriculum.min_turns == 1


@pytest.mark.parametrize("cut", [1, 4, 7, 10])
def test_resuming_continues_as_if_nothing_had_happened(cut):
    rng = random.Random(cut)
    scores = [rng.uniform(0.0, 0.6) for _ in range(60)]
    straight = scheduler()
    expected = feed(straight, scores)
    first, second = scheduler(), scheduler()
    before = feed(first, scores[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + feed(second, scores[cut:], cut + 1) == expected
    assert second.state_dict() == straight.state_dict()


def test_a_state_of_another_curriculum_is_refused():
    state = scheduler().state_dict()
    with pytest.raises(ValueError, match=r"stages=\[1, 3, 10\].*stages=\[1, 3, 6\].*resume_mode=disable"):
        scheduler(stages=(1, 3, 10)).load_state_dict(state)
    with pytest.raises(ValueError, match="window=5.*window=3"):
        scheduler(window=5).load_state_dict(state)
    with pytest.raises(ValueError, match="holds.*'stage'"):
        scheduler().load_state_dict({"stage": 1})
    with pytest.raises(ValueError, match="enable=True.*enable=False"):
        scheduler().load_state_dict(scheduler(enable=False).state_dict())
    scheduler(patience=9).load_state_dict(state)  # may be changed in mid-run
    disabled = replace(CONFIG, enable=False)
    saved = CurriculumScheduler(disabled, default_max_turns=4, default_min_turns=1).state_dict()
    CurriculumScheduler(disabled, default_max_turns=6, default_min_turns=2).load_state_dict(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.2,)}, "has 1 values; 3 stages need 2"),
        ({"stages": (3, 1, 6)}, "must be one or more rising"),
        ({"stages": ()}, "must be one or more rising"),
        ({"steps": (5,)}, "needs 2 rising steps"),
        ({"steps": (5, 5)}, "needs 2 rising steps"),
        ({"min_turns": (0, 1)}, "one value for each"),
        ({"min_turns": (2, 2, 2)}, "min_turns=2 in a stage of 1"),
        ({"window": 0}, "window=0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        scheduler(**changes)
