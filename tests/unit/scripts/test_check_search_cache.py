"""scripts/check_search_cache.py: its counts by hand, and what it concludes from them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scrl.handler.cache import normalise_query
from scrl.handler.cache_file import CacheFile, Entry
from scrl.handler.cache_import import AskedQuery

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_search_cache.py"
spec = importlib.util.spec_from_file_location("check_search_cache", SCRIPT)
check = importlib.util.module_from_spec(spec)
sys.modules["check_search_cache"] = check
spec.loader.exec_module(check)


def fill(path: Path, scope: str, **found: str | None) -> None:
    """``found``: query (underscores for spaces) -> text of its one result, None for an empty result."""
    file = CacheFile(path, scope, "cache")
    for query, text in found.items():
        rows = [] if text is None else [{"title": "t", "url": "http://ascii", "text": text}]
        file.write([Entry(normalise_query(query.replace("_", " ")), 3, 0.0, rows)])
    file.close()


def asked(query: str, question: str, *golds: str) -> AskedQuery:
    return AskedQuery(query, question, golds)


def test_every_count_by_hand(tmp_path):
    fill(
        tmp_path / "c.sqlite",
        "s",
        capital_of_France="PARIS, of course",
        rivers_of_the_north=None,
        who_wrote_the_red_harbour="The author is Ann Lee.",
        москва="The capital of Russia",
        东京="東京タワー",
    )
    queries = [
        asked("Capital  of france", "q1", "Paris"),  # holds the gold
        asked("capital of france", "q1", "Paris"),  # a repeated one counts again
        asked("rivers of the north", "q2", "Sel", "River Sel"),  # empty
        asked("who wrote the red harbour ?", "q3", "Ann B. Lee"),  # the same words; two of the gold's three
        asked("who wrote the red harbour 1984", "q4", "1984"),  # similar by 5/6
        asked("never asked", "q5", "nothing"),
        asked("москва", "q6", "yes"),  # another script; no gold to look for
        asked("东京", "q7", "東京タワー"),  # kana and Han are one
    ]
    file = CacheFile(tmp_path / "c.sqlite", None, None)
    found = check.examine(file, queries, 0.8)
    file.close()
    assert (found.asked, found.exact, found.fuzzy, found.empty) == (8, 5, 2, 1)
    assert (found.compared, found.mismatched) == (6, 1)
    assert found.gold_share == {"q1": 1.0, "q2": 0.0, "q3": pytest.approx(2 / 3), "q4": 0.0, "q5": 0.0, "q7": 1.0}
    assert (found.coverage, found.empty_rate, found.mismatch_rate) == (7 / 8, 1 / 7, 1 / 6)
    assert found.gold_rate == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Red harbour", "LATIN"),
        ("iPhone 发布时间", "CJK"),
        ("ひらがな", "CJK"),
        ("서울", "CJK"),
        ("Москва", "CYRILLIC"),
        ("1984!", ""),
    ],
)
def test_scripts(text, script):
    assert check.script_of(text) == script


def findings(**values) -> "check.Findings":
    whole = {"asked": 100, "exact": 80, "fuzzy": 10, "empty": 5, "compared": 85, "mismatched": 1}
    return check.Findings(**{**whole, "gold_share": {"a": 1.0, "b": 0.5}, **values})


@pytest.mark.parametrize(
    ("values", "offline", "live"),
    [
        ({}, "", ""),
        ({"exact": 60}, "only 70% of queries were found (at least 80%)", ""),
        ({"gold_share": {"a": 0.9}}, "the results hold a gold for only 0% of questions (at least 50%)", ""),
        ({"gold_share": {}}, "", ""),
        ({"empty": 52}, *["58% of what was found is empty (at most 10%)"] * 2),
        ({"mismatched": 17}, *["20% of results are in another script (at most 5%)"] * 2),
        ({"asked": 49, "exact": 49, "fuzzy": 0}, *["49 queries are too few to tell (at least 50)"] * 2),
    ],
)
def test_verdicts(values, offline, live):
    assert [problems[0] if problems else "" for problems in check.verdicts(findings(**values))] == [offline, live]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_it_says_plainly_what_the_cache_is_good_for(tmp_path):
    fill(tmp_path / "c.sqlite", "[red]", **{f"query_{i}": "some gold words" if i % 2 else None for i in range(60)})
    rollout = [
        {"question": f"q{i}", "ground_truths": ["gold"], "turns": [{"queries": [f"Query {i}"]}]} for i in range(60)
    ]
    (tmp_path / "rollout_step_1.json").write_text(json.dumps(rollout))
    done = run(tmp_path, "c.sqlite", "--rollouts", "rollout_step_1.json")
    assert done.returncode == 2, done.stderr
    assert "c.sqlite ([red])" in done.stdout and "50.0% of 60" in done.stdout
    assert done.stdout.count("NO: 50% of what was found is empty (at most 10%)") == 2
    (tmp_path / "rollout_step_1.json").write_text(json.dumps(rollout[1::2] * 2))
    good = run(tmp_path, "c.sqlite", "--rollouts", "rollout_step_1.json")
    assert good.returncode == 0 and good.stdout.count("yes, training on it makes sense") == 2


def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "c.sqlite", "one", a="b")
    fill(tmp_path / "c.sqlite", "two", a="b")
    (tmp_path / "r.json").write_text('[{"question": "q", "ground_truths": [], "turns": [{"queries": ["a"]}]}]')
    for arguments, says in (
        (["c.sqlite"], "give --rollouts FILES or --data FILES"),
        (["c.sqlite", "--rollouts", "r.json"], "has the results of 2 engines; choose by --scope: one, two"),
        (["none.sqlite", "--rollouts", "r.json"], "none.sqlite is not there"),
        (["c.sqlite", "--rollouts", "x.json"], "no such data file: x.json"),
        (["c.sqlite", "--rollouts", "r.json", "--fuzzy", "0"], "--fuzzy 0.0 is out of range"),
    ):
        assert check.main(arguments) == 1
        said = capsys.readouterr()
        assert said.out == "" and says in said.err
        assert said.err.startswith("check_search_cache: ") and len(said.err.splitlines()) == 1
    assert check.main(["c.sqlite", "--rollouts", "r.json", "--scope", "two"]) == 2  # one query is too few
