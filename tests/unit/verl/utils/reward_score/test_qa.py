"""Every row of the definitions' table, the corners of the normalisation, and the real golds where they are at hand."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.utils.reward_score.qa import (
    ANSWER_SPLIT,
    exact_match,
    f1,
    normalise,
    split_golds,
)

ROOT = Path(__file__).resolve().parents[5]
SHARED = ROOT.parent / "shared/data/deepresearcher/test.parquet"

# prediction, gold, squad EM, squad F1, deepresearcher EM, deepresearcher F1
TABLE = [
    ("the Beatles", "Beatles", 1, 1, 0, 2 / 3),
    ("U.S.A.", "USA", 1, 1, 0, 0),
    ("Jean-Luc Picard", "Jean Luc Picard", 0, 0.4, 1, 1),
    ("New York New York", "New York", 0, 2 / 3, 0, 1),
    ("yes, it is", "yes", 0, 0, 0, 0.5),
    ("1,234", "1234", 1, 1, 0, 0),
    ("北京市", "北京", 0, 0, 0, 0),
]


@pytest.mark.parametrize(("prediction", "gold", "squad_em", "squad_f1", "deep_em", "deep_f1"), TABLE)
def test_definitions(prediction, gold, squad_em, squad_f1, deep_em, deep_f1):
    assert exact_match(prediction, [gold], "squad") == squad_em
    assert f1(prediction, [gold], "squad") == pytest.approx(squad_f1)
    assert exact_match(prediction, [gold]) == deep_em
    assert f1(prediction, [gold]) == pytest.approx(deep_f1)


def test_cover_is_a_substring_of_the_normalised_prediction():
    assert exact_match("It was The Beatles, in 1963.", ["Beatles"], "cover") == 1
    assert exact_match("Beatle", ["Beatles"], "cover") == 0
    assert exact_match("a U.S.A. band", ["USA"], "cover") == 1
    assert exact_match("anything at all", ["The"], "cover") == 0  # a gold of articles alone is not in everything
    assert exact_match("the", ["The"], "cover") == 1
    with pytest.raises(ValueError, match="has no F1"):
        f1("a", ["a"], "cover")


def test_best_alias_counts_and_aliases_may_come_joined():
    joined = ANSWER_SPLIT.join(["Republic of Turkey", " Turkey ", "", "Türkiye"])
    assert split_golds(joined) == ["Republic of Turkey", "Turkey", "Türkiye"]
    assert exact_match("türkiye", joined) == 1
    assert f1("turkey republic", joined) == pytest.approx(0.8)
    assert f1("turkey republic", split_golds(joined)) == f1("turkey republic", joined)
    assert exact_match(f"Turkey{ANSWER_SPLIT}Peru", ["Turkey"]) == 0  # a prediction is never split


@pytest.mark.parametrize("definition", ["deepresearcher", "squad", "cover"])
@pytest.mark.parametrize("prediction", [None, "", "  \n"])
@pytest.mark.parametrize("golds", [[], "", ["", " "], ["Paris"], ["!!!"], ["the"]])
def test_an_empty_prediction_scores_nothing(prediction, golds, definition):
    assert exact_match(prediction, golds, definition) == 0
    if definition != "cover":
        assert f1(prediction, golds, definition) == 0


@pytest.mark.parametrize("definition", ["deepresearcher", "squad"])
def test_texts_that_normalising_erases_match_only_themselves(definition):
    assert exact_match("!!!", ["!!!"], definition) == 1
    assert f1("!!!", ["!!!"], definition) == 1
    assert exact_match("...", ["!!!"], definition) == 0
    assert f1("...", ["!!!"], definition) == 0
    assert exact_match("Paris", ["", "..."], definition) == 0
    assert exact_match("The The", ["the the"], definition) == 1
    assert exact_match("a", ["The"], definition) == 0


def test_squad_refuses_half_a_yes():
    assert f1("no", ["yes"], "squad") == 0
    assert f1("The no", ["no"], "squad") == 1
    assert f1("noanswer given", ["noanswer"], "squad") == 0
    assert f1("yes", ["yes", "yes it is"], "squad") == 1


def test_normalise_folds_any_space_and_keeps_other_scripts():
    assert normalise("  Zürich\u00a0–\tOld_Town!\n") == "zürich – old town"
    assert normalise("The ‘a’ Team", "squad") == "‘ ’ team"
    with pytest.raises(
        ValueError,
        match="definition='bleu' is not known; choose one of deepresearcher, squad, cover",
    ):
        normalise("x", "bleu")
    with pytest.raises(ValueError, match="bleu"):
        f1(None, [], "bleu")


def test_many_long_aliases_are_normalised_once():
    golds = ANSWER_SPLIT.join(f"alias {i} " + "word " * 46 for i in range(178))
    assert len(golds) > 40_000
    assert f1("alias 5 word", golds) == 1.0
    started = time.perf_counter()
    for _ in range(100):
        f1("alias 177 word", golds)
        exact_match("alias 177 word", golds, "squad")
    assert time.perf_counter() - started < 1.0


@pytest.mark.skipif(not SHARED.is_file(), reason="the real golds are not beside this checkout")
def test_every_real_gold_matches_itself():
    parquet = pytest.importorskip("pyarrow.parquet")
    rewards = parquet.read_table(SHARED, columns=["reward_model"]).column(0).to_pylist()
    assert len(rewards) == 3197
    assert max(len(split_golds(reward["ground_truth"])) for reward in rewards) <= 178
    for reward in rewards:
        first = split_golds(reward["ground_truth"])[0]
        for definition in ("deepresearcher", "squad"):
            assert exact_match(first, reward["ground_truth"], definition) == 1
            assert f1(first, reward["ground_truth"], definition) == 1
        assert exact_match(f"it is {first} .", reward["ground_truth"], "cover") == 1


def test_imports_nothing_heavy():
    code = (
        "import sys, verl.utils.reward_score.qa\n"
        "print([m for m in ('torch', 'ray', 'numpy', 'vllm', 'hydra') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert out.stdout.strip() == "[]"
