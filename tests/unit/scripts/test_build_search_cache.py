"""scripts/build_search_cache.py over the real local index: what it searches, imports, skips, and how it ends."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scrl.handler.cache_file import CacheFile
from scrl.handler.cache_import import read_results, read_rollouts

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "build_search_cache.py"


@pytest.fixture
def folder(tmp_path) -> Path:
    rows = [{"title": f"Town {i}", "url": f"w/{i}", "text": f"Town {i} lies on the river r{i}."} for i in range(300)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    questions = [f"On which river lies Town {i}?" for i in range(250)] + ["on WHICH river lies town 0?", "zzz qqq"]
    pq.write_table(
        pa.table(
            {
                "data_source": ["t"] * len(questions),
                "prompt": [[{"role": "user", "content": question}] for question in questions],
                "reward_model": [{"ground_truth": "r1"}] * len(questions),
            }
        ),
        tmp_path / "train.parquet",
    )
    turns = [{"queries": ["Town 7", "town  7"]}, {"queries": []}, {"queries": ["Town 8"]}]
    rollout = [{"question": "q", "ground_truths": ["r7"], "turns": turns}, {"message_str": "another format"}]
    (tmp_path / "rollout_step_1.json").write_text(json.dumps(rollout))
    (tmp_path / "rollout_step_2.json").write_text('[{"question": ')
    return tmp_path


def command(*arguments: str) -> list[str]:
    settings = ["search.cache_path=c.sqlite", "search_engine=local", "search.index_corpus=corpus.jsonl"]
    return [sys.executable, str(SCRIPT), *settings, *arguments]


spec = importlib.util.spec_from_file_location("build_search_cache", SCRIPT)
build = importlib.util.module_from_spec(spec)
sys.modules["build_search_cache"] = build
spec.loader.exec_module(build)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command(*arguments), cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_it_searches_each_query_once_and_a_second_run_none(folder):
    arguments = ["data.train_files=[train.parquet]", "--rollouts", "rollout_step_*.json"]
    first = run(folder, *arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("253 queries: 0 known before, 252 found, 1 empty, 0 failed\n")
    assert "1 dropped: unreadable file" in first.stdout and "1 dropped: row in another format" in first.stdout
    assert "253/253" in first.stderr and "252 found, 1 empty, 0 failed" in first.stderr
    second = run(folder, *arguments, "--quiet")
    assert second.stdout.startswith("253 queries: 253 known before, 0 found") and second.stderr == ""
    file = CacheFile(folder / "c.sqlite", None, None)
    assert file.scope.startswith("local|") and file.get("town 7").rows[0]["url"] == "w/7"
    file.close()


def test_killed_in_the_middle_it_goes_on_where_it_was(folder):
    arguments = ["data.train_files=[train.parquet]", "search.max_workers=1"]
    for end, enough in ((signal.SIGKILL, 20), (signal.SIGINT, 100)):
        running = subprocess.Popen(command(*arguments), cwd=folder, stderr=subprocess.PIPE, text=True)
        while _count(folder) < enough:
            assert running.poll() is None
            time.sleep(0.005)
        running.send_signal(end)
        errors = running.communicate(timeout=60)[1]
        if end == signal.SIGINT and running.returncode:  # it may have been faster
            assert running.returncode == 130 and "the same command goes on" in errors and "Traceback" not in errors
    kept = _count(folder)
    assert kept >= 100
    done = run(folder, *arguments)
    assert done.returncode == 0 and _count(folder) == 251
    told = re.search(r"251 queries: (\d+) known before, (\d+) found, (\d+) empty, 0 failed", done.stdout)
    known, found, empty = map(int, told.groups())
    left = (250 - kept, 1) if kept < 251 else (0, 0)  # the second run may have been too fast to be stopped
    assert known == kept and (found, empty) == left


def _count(folder: Path) -> int:
    try:
        file = CacheFile(folder / "c.sqlite", None, None)
    except ValueError:  # not there yet, or without its tables
        return 0
    count = len(file)
    file.close()
    return count


def test_an_engine_that_is_down_ends_it_after_twenty_failures(folder):
    url = "http://127.0.0.1:9"  # nothing listens on the discard port
    environment = {**os.environ, "SEARXNG_URL": url, "NO_PROXY": "127.0.0.1"}
    settings = ["search.cache_path=c.sqlite", "search_engine=searxng", "search.timeout_s=2", "--quiet"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "data.train_files=[train.parquet]", *settings],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "20 searches in a row failed, the last one: " in done.stderr and "0 found" in done.stdout
    assert _count(folder) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search.cache_path=''"], "give search.cache_path=FILE"),
        (["search.cache_mode=record"], "leave the mode at reuse"),
        ([], "nothing to do; give data.train_files"),
        (["--import", "none.json"], "none.json can't be read"),
        (["--import", "corpus.txt"], "is no JSON object or list"),
        (["search.cache_paht=x"], "unknown key search.cache_paht"),
    ],
)
def test_errors_are_one_sentence(folder, monkeypatch, capsys, arguments, says):
    (folder / "corpus.txt").write_text("title: text")
    monkeypatch.chdir(folder)
    assert build.main([*command()[2:], *arguments]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "Indexing" not in line]
    assert len(said) == 1 and said[0].startswith("build_search_cache: ") and says in said[0]


# Result files, in the shapes that this family has.

ROW = {"title": "T", "url": "u", "text": "words"}


@pytest.mark.parametrize(
    "results",
    [
        [ROW],
        [{"title": "T", "link": "u", "snippet": "words"}],
        {"organic": [{"title": "T", "link": "u", "snippet": "words", "position": 1}]},
        {"data": {"web_page_info_list": [{"title": "T", "url": "u", "quick_summary": "words"}]}},
        {"results": [{"name": "T", "href": "u", "body": "words"}, {"title": " ", "text": None}, 3, None]},
    ],
)
def test_shapes_of_results(tmp_path, results):
    shapes = {
        "a.json": {"q": results},
        "b.json": [{"query": "q", "results": results}],
    }
    for name, document in shapes.items():
        (tmp_path / name).write_text("\ufeff" + json.dumps(document), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text("\n" + json.dumps({"question": "q", "result": results}) + "\n{half a li")
    for name in (*shapes, "c.jsonl"):
        dropped: Counter[str] = Counter()
        assert list(read_results(tmp_path / name, dropped)) == [("q", [ROW])]
        assert dropped == ({"line that is no JSON": 1} if name == "c.jsonl" else {})


def test_a_retrieval_servers_documents_and_plain_texts(tmp_path):
    document = {"document": {"id": "1", "contents": '"T"\nwords\nmore'}, "score": 0.5}
    (tmp_path / "a.json").write_text(json.dumps({"q": [document, "just text"]}))
    (_, rows), *_ = read_results(tmp_path / "a.json", Counter())
    assert rows == [{"title": "T", "url": "", "text": "words\nmore"}, {"title": "", "url": "", "text": "just text"}]


def test_what_is_dropped_is_counted_and_a_cut_off_file_gives_what_it_has(tmp_path):
    document = {"a": [ROW], "empty": [], "junk": [{"title": "...", "text": "!"}], " ": [ROW], "no": 7, "last": [ROW]}
    text = json.dumps(document)
    (tmp_path / "a.json").write_text(text[:-20])
    dropped: Counter[str] = Counter()
    assert [query for query, _ in read_results(tmp_path / "a.json", dropped)] == ["a"]
    assert dropped == {"no results": 3, "no query": 1, "what stands after a break in the file": 1}


def test_import_fills_what_is_missing_and_answers_for_any_number_of_results(folder):
    found = {"New Query": [{"title": "N", "link": "u", "snippet": "s"}], "TOWN 7": [{"title": "other"}], "none": []}
    (folder / "search_result.json").write_text(json.dumps(found))
    assert run(folder, "--rollouts", "rollout_step_1.json").returncode == 0
    done = run(folder, "search.topk=9", "--import", "search_result.json")
    assert done.returncode == 0 and "1 imported, 1 were there already" in done.stdout, done.stderr
    assert "1 dropped: no results" in done.stdout
    file = CacheFile(folder / "c.sqlite", None, None)
    assert file.get("new query").rows == [{"title": "N", "url": "u", "text": "s"}] and file.get("new query").serves(99)
    assert file.get("town 7").rows[0]["title"] == "Town 7"
    file.close()


def test_a_large_result_file_is_read_as_a_stream(tmp_path):
    """200,000 queries, 56 MB, in less memory than that, Python's own included."""
    code = (
        "import re, sys; from collections import Counter; from scrl.handler.cache_import import read_results; "
        "count = sum(1 for _ in read_results(sys.argv[1], Counter())); "
        "print(count, int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) < 50_000)"
    )
    with (tmp_path / "big.json").open("w") as file:
        file.write("{" + ",".join(f'"q{i}": [{{"title": "t", "text": "{"x" * 240}"}}]' for i in range(200_000)) + "}")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.json")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["200000", "True"], done.stderr


def test_rollouts_as_the_trainer_writes_them(tmp_path, tokenizer):
    from scrl.types import Episode, Turn
    from verl.trainer.ppo.batch import episode_rows

    episode = Episode("0-0", 0, 0, "Who?", ["a", "b"], "t", prompt_ids=[1], response_ids=[2], finish="answer")
    episode.turns = [Turn("tool_call", queries=["one", "two"], span=(0, 1)), Turn("answer", answer="a", span=(0, 1))]
    (tmp_path / "rollout_step_1.json").write_text(json.dumps(episode_rows([episode], tokenizer, {})))
    asked = list(read_rollouts([tmp_path / "rollout_step_1.json"], Counter()))
    assert [(one.query, one.question, one.ground_truths) for one in asked] == [
        ("one", "Who?", ("a", "b")),
        ("two", "Who?", ("a", "b")),
    ]
