"""The local index: what it finds, in what order, and that building it survives processes that race or die."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st

from scrl.handler.web_search_agent import local_index
from scrl.handler.web_search_agent.local_index import LocalIndex, build_index, content_words

ROOT = Path(__file__).resolve().parents[4]
PAGES = [
    {"title": "Red Harbour", "url": "w/1", "text": "Red Harbour is a film directed by Ilka Voss in 1962."},
    {"title": "Red Harbour Band", "url": "w/2", "text": "Red Harbour Band played red harbour songs. Red Harbour!"},
    {"title": "Ilka Voss", "url": "w/3", "text": "Ilka Voss was born in Tarnow. She directed Red Harbour."},
    {"title": "Tarnow", "url": "w/4", "text": "Tarnow is a town on the river Sel."},
    {"title": "The The", "url": "w/5", "text": "A group."},
    {"title": "北京大学", "url": "w/6", "text": "北京大学是一所大学。"},
    {"title": "Café Zoë", "url": "w/7", "text": "A coffee house: serving."},
]


def titles(rows: list[dict[str, str]]) -> list[str]:
    return [row["title"] for row in rows]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def index() -> LocalIndex:
    return LocalIndex.in_memory(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page["url"])
def test_exact_title_puts_that_page_first(index, page):
    for query in (page["title"], page["title"].upper(), f' "{page["title"]}": '):
        assert index.search(query, 3)[0] == page


def test_words_of_title_and_text_are_found(index):
    assert titles(index.search("who directed Red Harbour", 1)) == ["Red Harbour"]
    assert titles(index.search("river", 3)) == ["Tarnow"]
    assert titles(index.search("films", 3)) == ["Red Harbour"]  # stemmed
    assert titles(index.search("cafe\u0301 zoe", 1)) == ["Café Zoë"]  # decomposed, without the diaeresis
    assert titles(index.search("北京", 1)) == ["北京大学"]


def test_title_counts_more_than_text():
    rows = [
        {"title": "Sel", "url": "1", "text": "alpha river town"},
        {"title": "river", "url": "2", "text": "alpha Sel town"},
    ]
    assert titles(LocalIndex.in_memory(rows).search("river alpha", 2)) == ["river", "Sel"]
    assert titles(LocalIndex.in_memory(rows).search("sel alpha", 2)) == ["Sel", "river"]


def test_ties_keep_the_order_of_the_corpus():
    rows = [{"title": f"t{i}", "url": str(i), "text": "same words here"} for i in range(200)]
    found = LocalIndex.in_memory(rows).search("same words", 50)
    assert [row["url"] for row in found] == [str(i) for i in range(50)]


def test_ties_keep_the_order_of_the_corpus_where_segments_do_not():
    """Merged segments may stand in any order; here the pages are stored backwards."""
    index = tantivy.Index(local_index._schema())
    index.register_tokenizer("body", local_index._ALL_WORDS)
    writer = index.writer(15_000_000, 1)
    for ordinal in reversed(range(200)):
        document = tantivy.Document(body="same words", title_key="t")
        document.add_unsigned("ordinal", ordinal)
        document.add_bytes("row", json.dumps(["t", str(ordinal), "same words"]).encode())
        writer.add_document(document)
    writer.commit()
    assert [row["url"] for row in LocalIndex(index).search("same", 50)] == [str(i) for i in range(50)]
    assert [row["url"] for row in LocalIndex(index).search("t", 2)] == ["0", "1"]


def test_nothing_to_find(index):
    assert index.search("", 3) == index.search(' \n"():*?\\^~', 3) == index.search("xyzzy", 3) == []
    assert LocalIndex.in_memory([]).search("anything", 3) == []
    with pytest.raises(ValueError, match="topk=0"):
        index.search("river", 0)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ('title:"river', ["Tarnow"]),
        ("(river AND (b OR", ["Tarnow"]),
        ("body:[1 TO ^river~2", ["Tarnow"]),
        ("\ud800 \0river\0", ["Tarnow"]),
        ("river " * 20_000, ["Tarnow"]),
        ("river" * 20_000, []),
        ("+-!", []),
    ],
    ids=range(7),
)
def test_hostile_queries_are_just_words(index, query, first):
    assert titles(index.search(query, 1)) == first


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=300))
def test_any_text_may_be_searched(index, query):
    assert all(row in PAGES for row in index.search(query, 3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.text(alphabet=st.characters(), max_size=40)] * 3), max_size=5))
def test_any_text_may_be_indexed(rows):
    LocalIndex.in_memory([dict(zip(("title", "url", "text"), row, strict=True)) for row in rows]).search("a", 3)


def test_all_kinds_of_files_give_the_same_index(tmp_path):
    plain = write_jsonl(tmp_path / "a.jsonl", PAGES[:3])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in PAGES[3:5]).encode()))
    pq.write_table(pa.Table.from_pylist([{**row, "extra": 1} for row in PAGES[5:]]), tmp_path / "c.parquet")
    on_disk = LocalIndex.open([plain, packed, tmp_path / "c.parquet"], tmp_path / "index", progress=False)
    in_memory = LocalIndex.in_memory(PAGES)
    assert len(on_disk) == len(PAGES)
    for query in ("who directed Red Harbour", "Ilka Voss born", "the the", "大学"):
        assert on_disk.search(query, 5) == in_memory.search(query, 5)


def test_built_once_and_again_when_the_corpus_changes(tmp_path):
    corpus, folder = write_jsonl(tmp_path / "a.jsonl", PAGES), tmp_path / "index"
    first = build_index(corpus, folder, progress=False)
    stamp = (first / "manifest.json").stat().st_mtime_ns
    os.utime(corpus, (1, 1))  # a copy has another time but the same content
    assert build_index(corpus, folder, progress=False) == first
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    opened = LocalIndex.open(corpus, folder, progress=False)
    for name, text in (("cut", '{"corpus": ['), ("other", "{}"), ("list", "[1]"), ("binary", "\udcff")):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(text, errors="surrogateescape")
    write_jsonl(corpus, [{**PAGES[3], "text": "Tarnow is a city."}])
    second = build_index(corpus, folder, progress=False)
    assert second != first and not first.exists()  # the outdated one doesn't pile up
    assert (folder / "cut").is_dir()  # nor does a damaged one of whatever corpus stop the build
    assert titles(LocalIndex.open(corpus, folder, progress=False).search("city", 3)) == ["Tarnow"]
    assert titles(opened.search("river", 3)) == ["Tarnow"]  # whoever had the old one open keeps it


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no rows"),
        ('{"title": "a", "url": "b", "text": "c"}\n{"title": "a", "url": "b"}\n', "line 2 has no field 'text'"),
        ('\n{"title": 3, "url": "b", "text": "c"}\n', "line 2: 'title' is 3, not a string"),
        ('{"title": "a"', "line 1 is not JSON"),
        ("[1]\n", "line 1 is a JSON list"),
        ("\udcff\n", "line 1 is not UTF-8"),
    ],
)
def test_a_broken_corpus_is_told_with_its_line(tmp_path, content, says):
    (tmp_path / "a.jsonl").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=says):
        build_index(tmp_path / "a.jsonl", tmp_path / "index", progress=False)
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [".lock"]  # nothing half-built


def test_other_corpus_errors(tmp_path):
    pq.write_table(pa.table({"title": ["a"], "contents": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "c.csv").write_text("title,url,text")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(json.dumps(PAGES[0]).encode() * 99)[:40])
    for name, says in (
        ("a.parquet", "has no column 'url'"),
        ("b.parquet", "no parquet file"),
        ("c.csv", "unknown kind"),
        ("d.jsonl.gz", "damaged"),
        ("missing.jsonl", "missing"),
        ("", "a folder"),
    ):
        with pytest.raises(ValueError, match=says):
            build_index(tmp_path / name, tmp_path / "index", progress=False)


def run_python(code: str, *arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


BUILD = """
import sys
from scrl.handler.web_search_agent import local_index
build = local_index._build
def counted(*arguments):
    print("built", flush=True)
    build(*arguments)
local_index._build = counted
index = local_index.LocalIndex.open(sys.argv[1], sys.argv[2], progress=False)
print([row["title"] for row in index.search("river", 3)])
"""


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory) -> Path:
    rows = [{"title": f"page {i}", "url": str(i), "text": f"w{i} river " + "filler words " * 50} for i in range(10_000)]
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "large.jsonl", rows)


def test_two_processes_build_once(large_corpus, tmp_path):
    both = [run_python(BUILD, large_corpus, tmp_path / "index") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines()]
    assert lines.count("built") == 1
    assert lines.count("['page 0', 'page 1', 'page 2']") == 2
    assert len([path for path in (tmp_path / "index").iterdir() if path.is_dir()]) == 1


def test_many_segments_rank_as_one(large_corpus, tmp_path, monkeypatch):
    one = LocalIndex.open(large_corpus, tmp_path / "one", progress=False)
    monkeypatch.setattr(local_index, "_DISK_HEAP", 15_000_000)
    many = LocalIndex.open(large_corpus, tmp_path / "many", progress=False)
    assert one._searcher.num_segments == 1 < many._searcher.num_segments
    for query in ("river filler", "w9999 river", "page 77", "page w500 w7000"):
        assert one.search(query, 20) == many.search(query, 20)


def test_a_killed_build_leaves_nothing_in_the_way(large_corpus, tmp_path):
    folder = tmp_path / "index"
    process = run_python(BUILD, large_corpus, folder)
    deadline = time.monotonic() + 30
    while not list(folder.glob("*.building/*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL
    process.communicate()
    assert list(folder.glob("*.building")) and not list(folder.glob("*/manifest.json"))
    assert len(LocalIndex.open(large_corpus, folder, progress=False)) == 10_000
    assert not list(folder.glob("*.building"))


def test_waiting_for_another_build_has_a_deadline(tmp_path):
    corpus, folder = write_jsonl(tmp_path / "a.jsonl", PAGES), tmp_path / "index"
    hold = """
import sys, fcntl
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another process has been building"):
            build_index(corpus, folder, progress=False, timeout_s=0.1)
    finally:
        process.kill()
        process.communicate()
    assert build_index(corpus, folder, progress=False, timeout_s=0.1).is_dir()  # the lock died with its holder


def test_a_full_disk_is_one_clear_error(large_corpus, tmp_path):
    code = """
import resource, sys
from pathlib import Path
from scrl.handler.web_search_agent import local_index
from scrl.handler.web_search_agent.local_index import build_index
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    build_index(sys.argv[1], sys.argv[2], progress=False)
except ValueError as error:
    print(error)
print([path.name for path in Path(sys.argv[2]).iterdir()])
"""
    out, err = run_python(code, large_corpus, tmp_path / "index").communicate(timeout=60)
    assert "can't be written" in out and "give another one or make room" in out, (out, err)
    assert out.splitlines()[-1] == "['.lock']"


def test_a_damaged_index_says_what_to_delete(tmp_path):
    corpus = write_jsonl(tmp_path / "a.jsonl", PAGES)
    folder = build_index(corpus, tmp_path / "index", progress=False)
    (folder / "meta.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged .* delete that folder"):
        LocalIndex.open(corpus, tmp_path / "index", progress=False)


def test_words_are_stems_without_stop_words_and_unspaced_scripts_characters():
    assert content_words("The Directors and the DIRECTING Zoë's films") == ["director", "direct", "zoe", "s", "film"]
    assert (
        content_words("北京市") == ["北", "京", "市"] and content_words("\ud800 x") == ["x"] and content_words("") == []
    )
