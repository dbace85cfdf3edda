"""The reader without a model: BM25 by hand, sentences, what it takes."""

import math
import time

import pytest

from scrl.handler.reading_agent.extractive import (
    MAX_NOTES,
    MAX_SENTENCE,
    ExtractiveReader,
    bm25,
    split_sentences,
)
from scrl.handler.reading_agent.reader import ReadTask


def test_bm25_worked_by_hand():
    """Three documents of 2, 2 and 4 words (mean 8/3); "harbour" stands in two of them, "red" in one."""
    documents = ["harbour town", "green hill", "red harbour harbour lighthouse"]
    idf_harbour, idf_red = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    norm = lambda length: 1.2 * (0.25 + 0.75 * length / (8 / 3))  # noqa: E731
    expected = [
        idf_harbour * 1 / (1 + norm(2)),
        0.0,
        idf_harbour * 2 / (2 + norm(4)) + idf_red * 1 / (1 + norm(4)),
    ]
    assert bm25("the red harbours", documents) == pytest.approx(expected)
    twice = bm25("red red harbour", documents)
    assert twice[2] == pytest.approx(expected[2] + idf_red * 1 / (1 + norm(4))) and twice[0] == pytest.approx(
        expected[0]
    )


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?  Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "no." Then left.', ['He said "no."', "Then left."]),
        ("北京是首都。上海不是。", ["北京是首都。", "上海不是。"]),
        ("A line\nanother\n\nthird 3.14 stays", ["A line", "another", "third 3.14 stays"]),
        ("", []),
        (" \n ", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_a_sentence_without_end_is_cut():
    pieces = split_sentences("word " * 1000)
    assert max(map(len, pieces)) <= MAX_SENTENCE and " ".join(pieces).split() == ["word"] * 1000
    assert [len(piece) for piece in split_sentences("x" * 1000)] == [400, 400, 200]


FILLER = [f"Sentence number {i} speaks of the weather, and of nothing that anybody asked for." for i in range(200)]


def task(*views: str, **values) -> ReadTask:
    return ReadTask("T", views, **{"question": "Who founded Red Harbour?", **values})


def test_the_best_sentences_come_in_the_pages_order_within_the_budget():
    page = [
        *FILLER[:100],
        "Red Harbour was founded by Ann Keller.",
        *FILLER[100:],
        "The harbour is red in the evening.",
    ]
    notes = ExtractiveReader().read(task("\n".join(page[:150]), "\n".join(page[150:])))
    assert notes == ["Red Harbour was founded by Ann Keller.", "The harbour is red in the evening."]


def test_the_query_that_found_the_page_counts_too():
    page = "\n".join([*FILLER, "Keller was born in Lund."])
    assert "Keller was born in Lund." not in ExtractiveReader().read(task(page))
    assert ExtractiveReader().read(task(page, query="birthplace of Keller born")) == ["Keller was born in Lund."]


def test_a_short_page_is_taken_whole_and_what_is_known_is_left_out():
    page = "One thing. Another thing. One thing."
    assert ExtractiveReader().read(task(page)) == ["One thing.", "Another thing."]
    assert ExtractiveReader().read(task(page, known=frozenset(["One thing."]))) == ["Another thing."]
    assert ExtractiveReader().read(task(page, known=frozenset(["One thing.", "Another thing."]))) == []


def test_where_nothing_matches_the_beginning_is_taken_and_reading_on_gives_the_rest():
    known, notes = frozenset(), []
    for _ in range(20):
        new = ExtractiveReader().read(task("\n".join(FILLER), question="Zanzibar?", known=known))
        assert sum(map(len, new)) <= MAX_NOTES and not known.intersection(new)
        notes += new
        known = frozenset(notes)
    assert notes == FILLER


def test_it_takes_milliseconds():
    text = "\n".join(FILLER * 5)[:65536]
    reader = ExtractiveReader()
    started = time.process_time()
    reader.read(task(text))
    assert time.process_time() - started < 2
