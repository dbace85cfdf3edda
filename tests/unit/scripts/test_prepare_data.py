"""scripts/prepare_data.py: every form of question file, what is left out and why, and a download that is cut off."""

import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.utils.dataset import read_rows
from verl.utils.question_files import aliases

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "data" / "deepresearcher"

spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "scripts" / "prepare_data.py")
script = importlib.util.module_from_spec(spec)
sys.modules["prepare_data"] = script
spec.loader.exec_module(script)

ROWS = [
    {"question": 'Who said "so, what?"\nAnd where?', "answer": "Ann, of Oslo"},
    {"question": "北京的首都?", "answer": "北京"},
]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = script.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def converted(capsys, tmp_path: Path, name: str, content: str | bytes, *options: str) -> list[dict]:
    """Rows of the parquet that a file of this content becomes."""
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    code, _, err = run(capsys, "convert", file, "--output", tmp_path / "out.parquet", *options)
    assert code == 0, err
    return pq.read_table(tmp_path / "out.parquet").to_pylist()


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


CSV = 'question,answer\n"Who said ""so, what?""\nAnd where?","Ann, of Oslo"\n北京的首都?,北京\n'
FORMS: dict[str, str | bytes] = {
    "q.jsonl": jsonl(*ROWS),
    "list.json": json.dumps(ROWS),
    "held.json": json.dumps({"version": 1, "data": ROWS}),
    "lines.json": jsonl(*ROWS),
    "marked.json": "\ufeff" + json.dumps(ROWS),
    "q.csv": CSV,
    "marked.csv": "\ufeff" + CSV,
    "semicolon.csv": 'question;answer\r\n"Who said ""so, what?""\nAnd where?";Ann, of Oslo\r\n北京的首都?;北京\r\n',
    "q.tsv": CSV.replace('",', '"\t').replace("question,", "question\t").replace("?,北", "?\t北"),
    "utf16.csv": CSV.encode("utf-16"),
    "utf16.jsonl": jsonl(*ROWS).encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows(capsys, tmp_path, name):
    stem = name.partition(".")[0]
    assert converted(capsys, tmp_path, name, FORMS[name]) == [
        {
            "data_source": stem,
            "prompt": [{"content": row["question"], "role": "user"}],
            "ability": "qa",
            "reward_model": {"ground_truth": row["answer"], "style": "rule"},
            "extra_info": {"index": f"{stem}_{number}", "split": "out"},
        }
        for number, row in enumerate(ROWS)
    ]


def test_parquet_too_and_what_was_converted_converts_to_itself(capsys, tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "q.parquet")
    assert run(capsys, "convert", tmp_path / "q.parquet", "--output", tmp_path / "out.parquet")[0] == 0
    first = pq.read_table(tmp_path / "out.parquet")
    assert [row["reward_model"]["ground_truth"] for row in first.to_pylist()] == ["Ann, of Oslo", "北京"]
    (tmp_path / "out.parquet").rename(tmp_path / "again.parquet")
    assert run(capsys, "convert", tmp_path / "again.parquet", "--output", tmp_path / "out.parquet")[0] == 0
    assert pq.read_table(tmp_path / "out.parquet").equals(first)


@pytest.mark.parametrize(
    ("row", "golds", "source"),
    [
        ({"id": "nq_1", "question": "q", "golden_answers": ["a", "b"], "data_source": "nq"}, ["a", "b"], "nq"),
        ({"question": "q", "answer": {"value": "a", "aliases": ["b", "a"]}, "question_id": "tc_2"}, ["a", "b"], "mine"),
        ({"question": "q", "possible_answers": '["a", "b"]', "id": 4}, ["a", "b"], "mine"),
        ({"question": "q", "answer": "a", "answer_aliases": ["b"], "id": "2hop"}, ["a", "b"], "mine"),
        ({"question": "q", "answers": {"text": ["a", "b"], "answer_start": [3, 4]}, "id": "squad"}, ["a", "b"], "mine"),
        ({"Question": "q", "Answer": "a<|answer_split|>b", "id": "x"}, ["a", "b"], "mine"),
        ({"problem": "q", "answer": 3.0, "_id": "m"}, ["3"], "mine"),
        ({"query": "q", "target": True, "qid": "b"}, ["yes"], "mine"),
        (
            {  # Search-R1
                "data_source": "nq",
                "prompt": [{"role": "user", "content": "q"}],
                "reward_model": {"ground_truth": {"target": ["a", "b"]}, "style": "rule"},
                "extra_info": {"index": 7, "split": "train"},
            },
            ["a", "b"],
            "nq",
        ),
    ],
)
def test_usual_data_sets_need_no_options(capsys, tmp_path, row, golds, source):
    (made,) = converted(capsys, tmp_path, "mine.jsonl", jsonl(row))
    assert made["prompt"][0]["content"] == "q"
    assert made["reward_model"]["ground_truth"] == "<|answer_split|>".join(golds)
    assert made["data_source"] == source
    own = row.get("extra_info", {}).get("index") or next(v for k, v in row.items() if k in script_keys())
    assert made["extra_info"]["index"] == str(own)


def script_keys() -> tuple[str, ...]:
    from verl.utils.question_files import KEY

    return KEY


def test_columns_can_be_named(capsys, tmp_path):
    row = {"question": "no", "data": {"asked": "q"}, "solution": "a", "answer": "no", "aliases": ["no"], "set": "s"}
    options = ("--question", "data.asked", "--answer", "solution", "--source")
    (made,) = converted(capsys, tmp_path, "m.jsonl", jsonl(row), *options, "set")
    assert (made["prompt"][0]["content"], made["reward_model"]["ground_truth"]) == ("q", "a")
    assert made["data_source"] == "s"
    (made,) = converted(capsys, tmp_path, "m.jsonl", jsonl(row), *options, "my_set")
    assert made["data_source"] == "my_set", "a name, where no column is called that"


def test_texts_that_only_look_like_lists_stay(capsys, tmp_path):
    assert aliases("[0, 1]") == ["[0, 1]"]
    assert aliases("['a', \"b's\"]") == ["a", "b's"]
    assert aliases("[sic]") == ["[sic]"]
    assert aliases(float("nan")) == aliases(None) == aliases(" ") == aliases([]) == []
    with pytest.raises(ValueError, match="NumPy"):
        aliases("['a' 'b']")


def test_bad_rows_are_left_out_with_place_and_reason(capsys, tmp_path):
    lines = [
        b'{"question": "q1", "answer": "a"}',
        b'{"question": "q2", "answer": ',
        b"",
        b'["q3", "a"]',
        b'{"question": " ", "answer": "a"}',
        b'{"question": "q5", "answer": []}',
        b'{"question": "q\xff6", "answer": "a"}',
        b'{"question": "q7", "answer": "\\ud800"}',
        b'{"something": "else"}',
        b"[" * 100_000,
        b'{"question": "q8 \\ud83d\\ude00", "answer": "a"}',
    ]
    (tmp_path / "q.jsonl").write_bytes(b"\n".join(lines))
    code, out, err = run(capsys, "convert", tmp_path / "q.jsonl", "--output", tmp_path / "o.parquet")
    assert code == 0 and out.startswith("2 questions")
    assert [row.question for row in read_rows(tmp_path / "o.parquet")] == ["q1", "q8 😀"]
    head, *shown = err.splitlines()
    assert head.startswith("8 rows left out") and "bytes that are not UTF-8; try iconv" in head
    assert "line 2: no JSON (" in shown[0]
    assert "line 4: a JSON list, not an object" in shown[1]
    assert shown[2:] == [
        "  q.jsonl, line 5: empty question",
        "  q.jsonl, line 6: empty answer",
        "  q.jsonl, line 7: bytes that are not UTF-8; try iconv -f GB18030 -t UTF-8 on the file",
        "  and 3 more",
    ]


def test_csv_rows_that_are_broken_cost_only_themselves(capsys, tmp_path):
    text = 'question,answer\nq1,a\nq2,a,b\nq3\n"q4"x,a\n\n"q\n5",a\nq6,a\n"q7,a\nq8,a\n'
    (tmp_path / "q.csv").write_text(text)
    code, _, err = run(capsys, "convert", tmp_path / "q.csv", "--output", tmp_path / "o.parquet")
    assert code == 0
    assert [row.question for row in read_rows(tmp_path / "o.parquet")] == ["q1", "q\n5", "q6"]
    assert "line 3: 3 cells under 2 columns" in err and "line 4: 1 cells" in err
    assert "line 5: broken quotes" in err and "line 10: broken quotes" in err


def test_gb18030_is_named_as_what_it_may_be(capsys, tmp_path):
    (tmp_path / "q.csv").write_bytes("question,answer\n北京的首都?,北京\n".encode("gb18030"))
    code, _, err = run(capsys, "convert", tmp_path / "q.csv", "--output", tmp_path / "o.parquet")
    assert code == 1 and "iconv -f GB18030 -t UTF-8" in err and not (tmp_path / "o.parquet").exists()


def test_huge_fields_and_many_rows(capsys, tmp_path):
    rows = [{"question": f"q{i}", "answer": "a" * (2_000_000 if i == 7 else 5)} for i in range(3000)]
    text = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows)
    made = converted(capsys, tmp_path, "q.csv", text)
    assert [row["prompt"][0]["content"] for row in made] == [row["question"] for row in rows]
    assert len(made[7]["reward_model"]["ground_truth"]) == 2_000_000


def test_repeated_questions_and_ids_are_kept_and_told(capsys, tmp_path):
    rows = [("q", "a", "1"), ("q", "a", "1"), ("q", "b", "2"), ("r", "a", "2")]
    (tmp_path / "q.jsonl").write_text(jsonl(*({"question": q, "answer": a, "id": i} for q, a, i in rows)))
    code, out, _ = run(capsys, "convert", tmp_path / "q.jsonl", "--output", tmp_path / "o.parquet")
    assert code == 0 and "2 repeat an earlier question, 1 with other answers (kept)" in out
    keys = [row.key for row in read_rows(tmp_path / "o.parquet")]
    assert keys == ["1", "q_1", "2", "q_3"]


def test_what_cannot_work_is_one_sentence_and_leaves_the_old_output(capsys, tmp_path):
    out = tmp_path / "o.parquet"
    good = tmp_path / "good.jsonl"
    good.write_text(jsonl(*ROWS))
    assert run(capsys, "convert", good, "--output", out)[0] == 0
    before = out.read_bytes()

    def refused(*arguments: object, output: Path = out) -> str:
        files = set(tmp_path.iterdir())
        code, _, err = run(capsys, "convert", *arguments, "--output", output)
        assert code == 1 and len(err.splitlines()) == 1 and err.startswith("prepare_data: "), err
        assert out.read_bytes() == before and set(tmp_path.iterdir()) == files
        return err

    (tmp_path / "half.json").write_text('[{"question": "q", "answer": "a"}, {"question"')
    (tmp_path / "half.parquet").write_bytes(before[: len(before) // 2])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "q.xlsx").write_bytes(b"PK")
    # The first file's rows have been written when the second turns out to be broken.
    assert "half.json can't be read as json" in refused(good, tmp_path / "half.json")
    assert "can't be read as parquet" in refused(good, tmp_path / "half.parquet")
    assert "no row can be used" in refused(tmp_path / "empty.csv")
    assert "is none of .jsonl" in refused(tmp_path / "q.xlsx")
    assert "no such data file" in refused(tmp_path / "gone.csv")
    assert "no column 'ask'" in refused(good, "--question", "ask")
    assert "one of the files to convert" in refused(out)
    assert "is no .parquet" in refused(good, output=tmp_path / "o.csv")


# ------------------------------------------------------------------------------------------------------ DeepResearcher
def table(*questions: str) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "data_source": "nq",
                "prompt": [{"content": question, "role": "user"}],
                "ability": "qa",
                "reward_model": {"ground_truth": "a", "style": "unknown"},
                "extra_info": {"index": f"nq_{question}", "split": "dev"},
            }
            for question in questions
        ]
    )


SETS = {"train": table("t1", "d1", "e1"), "dev": table("d1", "b", "c"), "test": table("c", "b", "e1")}


class Cutting(BaseHTTPRequestHandler):
    """Serves the sets, but no answer is longer than ``most`` bytes: the connection breaks there."""

    files: dict[str, bytes] = {}
    most = 1000
    sent = 0

    def do_GET(self) -> None:
        content = self.files.get(self.path.rpartition("/")[2])
        if content is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        piece = content[start : start + self.most]
        self.wfile.write(piece)
        type(self).sent += len(piece)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(tmp_path):
    for name, rows in SETS.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    Cutting.files = {f"{name}.parquet": (tmp_path / f"{name}.parquet").read_bytes() for name in SETS}
    Cutting.most = max(map(len, Cutting.files.values())) // 3 + 1
    Cutting.sent = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/data"
    server.shutdown()


def test_a_download_that_is_cut_off_goes_on_and_dev_is_marked(capsys, tmp_path, site):
    folder = tmp_path / "sets"
    for _ in range(2):  # the second time all is there
        code, out, err = run(capsys, "deepresearcher", "--output", folder, "--url", site)
        assert code == 0, err
        assert Cutting.sent == sum(map(len, Cutting.files.values())), "no byte was fetched twice"
        assert "2 of dev's questions stand in test too" in out and "published: 875" in out
        assert "1 of train's questions stand in dev" in out and "1 of train's questions stand in test" in out
        dev = pq.read_table(folder / "dev.parquet").to_pylist()
        assert [row["extra_info"]["also_in_test"] for row in dev] == [False, True, True]
        for row in dev:
            del row["extra_info"]["also_in_test"]
        assert dev == SETS["dev"].to_pylist()
        assert (folder / "test.parquet").read_bytes() == Cutting.files["test.parquet"]
        assert sorted(path.name for path in folder.iterdir()) == ["dev.parquet", "test.parquet", "train.parquet"]


def test_a_later_run_takes_up_what_an_earlier_one_left(capsys, tmp_path, site):
    Cutting.most, folder = 100, tmp_path / "sets"
    code, _, err = run(capsys, "deepresearcher", "--output", folder, "--url", site)
    assert code == 1 and "by hand" in err and len(err.splitlines()) == 1
    assert Cutting.sent == script.TRIES * 100 == (folder / ".train.parquet.part").stat().st_size
    Cutting.most = 10**6
    assert run(capsys, "deepresearcher", "--output", folder, "--url", site)[0] == 0
    assert Cutting.sent == sum(map(len, Cutting.files.values()))


def test_without_a_network_it_says_what_to_do(capsys, tmp_path, site):
    folder = tmp_path / "sets"
    for url, reason in ((f"{site}/wrong".replace("data", "none"), "HTTP 404"), ("http://127.0.0.1:9/data", "refused")):
        Cutting.files = {}
        code, _, err = run(capsys, "deepresearcher", "--output", folder, "--url", url)
        assert code == 1 and reason in err and f"into {folder} by hand" in err and len(err.splitlines()) == 1, err
    for name, rows in SETS.items():
        pq.write_table(rows, folder / f"{name}.parquet")
    assert run(capsys, "deepresearcher", "--output", folder, "--url", "http://127.0.0.1:9/data")[0] == 0


def test_a_file_that_is_none_is_named(capsys, tmp_path):
    for name in SETS:
        (tmp_path / f"{name}.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    code, _, err = run(capsys, "deepresearcher", "--output", tmp_path)
    assert code == 1 and "train.parquet can't be read as parquet" in err


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published sets")
def test_190_published_questions_stand_in_both(capsys, tmp_path):
    for name in ("dev", "test"):
        (tmp_path / f"{name}.parquet").write_bytes((SHARED / f"{name}.parquet").read_bytes())
    pq.write_table(SETS["train"], tmp_path / "train.parquet")
    code, out, _ = run(capsys, "deepresearcher", "--output", tmp_path)
    assert code == 0 and "190 of dev's questions" in out and "published:" not in out
    assert sum(row["also_in_test"] for row in pq.read_table(tmp_path / "dev.parquet")["extra_info"].to_pylist()) == 190
