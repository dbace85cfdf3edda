"""Noise in the search results: which queries, what they get instead, and what stays as it was."""

import json

from scrl.llm_agent.noise import with_noise
from scrl.types import EpisodeRequest, SearchNoise, ToolCall

OTHERS = ("who wrote book y", "capital of Z", "mother of W")


def request(probability, uid="1-0", seed=3, question="who made film x", sample_index=0, queries=OTHERS):
    noise = SearchNoise(probability, queries, seed)
    return EpisodeRequest(uid, sample_index, 0, question, ["Ann"], "demo", [1], max_turns=2, noise=noise)


def search(*queries):
    return ToolCall("web_search", {"query": list(queries)})


MANY = search(*(f"query {i}" for i in range(4000)))


def test_without_noise_the_call_is_the_policys_own():
    call = search("film x")
    plain = EpisodeRequest("1-0", 0, 0, "q", [], "demo", [1], max_turns=2)
    assert with_noise(call, plain) == (call, 0)
    assert with_noise(call, request(0.0)) == (call, 0)
    browse = ToolCall("browse_webpage", {"url_list": ["https://a.example"]})
    assert with_noise(browse, request(1.0)) == (browse, 0)


def test_every_query_is_replaced_at_one_and_the_call_itself_is_untouched():
    call = search("film x", "ann")
    sent, replaced = with_noise(call, request(1.0))
    assert replaced == 2 and set(sent.arguments["query"]) <= set(OTHERS)
    assert call.arguments["query"] == ["film x", "ann"]


def test_the_share_is_the_probability_and_a_higher_one_only_adds():
    before: set[int] = set()
    for probability in (0.1, 0.25, 0.5, 0.75):
        sent, replaced = with_noise(MANY, request(probability))
        noisy = {
            i for i, (a, b) in enumerate(zip(MANY.arguments["query"], sent.arguments["query"], strict=True)) if a != b
        }
        assert replaced == len(noisy)
        assert abs(len(noisy) / 4000 - probability) < 0.025  # three deviations of 4,000 draws
        assert before < noisy
        before = noisy


def test_it_depends_on_seed_group_and_query_alone():
    sent = with_noise(MANY, request(0.5))
    assert with_noise(MANY, request(0.5)) == sent
    assert with_noise(MANY, request(0.5, sample_index=5)) == sent  # the group meets one engine
    assert with_noise(search("  QUERY 7 "), request(0.5))[1] == with_noise(search("query 7"), request(0.5))[1]
    assert with_noise(MANY, request(0.5, uid="2-0")) != sent
    assert with_noise(MANY, request(0.5, seed=4)) != sent


def test_an_episodes_own_question_is_no_noise():
    for uid in map(str, range(50)):
        sent, _ = with_noise(search("film x"), request(1.0, uid=uid, question="capital of Z"))
        assert sent.arguments["query"][0] in ("who wrote book y", "mother of W")
    alone = request(1.0, question="capital of Z", queries=("capital of Z",))
    assert with_noise(search("film x"), alone) == (search("film x"), 0)


def test_any_text_can_be_drawn_for():
    broken = json.loads('"\\ud800"')  # a lone surrogate, as a policy can write it in JSON
    assert with_noise(search(broken), request(1.0))[1] == 1
