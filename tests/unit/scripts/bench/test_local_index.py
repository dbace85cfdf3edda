"""The index benchmark at a small size: both engines find what they are asked for, on the same data."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "bench" / "local_index.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_local_index", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_passages_are_the_same_for_a_seed_whatever_their_number(bench):
    few, many = list(bench.passages(3, seed=1)), list(itertools.islice(bench.passages(30_000, seed=1), 3))
    assert few == many != list(bench.passages(3, seed=2))
    assert all(60 <= len(row["text"].split()) <= 120 and 2 <= len(row["title"].split()) <= 4 for row in few)


def test_both_engines_are_measured_and_find_the_passages(bench, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert bench.main(["--passages", "2000", "--queries", "40", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "2,000 passages" in printed and "local index / bm25s" in printed
    local, other = json.loads(figures.read_text())
    assert local["engine"].startswith("local") and other["engine"].startswith("bm25s")
    for measured in (local, other):
        assert measured["found"] > 0.9  # wrong row numbers or a wrong corpus would find next to nothing
        assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["queries_per_s"] > 0
