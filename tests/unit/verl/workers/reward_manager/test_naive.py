"""Rewards by value and place on hand-made episodes; shaping against the theorem it claims."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from scrl.llm_agent.prompts import render_error, render_observation
from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config.schema import PbrsConfig, RewardConfig
from verl.workers.reward_manager.naive import (
    COMPONENTS,
    NaiveRewardManager,
    potentials,
    repeated_turns,
    shaping_rewards,
)

OUTCOME_ONLY = RewardConfig(use_early_stop_penalty=False)
SHAPED = replace(OUTCOME_ONLY, use_pbrs=True)


def search(query, text, **changes):
    found = render_observation([query], [[{"title": "Page", "text": text}]])
    return Turn(
        "tool_call", tool_call=ToolCall("web_search", {"query": [query]}), queries=[query], observation=found, **changes
    )


def answer(text):
    return Turn("answer", answer=text)


def episode(turns, golds=("Paris",), finish="answer"):
    """Each turn: 3 sampled tokens, then 2 of observation if it called a tool. So turn k of a chain ends at 5k + 2."""
    mask, placed = [], []
    for turn in turns:
        placed.append(replace(turn, span=(len(mask), len(mask) + 3)))
        mask += [1, 1, 1] + [0, 0] * (turn.kind == "tool_call")
    made = Episode("g", 0, 0, "?", list(golds), "nq", [1], [7] * len(mask), mask, [0.0] * len(mask), placed)
    return replace(made, finish=finish)


def placed(scores, row=0):
    """The non-zero entries of a row, by token."""
    return {int(t): pytest.approx(float(scores[row, t])) for t in scores[row].nonzero()[:, 0]}


# --- outcome ---------------------------------------------------------------------------------------------------------


def test_outcome_is_f1_on_the_last_sampled_token():
    manager = NaiveRewardManager(OUTCOME_ONLY)
    batch = [
        episode([search("x", "y"), answer("Paris, France")]),
        episode([answer("paris")]),
        episode([answer("Rome")], golds=["Oslo", "rome"]),
        episode([answer("Rome")]),
    ]
    scores, info = manager(batch, 12)
    assert scores.shape == (4, 12) and scores.dtype.is_floating_point
    assert placed(scores, 0) == {7: 2 / 3}
    assert placed(scores, 1) == placed(scores, 2) == {2: 1.0}
    assert placed(scores, 3) == {}
    assert info["em"].tolist() == [0, 1, 1, 0]
    assert info["f1"] == pytest.approx([2 / 3, 1, 1, 0])
    assert info["score"] == pytest.approx(scores.sum(1).tolist())


@pytest.mark.parametrize(
    ("turns", "finish"),
    [
        ([Turn("malformed")], "malformed"),
        ([search("x", "y"), search("z", "y")], "max_turns"),
        ([search("x", "Paris")], "length"),
    ],
)
def test_an_episode_that_never_answered_broke_the_format(turns, finish):
    scores, info = NaiveRewardManager(OUTCOME_ONLY)([episode(turns, finish=finish)], 12)
    assert placed(scores) == {5 * len(turns) - 3: -1.0}
    assert info["outcome"].tolist() == [-1] and info["f1"].tolist() == [0]


def test_format_score_is_configurable():
    manager = NaiveRewardManager(replace(OUTCOME_ONLY, format_score=-0.25))
    assert manager([episode([Turn("malformed")], finish="malformed")], 3)[1]["score"].tolist() == [-0.25]


def test_failed_and_empty_episodes_score_nothing_and_are_marked():
    failed = episode([search("x", "Paris")], finish="error")
    no_room = replace(episode([]), finish="length")
    scores, info = NaiveRewardManager(SHAPED)([failed, episode([answer("Paris")]), no_room], 6)
    assert info["valid"].tolist() == [False, True, False]
    assert scores.sum(1).tolist() == [0, 1, 0]
    for name in (*COMPONENTS, "score", "return"):
        assert info[name][0] == info[name][2] == 0
    assert info["phi"][0] == []


def test_nothing_at_all():
    scores, info = NaiveRewardManager(SHAPED)([], 4)
    assert scores.shape == (0, 4) and len(info["score"]) == 0


# --- shaping ---------------------------------------------------------------------------------------------------------


def test_shaping_of_the_known_example():
    phi = [0.2, 0.5, 0.9, 0.9]  # two tool turns and an answer, which leaves the potential
    closed = shaping_rewards(phi, 1.0, "zero")
    assert closed == pytest.approx([0.3, 0.4, -0.9])
    assert sum(closed) == pytest.approx(-0.2)
    to_go = [sum(closed[k:]) for k in range(3)]
    assert to_go == pytest.approx([-0.2, -0.5, -0.9])  # R - phi(s_t) with R = 0
    assert sum(shaping_rewards(phi, 0.9, "zero")) == pytest.approx(-0.34)  # undiscounted: a bias
    assert shaping_rewards(phi, 1.0, "carry") == pytest.approx([0.3, 0.4, 0.0])


def test_closed_shaping_sums_to_the_first_potential_when_discounted_alike():
    rng = random.Random(0)
    for _ in range(200):
        gamma, phi = rng.uniform(0.5, 1), [rng.random() for _ in range(rng.randint(2, 9))]
        shaped = shaping_rewards(phi, gamma, "zero", ends_in_tool=rng.random() < 0.5)
        assert sum(gamma**k * value for k, value in enumerate(shaped)) == pytest.approx(-phi[0])


def test_shaping_lands_on_each_turns_last_sampled_token():
    turns = [search("a", "Paris is far"), search("b", "nothing"), search("c", "Paris, Texas"), answer("Rome")]
    scores, info = NaiveRewardManager(SHAPED)([episode(turns, golds=["Paris Texas"])], 20)
    assert info["phi"][0] == [0, 0.5, 0.5, 1, 1]
    assert placed(scores) == {2: 0.5, 12: 0.5, 17: -1.0}
    assert info["pbrs"].tolist() == [0] and info["score"].tolist() == [0]


def test_carry_pays_for_what_was_found():
    carry = replace(SHAPED, pbrs=PbrsConfig(gamma=0.9, terminal="carry"))
    found = [search("a", "Paris")]
    scores, info = NaiveRewardManager(carry)([episode([*found, answer("Rome")]), episode(found, finish="length")], 8)
    assert placed(scores, 0) == {2: 0.9}
    assert placed(scores, 1) == {2: -0.1}
    assert info["pbrs"] == pytest.approx([0.9, 0.9])


def test_an_episode_cut_off_after_a_tool_turn_is_closed_too():
    shaped = replace(SHAPED, pbrs=PbrsConfig(gamma=0.9))
    turns = [search("a", "Paris"), search("b", "Texas")]
    scores, _ = NaiveRewardManager(shaped)([episode(turns, golds=["Paris Texas"], finish="length")], 10)
    assert placed(scores) == {2: 0.45, 7: -0.5 - 1}


def test_shaping_that_is_off_is_still_logged():
    turns = [search("a", "Paris"), answer("Paris")]
    carry = replace(OUTCOME_ONLY, pbrs=PbrsConfig(terminal="carry"))
    scores, info = NaiveRewardManager(carry)([episode(turns)], 8)
    assert placed(scores) == {7: 1.0}
    assert info["pbrs_raw"].tolist() == [1] and info["pbrs"].tolist() == [0]


def test_return_is_discounted_per_turn():
    turns = [search("a", "Paris"), search("b", "x"), answer("Paris")]
    shaped = replace(SHAPED, pbrs=PbrsConfig(gamma=0.9))
    _, info = NaiveRewardManager(shaped)([episode(turns)], 13, discount=0.9)
    assert info["score"][0] == pytest.approx(0.9 - 0.1 - 1 + 1)
    assert info["return"][0] == pytest.approx(0.81)  # the shaping is gone


def test_closed_shaping_keeps_the_optimal_policy_and_carry_does_not():
    """Backward induction on random episodic MDPs: the last action answers, the others search."""
    rng = np.random.default_rng(0)
    states, searches, horizon, moved = 6, 3, 4, 0
    for _ in range(30):
        gamma = rng.uniform(0.7, 1.0)
        move = rng.dirichlet(np.ones(states), size=(states, searches))  # (s, a, s')
        pay, phi = rng.uniform(0, 1, states), rng.uniform(0, 1, states)

        def optimum(terminal, gamma=gamma, move=move, pay=pay, phi=phi):
            def shaped(before, after, tool):
                # A turn's shaping depends on its own two states alone, unless it is the episode's last.
                if terminal is None:
                    return 0.0
                path = [phi[before], phi[after], phi[after]] if tool else [phi[before], phi[before]]
                return shaping_rewards(path, gamma, terminal)[0]

            step = np.array([[shaped(s, t, True) for t in range(states)] for s in range(states)])
            last = pay + np.array([shaped(s, s, False) for s in range(states)])
            value, policy = last, []
            for _ in range(horizon):
                q = np.einsum("sat,st->sa", move, step + gamma * value[None, :])
                q = np.concatenate([q, last[:, None]], axis=1)
                policy.append(q.argmax(1))
                value = q.max(1)
            return np.array(policy), value

        plain, plain_value = optimum(None)
        closed, closed_value = optimum("zero")
        np.testing.assert_array_equal(plain, closed)
        np.testing.assert_allclose(closed_value, plain_value - phi, atol=1e-12)
        moved += bool((optimum("carry")[0] != plain).any())
    assert moved > 0


def test_carry_pays_for_finding_what_then_is_not_used():
    """A counter-example by hand: answering at once is right for sure (1), after a search that shows the gold only half
    of the time. Closed, the search is paid 0 in all; carried, it looks worth 1.5."""

    def value(terminal, phi, outcome):
        return sum(shaping_rewards(phi, 1.0, terminal)) + outcome

    at_once, after_search = ([0.0, 0.0], 1.0), ([0.0, 1.0, 1.0], 0.5)
    assert value("zero", *at_once) == 1.0 > value("zero", *after_search) == 0.5
    assert value("carry", *at_once) == 1.0 < value("carry", *after_search) == 1.5


# --- potential -------------------------------------------------------------------------------------------------------


def test_potential_is_the_best_aliases_share_of_distinct_tokens():
    turns = [search("q", "the new york times of York"), search("q", "New new NEW city")]
    assert potentials(turns, ["New York New York City"]) == pytest.approx([0, 2 / 3, 1])
    assert potentials(turns, ["New York New York City", "york"]) == [0, 1, 1]
    assert potentials(turns, ["Yorkshire"]) == [0, 0, 0]  # whole tokens only


@pytest.mark.parametrize("golds", [[], [""], ["yes"], ["No."], ["a long passage", "YES"]])
def test_no_potential_without_a_gold_or_for_yes_and_no(golds):
    assert potentials([search("q", "yes no a long passage"), answer("yes")], golds) == [0, 0, 0]


def test_what_the_policy_wrote_itself_earns_nothing():
    echoed = search("Is it Paris", "Nothing here.")
    assert "Paris" in echoed.observation
    assert potentials([echoed], ["Paris"]) == [0, 0]
    assert potentials([search("q", "x"), answer("Paris")], ["Paris"]) == [0, 0, 0]
    for name in ("results", "query", "title", "text"):  # nor do the names of the JSON
        assert potentials([search("q", "x")], [name]) == [0, 0]
    failed = replace(search("Paris", ""), observation=render_error("no reply to 'Paris'"), search_ok=False)
    assert potentials([failed], ["Paris"]) == [0, 0]


def test_text_is_read_as_text_not_as_json():
    assert potentials([search("q", 'First line\nParis "Texas"\tnow')], ["Paris Texas now"]) == [0, 1]
    cut = replace(search("q", "x"), observation="[not JSON] Paris")
    assert potentials([cut], ["Paris"]) == [0, 1]
    followed = replace(search("q", "x"), observation=search("q", "Paris").observation + "\nAnswer now.")
    assert potentials([followed], ["Paris Now"]) == [0, 0.5]
    assert potentials([replace(cut, observation="[" * 100_000)], ["Paris"]) == [0, 0]
    assert potentials([search("q", "lone \ud800 surrogate, Paris")], ["Paris"]) == [0, 1]


def test_many_aliases_give_what_few_give():
    golds = [f"alias{i} word" for i in range(200)]
    assert potentials([search("q", "word"), search("q", "alias150")], golds) == [0, 0.5, 1]


# --- penalties -------------------------------------------------------------------------------------------------------


def test_early_stop_counts_tool_turns_before_an_answer():
    manager = NaiveRewardManager(RewardConfig())
    direct, searched = episode([answer("Paris")]), episode([search("q", "x"), answer("Paris")])
    broken = episode([Turn("malformed")], finish="malformed")
    scores, info = manager([direct, searched, broken], 8)
    assert placed(scores, 0) == {2: 0.5} and placed(scores, 1) == {7: 1.0} and placed(scores, 2) == {2: -1.0}
    assert info["early_stop"].tolist() == [-0.5, 0, 0] and info["early_stop_raw"].tolist() == [1, 0, 0]
    assert manager([direct, searched], 8, min_turns=2)[1]["early_stop"].tolist() == [-0.5, -0.5]
    assert manager([direct, searched], 8, min_turns=0)[1]["early_stop"].tolist() == [0, 0]
    off = NaiveRewardManager(OUTCOME_ONLY)([direct], 8)[1]
    assert off["early_stop"].tolist() == [0] and off["early_stop_raw"].tolist() == [1]


def test_repetition_is_charged_on_the_turn_that_repeats():
    turns = [
        search("capital of France", "x"),
        search("mayor of Lyon", "x"),
        search("Capital of France?", "x"),
        answer("Rome"),
    ]
    config = replace(OUTCOME_ONLY, use_repetition_penalty=True)
    scores, info = NaiveRewardManager(config)([episode(turns)], 20)
    assert placed(scores) == {12: -0.2}
    assert info["repetition"] == pytest.approx([-0.2]) and info["repetition_raw"].tolist() == [1]
    off = NaiveRewardManager(OUTCOME_ONLY)([episode(turns)], 20)[1]
    assert off["repetition"].tolist() == [0] and off["repetition_raw"].tolist() == [1]


def test_repetition_needs_more_than_the_threshold():
    ten = "a b c d e f g h i j"
    assert repeated_turns([search(ten, ""), search("a b c d e f g", "")], 0.7) == [False, False]  # 7/10
    assert repeated_turns([search(ten, ""), search("a b c d e f g h", "")], 0.7) == [False, True]
    assert repeated_turns([search("x", ""), search("y", ""), search("X!", "")], 0.7) == [False, False, True]
    assert repeated_turns([search("?!", ""), search("?!", "")], 0.7) == [False, False]  # no token, nothing to compare


def test_queries_of_one_call_do_not_repeat_each_other_and_pages_are_not_queries():
    both = Turn("tool_call", tool_call=ToolCall("web_search", {"query": ["x y", "x y"]}), queries=["x y", "x y"])
    assert repeated_turns([both, answer("z")], 0.7) == [False, False]
    assert repeated_turns([both, search("x y", "")], 0.7) == [False, True]
    page = "https://en.example.org/wiki/Paris"
    browse = Turn("tool_call", tool_call=ToolCall("browse_webpage", {"url_list": [page]}), queries=[page])
    assert repeated_turns([browse, browse], 0.7) == [False, False]


# --- together --------------------------------------------------------------------------------------------------------


def test_components_add_up_on_random_episodes():
    rng = random.Random(3)
    config = RewardConfig(use_pbrs=True, use_repetition_penalty=True, min_turns=2, pbrs=PbrsConfig(0.9, "carry"))
    words = ["Paris", "Texas", "river", "mayor", "France"]
    batch = []
    for _ in range(100):
        turns = [search(" ".join(rng.choices(words, k=2)), rng.choice(words)) for _ in range(rng.randint(0, 4))]
        finish = rng.choice(["answer", "malformed"])
        turns.append(answer(rng.choice(words)) if finish == "answer" else Turn("malformed"))
        batch.append(episode(turns, golds=["Paris Texas"], finish=finish))
    scores, info = NaiveRewardManager(config)(batch, 30)
    total = info["outcome"] + info["pbrs"] + info["early_stop"] + info["repetition"]
    np.testing.assert_allclose(info["score"], total, atol=1e-12)
    np.testing.assert_allclose(scores.sum(1).numpy(), total, atol=1e-6)
    for row, made in enumerate(batch):
        assert all(made.response_mask[t] == 1 for t in placed(scores, row))
        for turn, parts in zip(made.turns, info["by_turn"][row], strict=True):
            assert sum(parts.values()) == pytest.approx(float(scores[row, slice(*turn.span)].sum()), abs=1e-5)


def test_each_turn_tells_what_it_earned_by_component():
    config = replace(SHAPED, use_repetition_penalty=True)
    turns = [search("a b", "nothing"), search("a b", "Paris"), answer("Paris")]
    _, info = NaiveRewardManager(config)([episode(turns)], 30)
    assert info["by_turn"][0] == [{}, {"pbrs": 1.0, "repetition": -0.2}, {"pbrs": -1.0, "outcome": 1.0}]


def test_a_large_batch_takes_seconds_not_minutes():
    text = " ".join(f"word{i % 900}" for i in range(800))
    turns = [search(f"query {k} {k * k}", text) for k in range(7)] + [answer("Paris")]
    batch = [episode(turns, golds=["Paris Texas", "word5 and word6"])] * 512
    started = time.process_time()
    NaiveRewardManager(replace(SHAPED, use_repetition_penalty=True))(batch, 8000)
    assert time.process_time() - started < 3
