"""Text of a policy turn -> what it means."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrl.llm_agent.parsing import Answer, Malformed, parse_turn, split_think
from scrl.types import ToolCall

CASES = Path(__file__).with_name("turns.jsonl")


def call_text(arguments: object, name: object = "web_search") -> str:
    return f"<think>x</think><tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def cases() -> list[dict]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_what_a_turn_means(case):
    parsed, expect = parse_turn(case["prefix"] + case["sampled"]), case["expect"]
    if expect["kind"] == "malformed":
        assert isinstance(parsed, Malformed) and parsed.reason
        return
    if expect["kind"] == "answer":
        assert parsed == Answer(expect["answer"], expect.get("trailing", False))
        return
    arguments = {"query": expect["queries"]} if "queries" in expect else {"url_list": expect["urls"]}
    assert parsed == ToolCall(expect["tool"], arguments, expect.get("coerced", False), expect.get("trailing", False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", Answer("b")),
        (" \n<think>\n</think>then<answer>b</answer>\n", Answer("b")),
        ("<think>a</think><answer>b</answer> and more", Answer("b", trailing=True)),
        ("<think>say <answer>no</answer></think><answer>yes</answer>", Answer("yes")),
        ("<think>a</think><answer><tool_call>b</tool_call></answer>", Answer("<tool_call>b</tool_call>")),
        ("<think>a</think><tool_call>{<answer>b</answer>", Answer("b")),
        ("<think>a</think><answer>\ud800</answer>", Answer("\ufffd")),
    ],
)
def test_answers(text, expected):
    assert parse_turn(text) == expected


@pytest.mark.parametrize(
    ("arguments", "queries", "coerced"),
    [
        ({"query": ["a", "a", " a ", "b", "c", "d"]}, ["a", "b", "c"], False),
        ({"query": ["a"], "topk": 5}, ["a"], False),
        ({"query": ["  ", "a"]}, ["a"], True),
        ({"query": [["a"], {"a": 1}, True, "b"]}, ["b"], True),
        ('{"query": "a"}', ["a"], True),
        ({"query": ["\ud83d\ude00 \ud800"]}, ["\U0001f600 \ufffd"], False),
    ],
)
def test_queries_are_normalised(arguments, queries, coerced):
    assert parse_turn(call_text(arguments)) == ToolCall("web_search", {"query": queries}, coerced)


def test_urls_are_not_capped_at_the_number_of_queries():
    urls = [f"https://example.org/{i}" for i in range(5)]
    assert parse_turn(call_text({"url_list": urls}, "browse_webpage")).arguments == {"url_list": urls}


@pytest.mark.parametrize(
    ("body", "coerced", "trailing"),
    [
        ('{"name": "web_search", "arguments": {"query": ["a"]}}', False, False),
        ('Searching: {"name": "web_search", "arguments": {"query": ["a"]}}', True, False),
        ('{{"name": "web_search", "arguments": {"query": ["a"]}}}', True, True),
        ('```\n{"name": "web_search", "arguments": {"query": ["a"]}}\n```', True, False),
        ('```json\n{"name": "web_search", "arguments": {"query": ["a"]}}\n``` done', True, True),
        ('{"name": "web_search", "arguments": {"query": ["a", NaN, 1e999, ' + "9" * 5000 + "]}}", True, False),
    ],
)
def test_first_object_of_the_block(body, coerced, trailing):
    expected = ToolCall("web_search", {"query": ["a"]}, coerced, trailing)
    assert parse_turn(f"<think>x</think><tool_call>{body}</tool_call>") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <think> block"),
        ("<answer>a</answer>", "no <think> block"),
        ("so <think>x</think><answer>a</answer>", "no <think> block"),
        ("<think>x<answer>a</answer>", "<think> block is not closed"),
        ("<think>x</think>", "no action follows"),
        ("<think>x</think>a</answer>", "no action follows"),
        ("<think>x</think><answer>a", "<answer> block is not closed"),
        ("<think>x</think></answer><answer>", "<answer> block is not closed"),
        (call_text(["a"]), "not an object"),
        (call_text(None), "not an object"),
        (call_text("a"), "holds no JSON object"),
        (call_text({"query": {"a": 1}}), "needs query"),
        (call_text({"url_list": ["a"]}), "needs query"),
        (call_text({"query": ["a"]}, ["web_search"]), "is not a tool"),
        (call_text({"query": ["a"]}, "Web_Search"), "is not a tool"),
        ("<think>x</think><tool_call>{}{" + call_text({"query": ["a"]})[28:], "has no name"),
        ("<think>x</think><tool_call>" + '{"a":' * 100_000 + "</tool_call>", "nested too deeply"),
    ],
)
def test_malformed_says_why(text, reason):
    parsed = parse_turn(text)
    assert isinstance(parsed, Malformed) and reason in parsed.reason


def test_split_think():
    assert split_think("<think>a</think>b</think>") == ("a", "b</think>")
    assert split_think("<think>a") == ("a", None)
    assert split_think("a") == (None, None)


FRAGMENTS = [
    "<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "```", "```json\n", "{", "}", "[",
    "]", '"', "\\", ",", ":", '"name"', '"web_search"', '"arguments"', '"query"', "NaN", "Infinity", "-", "1e999",
    "9" * 5000, "\\ud800", "\ud800", "\0", "\n", "<|im_start|>", '{"name": "web_search", "arguments": ', "null",
]  # fmt: skip


def well_formed(parsed: object) -> bool:
    """What every caller relies on: one of the three kinds, and only strings that UTF-8 can hold."""
    if isinstance(parsed, Malformed):
        return bool(parsed.reason)
    if isinstance(parsed, Answer):
        return parsed.text.encode() == parsed.text.strip().encode()
    (values,) = parsed.arguments.values()
    return bool(values) and all(value.strip() and value.encode() for value in values)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)))
def test_no_text_raises(text):
    assert well_formed(parse_turn(text))
    assert well_formed(parse_turn("<think></think>" + text))
    assert well_formed(parse_turn(f"<think></think><tool_call>{text}</tool_call>"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["query", "url_list", "x"]), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["web_search", "browse_webpage", "", None, 3]), json_values)
def test_no_json_raises(name, arguments):
    assert well_formed(parse_turn(call_text(arguments, name)))
    assert well_formed(parse_turn(call_text(json.dumps(arguments), name)))


@pytest.mark.parametrize(
    "unit",
    ["<answer>", "<tool_call>", "</tool_call>", "{", '{"', '{"a":', '{"a":[', "[", "```", " ", '{"{', '\\"{', "9", "{}",
     '{"a":1,', "\n{\n\"", "<think>", "</think>", "\ud800"],
)  # fmt: skip
def test_a_megabyte_is_linear(unit):
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()
    for wrapped in (text, f"<think></think>{text}", f"<think></think><tool_call>{text}</tool_call>"):
        assert well_formed(parse_turn(wrapped))
    query = json.dumps({"query": [text]})
    assert well_formed(parse_turn(call_text(query)))
    assert time.process_time() - start < 2.0
