"""The extras by value on hand-made episodes, and that a coefficient of 0 only logs."""

from dataclasses import replace

import pytest

from scrl.llm_agent.prompts import render_error, render_observation
from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config.schema import ExtrasConfig, RewardConfig
from verl.workers.reward_manager.extras import EXTRAS, Evidence, redundancy
from verl.workers.reward_manager.naive import NaiveRewardManager, observed_results

PLAIN = RewardConfig(use_early_stop_penalty=False)


def search(query, *pages, coerced=False, trailing=False, ok=True):
    """``pages``: (title, text) of each result."""
    found = render_observation([query], [[{"title": title, "text": text} for title, text in pages]])
    call = ToolCall("web_search", {"query": [query]}, coerced=coerced)
    observation = found if ok else render_error("no answer")
    return Turn("tool_call", tool_call=call, queries=[query], observation=observation, trailing=trailing, search_ok=ok)


def episode(*turns, finish="answer", golds=("Paris Texas",)):
    mask, placed = [], []
    for turn in turns:
        placed.append(replace(turn, span=(len(mask), len(mask) + 2)))
        mask += [1, 1] + [0] * (turn.kind == "tool_call")
    return Episode("g", 0, 0, "?", list(golds), "nq", [1], [7] * len(mask), mask, [0.0] * len(mask), placed, finish)


def scored(made, **coefficients):
    config = replace(PLAIN, extras=ExtrasConfig(**coefficients))
    scores, info = NaiveRewardManager(config)([made], len(made.response_ids))
    return {int(t): round(float(scores[0, t]), 5) for t in scores[0].nonzero()[:, 0]}, info


RIGHT, WRONG = Turn("answer", answer="Paris Texas"), Turn("answer", answer="Rome")


def test_format_is_the_share_of_turns_in_the_exact_form_each_with_its_part():
    turns = (search("a"), search("b", coerced=True), search("c", trailing=True), WRONG)
    placed, info = scored(episode(*turns), format=0.4)
    assert placed == {1: 0.1, 10: 0.1}  # turns 0 and 3 of four
    assert info["format_raw"][0] == pytest.approx(0.5) and info["format"][0] == pytest.approx(0.2)
    longer = scored(episode(*[search(str(i)) for i in range(9)], WRONG), format=0.4)[1]
    assert longer["format"][0] == pytest.approx(0.4)  # calling more earns no more
    assert scored(episode(Turn("malformed"), finish="malformed"), format=0.4)[1]["format"][0] == 0


def test_information_gain_is_what_a_turn_adds_to_the_potential():
    turns = (search("a", ("A", "Paris")), search("b", ("B", "Paris")), search("c", ("C", "Texas")), WRONG)
    placed, info = scored(episode(*turns), information_gain=1.0)
    assert placed == {1: 0.5, 7: 0.5}
    assert info["information_gain_raw"][0] == info["phi"][0][-1] == 1


def test_redundancy_is_the_share_of_results_seen_before():
    ann, bob, cat = ("Ann", "x"), ("Bob", "y"), ("Cat", "z")
    turns = (search("a", ann, bob), search("b", bob, cat), search("c", bob), search("d"), search("e", ok=False), WRONG)
    placed, info = scored(episode(*turns), redundancy=-0.2)
    assert placed == {4: -0.1, 7: -0.2}
    assert info["redundancy_raw"][0] == 1.5 and info["redundancy"][0] == pytest.approx(-0.3)


def test_two_results_are_the_same_by_url_or_by_title_and_beginning():
    def shares(*turns):
        return redundancy(Evidence(episode(*[search("q")] * len(turns)), turns, []))

    long = "w" * 100
    assert shares([{"title": "A", "text": long + "cut"}], [{"title": "A", "text": long}]) == [0, 1]
    assert shares([{"title": "A", "text": "one"}], [{"title": "A", "text": "two"}]) == [0, 0]
    page = {"url": "https://a.example", "text": "viewport 1"}
    assert shares([page], [page | {"text": "viewport 2"}]) == [0, 1]
    assert shares([{"title": "A"}, {"title": "A"}], []) == [0, 0]  # one call's own results go out together


@pytest.mark.parametrize(
    ("made", "no_search", "no_answer"),
    [
        (episode(search("a"), WRONG), 0, 0),
        (episode(WRONG), 1, 0),
        (episode(search("a"), search("b"), finish="max_turns"), 0, 1),
        (episode(search("a"), Turn("answer", answer=" ")), 0, 1),
        (episode(Turn("malformed"), finish="malformed"), 1, 1),
    ],
)
def test_search_r1_pp_charges_an_episode_without_search_and_one_without_answer(made, no_search, no_answer):
    placed, info = scored(made, no_search=-0.1, no_answer=-0.1)
    assert (info["no_search_raw"][0], info["no_answer_raw"][0]) == (no_search, no_answer)
    assert info["score"][0] == pytest.approx(info["outcome"][0] - 0.1 * (no_search + no_answer))
    assert set(placed) <= {len(made.response_ids) - 1 - (made.turns[-1].kind == "tool_call")}


def test_switched_off_they_are_logged_and_change_nothing():
    turns = (search("a", ("A", "Paris")), search("b", ("A", "Paris")), RIGHT)
    placed, info = scored(episode(*turns))
    assert placed == {7: 1.0}
    assert [info[f"{name}_raw"][0] for name in EXTRAS] == [1.0, 0.5, 1.0, 0, 0]
    assert [info[name][0] for name in EXTRAS] == [0] * 5


def test_results_of_any_observation():
    assert observed_results(render_observation(["q"], [[{"title": "A", "text": "b"}]])) == [{"title": "A", "text": "b"}]
    assert observed_results("") == observed_results(render_error("no")) == []
    for foreign in ("plain text", "[1, 2]", '[{"results": [{"text": 5}]}]', '[{"results": ["x"]}]', "[" * 50_000):
        assert observed_results(foreign) == [{"text": foreign}]
