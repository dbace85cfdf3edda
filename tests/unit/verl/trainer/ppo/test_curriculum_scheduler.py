import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.config.schema import CurriculumConfig, SearchNoiseConfig
from verl.trainer.ppo.curriculum_scheduler import CurriculumScheduler, noise_probability

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


# ----------------------------------------------------------------------------------------------------- it can't flutter
SCORES = st.lists(st.floats(0, 1), max_size=300)
PLANS = st.builds(
    lambda window, patience, hysteresis, first, gap: {
        "window": window,
        "patience": patience,
        "hysteresis": hysteresis,
        "thresholds": (first, first + gap),
    },
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0.02, 0.3),
    st.floats(0.05, 0.6),
    st.floats(0.01, 0.3),
)


@given(SCORES, PLANS)
def test_changes_are_apart_and_losses_are_few_whatever_the_scores(scores, plan):
    curriculum = scheduler(**plan)
    events = feed(curriculum, scores)
    for (before, _), (step, event) in zip([(0, None), *events], events, strict=False):
        assert step - before >= (plan["window"] if event == "promote" else plan["patience"])
    # Each loss of a stage makes it dearer by the hysteresis, so there is an end to them.
    most = sum(math.floor((1 - threshold) / plan["hysteresis"]) + 1 for threshold in plan["thresholds"])
    assert sum(event == "rollback" for _, event in events) <= most


@given(PLANS, st.floats(0, 1), st.integers(0, 10**6))
def test_a_score_steadier_than_the_hysteresis_only_ever_promotes(plan, level, seed):
    """Within half a hysteresis of one level, what was good enough to enter a stage is good enough to stay."""
    rng, reach = random.Random(seed), 0.499 * plan["hysteresis"]
    events = feed(scheduler(**plan), [level + rng.uniform(-reach, reach) for _ in range(200)])
    assert [event for _, event in events] in ([], ["promote"], ["promote"] * 2)


def test_a_stage_that_was_lost_is_dearer_by_the_hysteresis():
    curriculum = scheduler(thresholds=(0.2, 0.9))
    good, bad = [0.22] * 3, [0.1] * 2
    assert feed(curriculum, good + bad) == [(3, "promote"), (5, "rollback")]
    assert feed(curriculum, [0.22] * 50, 6) == []  # once it would have been promoted again, and again
    assert feed(curriculum, [0.26] * 3, 56) == [(58, "promote")]


# ---------------------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize(
    ("base", "step", "expected"),
    [
        (4.0, 0, 0.1),
        (4.0, 50, 0.1 + 0.4 / 3),
        (4.0, 100, 0.5),
        (1.0, 25, 0.2),
        (4.0, 120, 0.5),
        (0.25, 50, 0.1 + 0.8 / 3),
    ],
)
def test_noise_follows_zerosearchs_curve(base, step, expected):
    """(b^(1/2) - 1) / (b - 1) is 1/3 for b = 4 and 2/3 for its inverse."""
    assert noise_probability(SearchNoiseConfig(0.1, 0.5, base), step, 100) == pytest.approx(expected)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 100), st.integers(1, 1000))
def test_noise_goes_one_way_between_its_ends(start, end, base, total):
    config = SearchNoiseConfig(start, end, base)
    curve = [noise_probability(config, step, total) for step in (0, *sorted({1, total // 3, total // 2, total}))]
    assert curve[0] == start and curve[-1] == pytest.approx(end)
    signs = [b - a for a, b in zip(curve, curve[1:], strict=False)]
    assert all(change >= -1e-12 for change in signs) if end >= start else all(change <= 1e-12 for change in signs)
