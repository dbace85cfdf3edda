"""The command scripts/build_index.py, from another directory, on a path with a space."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "build_index.py"


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a b").mkdir()
    rows = [{"title": f"t{i}", "url": str(i), "text": "words"} for i in range(1000)]
    (tmp_path / "a b" / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a b" / "two.jsonl").write_text(json.dumps(rows[0]) + '\n{"title": "x", "url": "y"}\n')
    (tmp_path / "a b" / "empty.jsonl").write_text("\n")
    return tmp_path / "a b"


def test_it_builds_and_says_so(folder):
    done = run(folder, "one.jsonl", "--out", "out dir")
    assert done.returncode == 0 and done.stdout.startswith("1,000 pages"), done.stderr
    assert "Indexing one.jsonl" in done.stderr and "100%" in done.stderr and "1,000 pages" in done.stderr
    assert len(list((folder / "out dir").glob("*/manifest.json"))) == 1
    again = run(folder, "one.jsonl", "--out", "out dir")
    assert again.stdout.startswith("1,000 pages") and "Indexing" not in again.stderr


@pytest.mark.parametrize(
    ("corpus", "says"),
    [
        ("two.jsonl", "line 2 has no field 'text'"),
        ("empty.jsonl", "has no rows"),
        ("none.jsonl", "none.jsonl is missing"),
    ],
)
def test_errors_are_one_sentence(folder, corpus, says):
    done = run(folder, corpus, "--out", "out", "--quiet")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("build_index: ") and says in done.stderr and len(done.stderr.splitlines()) == 1
