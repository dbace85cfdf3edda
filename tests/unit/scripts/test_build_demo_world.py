"""The demo world: the committed files are what the script makes, and its questions can be answered by searching."""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scrl.handler.web_search_agent.local_index import LocalIndex

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from build_demo_policy import query_of  # noqa: E402
from build_demo_world import MIX, Entity, World, draw_questions  # noqa: E402

DEMO = ROOT / "data" / "demo"


@pytest.fixture(scope="module")
def world() -> World:
    return World(2025, 3200)


def test_the_committed_corpus_is_what_the_seed_makes(world):
    with open(DEMO / "corpus.jsonl", encoding="utf-8") as file:
        committed = [json.loads(line) for line in file]
    assert committed == world.pages
    assert len(committed) >= 3000
    assert len({page["title"] for page in committed}) == len(committed)


def test_the_committed_questions_are_what_the_seed_makes(world):
    # The questions are drawn from the world's own generator state, so make it afresh.
    splits = draw_questions(World(2025, 3200), random.Random(2026), {"train": 2000, "dev": 200, "test": 300})
    seen: Counter = Counter()
    for split, rows in splits.items():
        assert pq.read_table(DEMO / f"{split}.parquet").to_pylist() == rows
        seen.update(row["prompt"][0]["content"] for row in rows)
    assert max(seen.values()) == 1, "a question stands in two splits"
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2000, "dev": 200, "test": 300}


def test_another_seed_is_another_world(world):
    other = World(1, 3200)
    facts = lambda w: {p["title"]: p["text"] for p in w.pages}  # noqa: E731
    mine, theirs = facts(world), facts(other)
    assert not any(mine[title] == theirs[title] for title in mine.keys() & theirs.keys())


@pytest.mark.parametrize("kind", list(MIX))
def test_every_step_of_a_question_stands_on_the_page_that_a_search_finds(world, kind):
    index, rng, found, steps = LocalIndex.in_memory(world.pages), random.Random(5), 0, 0
    for _ in range(60):
        item = world.question(rng, kind)
        for step in item["steps"]:
            subject, _, value = step
            assert (value.name if isinstance(value, Entity) else value) in subject.text
            titles = [result["title"] for result in index.search(query_of(step), 2)]
            found, steps = found + (subject.name in titles), steps + 1
    assert found / steps > 0.97


def test_questions_have_the_steps_that_their_kind_says(world):
    rng = random.Random(11)
    expected = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "comparison": 2, "yes_no": 2}
    for kind, count in expected.items():
        for _ in range(50):
            item = world.question(rng, kind)
            assert len(item["steps"]) == count
            if kind.endswith("hop"):
                for (_, _, value), (subject, _, _) in zip(item["steps"], item["steps"][1:], strict=False):
                    assert value is subject
                assert item["golds"][0] == item["steps"][-1][2].name
            elif kind == "comparison":
                years = {subject.name: int(value) for subject, _, value in item["steps"]}
                assert item["golds"] == [min(years, key=years.get)]
            else:
                (_, _, one), (_, _, other) = item["steps"]
                assert item["golds"] == ["yes" if one is other else "no"]
