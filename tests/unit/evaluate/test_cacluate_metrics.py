"""The score command by value, its refusals, and the judge against a real HTTP server on this machine."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.utils.reward_score.judge import Claim, JudgeCache, JudgeConfig, judge, read_verdict

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "evaluate" / "cacluate_metrics.py"
_spec = importlib.util.spec_from_file_location("cacluate_metrics", SCRIPT)
metrics = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(metrics)

ANSWERS = ["the Beatles", "New York New York", None, "USA"]
GOLDS = [["Beatles"], ["New York"], ["Oslo"], ["United States", "USA"]]


@pytest.fixture(autouse=True)
def _no_judge_unless_a_test_sets_one(monkeypatch):
    for name in (
        "JUDGE_MODEL",
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


def make_rows():
    return [
        {
            "idx": i,
            "question": f"question {i}",
            "message_str": "...",
            "ground_truths": golds,
            "data_source": "nq" if i < 3 else "tq",
            "answer": answer,
            "turns": [],
            "finish": "answer" if answer else "max_turns",
        }
        for i, (answer, golds) in enumerate(zip(ANSWERS, GOLDS, strict=True))
    ]


def write_dataset(path, rows, keys=None):
    table = [
        {
            "data_source": row["data_source"],
            "prompt": [{"content": row["question"], "role": "user"}],
            "reward_model": {"ground_truth": "<|answer_split|>".join(row["ground_truths"]), "style": "rule"},
            "extra_info": {"index": keys[i] if keys else row["idx"], "split": "test"},
        }
        for i, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


def run(folder, rows, *options, capsys):
    """Exit status, the scores written (None if there are none) and what was printed."""
    (folder / "no_such_run_result.json").write_text(json.dumps(rows))
    status = metrics.main(
        ["no_such_run", "--folder", str(folder), "--judge-cache", str(folder / "cache.jsonl"), *options]
    )
    target = folder / "no_such_run_score.json"
    printed = capsys.readouterr()
    return status, json.loads(target.read_text()) if target.exists() else None, printed.out + printed.err


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_by_source_and_definition(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "test.parquet", make_rows())
    status, scores, printed = run(tmp_path, make_rows(), "--dataset", dataset, capsys=capsys)
    assert status == 0 and list(scores) == ["nq", "tq", "overall"]
    nq = scores["nq"]
    assert (nq["count"], nq["answered"], nq["judged"]) == (3, 2, 0)
    assert nq["deepresearcher"]["f1"] == pytest.approx((2 / 3 + 1) / 3)
    assert nq["deepresearcher"]["em"] == 0
    assert nq["squad"]["f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert nq["squad"]["em"] == pytest.approx(1 / 3)
    assert nq["squad"]["mbe"] is None and nq["squad"]["mbe_interval"] is None
    assert scores["tq"]["squad"]["f1"] == 1 and scores["tq"]["squad"]["f1_interval"] == [1, 1]
    assert scores["overall"]["count"] == 4 and scores["overall"]["squad"]["em"] == 0.5
    low, high = nq["squad"]["f1_interval"]
    assert 0 <= low < nq["squad"]["f1"] < high <= 1
    assert "MBE: not judged" in printed and "JUDGE_MODEL" in printed and "overall" in printed


def test_the_table_leaves_out_what_is_not_known(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    many = [row | {"idx": i, "data_source": "many"} for i, row in enumerate(make_rows()[:1] * metrics.LEAST)]
    few = [row | {"idx": 100 + i, "data_source": "few"} for i, row in enumerate(make_rows()[:1] * (metrics.LEAST - 1))]
    _, _, printed = run(tmp_path, many + few, capsys=capsys)
    table = printed[: printed.index("MBE")]  # the hint below it
    assert "F1" in table and "–" not in table[table.index("few") : table.index("many")]
    assert table[table.index("many") :].count("–") == 2 * 4  # intervals of this source and of all
    _, _, printed = run(tmp_path, few, capsys=capsys)
    assert "interval" not in printed and "–" not in printed


def test_the_interval_is_the_binomials_and_repeats():
    values = metrics.np.array([1.0] * 40 + [0.0] * 60)
    low, high = metrics._summary("em", values)["em_interval"]
    assert low == pytest.approx(0.304, abs=0.02) and high == pytest.approx(0.496, abs=0.02)  # .4 +- 1.96 * .049
    assert metrics._summary("em", values)["em_interval"] == [low, high]


def test_it_runs_from_another_directory(tmp_path):
    (tmp_path / "no_such_run_result.json").write_text(json.dumps(make_rows()))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JUDGE_MODEL")}
    command = [sys.executable, str(SCRIPT), "no_such_run", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "no_such_run_score.json").is_file()
    assert "No dataset to check against" in done.stdout


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(1), "1 missing (idx 1)"),
        (lambda rows: rows.append({**rows[0], "idx": 7}), "1 not in the dataset (idx 7)"),
        (lambda rows: rows[2].update(question="another"), "1 asking another question (idx 2)"),
        (lambda rows: rows[3].update(ground_truths=["USA"]), "1 with other golds (idx 3)"),
        (lambda rows: rows.append(rows[2]), "idx 2 stands more than once"),
        (lambda rows: rows[1].pop("answer"), "row 1: has no 'answer'"),
        (lambda rows: rows[1].update(answer=5), "row 1: answer is 5"),
        (lambda rows: rows[1].update(ground_truths=[]), "ground_truths is []"),
        (lambda rows: rows.clear(), "holds no list of rows"),
    ],
)
def test_results_that_do_not_match_are_refused(tmp_path, capsys, change, said):
    dataset = write_dataset(tmp_path / "test.parquet", make_rows())
    rows = make_rows()
    change(rows)
    status, scores, printed = run(tmp_path, rows, "--dataset", dataset, capsys=capsys)
    assert status == 1 and scores is None
    assert printed.startswith("error: ") and said in printed and "evaluate.sh" in printed


def test_order_does_not_matter_and_keys_may_be_the_datasets_own(tmp_path, capsys):
    dataset = write_dataset(tmp_path / "test.parquet", make_rows(), keys=["nq_a", "nq_b", "nq_c", "tq_d"])
    assert run(tmp_path, make_rows()[::-1], "--dataset", dataset, capsys=capsys)[0] == 0
    keyed = [{**row, "idx": key} for row, key in zip(make_rows(), ["nq_a", "nq_b", "nq_c", "tq_d"], strict=True)]
    assert run(tmp_path, keyed, "--dataset", dataset, capsys=capsys)[0] == 0
    status, _, printed = run(tmp_path, keyed[:2], "--dataset", dataset, capsys=capsys)
    assert status == 1 and "2 missing (idx nq_c, tq_d)" in printed


def test_a_missing_file_and_broken_json_say_what_to_do(tmp_path, capsys):
    assert metrics.main(["none", "--folder", str(tmp_path)]) == 1
    assert "none_result.json does not exist" in capsys.readouterr().err
    (tmp_path / "no_such_run_result.json").write_text('[{"idx": 1')
    assert metrics.main(["no_such_run", "--folder", str(tmp_path)]) == 1
    assert "can't be read as JSON" in capsys.readouterr().err
    status, _, printed = run(tmp_path, make_rows(), "--dataset", "nowhere.parquet", capsys=capsys)
    assert status == 1 and "nowhere.parquet" in printed


def test_the_dataset_is_found_in_the_runs_own_configuration(tmp_path, capsys, monkeypatch):
    dataset = write_dataset(tmp_path / "test.parquet", make_rows())
    config = tmp_path / "outputs" / "project" / "no_such_run" / "config.yaml"
    config.parent.mkdir(parents=True)
    monkeypatch.setattr(metrics, "ROOT", tmp_path)
    config.write_text(json.dumps({"data": {"val_files": [dataset], "val_max_samples": None}}))
    assert run(tmp_path, make_rows(), capsys=capsys)[0] == 0
    status, _, printed = run(tmp_path, make_rows()[:3], capsys=capsys)
    assert status == 1 and "1 missing (idx 3)" in printed
    config.write_text(json.dumps({"data": {"val_files": [dataset], "val_max_samples": 3}}))
    assert run(tmp_path, make_rows()[:3], capsys=capsys)[0] == 0


# --- the judge -------------------------------------------------------------------------------------------------------

CORRECT, WRONG = "Same band.\nverdict: correct", "Another place.\nverdict: incorrect"


@contextmanager
def judge_server(respond):
    """A server whose ``respond(body, count) -> (status, text, headers)`` sees each request and how often it came."""
    seen, lock = Counter(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            with lock:
                seen[prompt] += 1
            status, text, headers = respond({**body, "prompt": prompt, "path": self.path, **self.headers}, seen[prompt])
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:
                pass  # the client left

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}), {}


def by_answer(body, count):
    return completion(CORRECT if "<answer>\nthe Beatles" in body["prompt"] else WRONG)


def claims(*answers):
    return [Claim("Who?", ("Beatles",), answer) for answer in answers]


def ask(url, tmp_path, items, **limits):
    limits = {
        "concurrency": 4,
        "attempts": 3,
        "max_backoff_s": 0.02,
        "request_timeout_s": 10,
        "deadline_s": 30,
    } | limits
    return asyncio.run(judge(items, JudgeConfig("m", url, **limits), JudgeCache(tmp_path / "cache.jsonl")))


def test_command_with_a_judge(tmp_path, capsys, monkeypatch):
    def respond(body, count):
        assert (
            body["path"] == "/v1/chat/completions" and body["Authorization"] == "Bearer secret" and body["model"] == "m"
        )
        return by_answer(body, count)

    with judge_server(respond) as (url, seen):
        for name, value in {"JUDGE_MODEL": "m", "OPENAI_BASE_URL": url + "/", "OPENAI_API_KEY": "secret"}.items():
            monkeypatch.setenv(name, value)
        status, scores, printed = run(tmp_path, make_rows(), capsys=capsys)
        asked = sum(seen.values())
        again = run(tmp_path, make_rows(), capsys=capsys)[1]
        assert sum(seen.values()) == asked == 3  # the row without an answer is wrong without asking; the rest is kept
    assert status == 0 and again == scores
    assert scores["nq"]["judged"] == 3
    assert scores["nq"]["squad"]["mbe"] == scores["nq"]["deepresearcher"]["mbe"] == pytest.approx(1 / 3)
    assert scores["tq"]["squad"]["mbe"] == 0
    assert "secret" not in printed and "not judged" not in printed and "MBE" in printed


def test_verdicts_keep_their_places(tmp_path):
    answers = [f"answer {i}" for i in range(60)]

    def respond(body, count):
        number = int(body["prompt"].split("<answer>\nanswer ")[1].split()[0])
        time.sleep(0.002 * (number % 5))
        return completion(CORRECT if number % 3 == 0 else WRONG)

    with judge_server(respond) as (url, _):
        result = ask(url, tmp_path, claims(*answers), concurrency=8)
    assert result.verdicts == [i % 3 == 0 for i in range(60)] and not result.failures


def test_passing_failures_are_retried(tmp_path):
    def respond(body, count):
        if count == 1:
            return 500, "<html>oops</html>", {}
        return (429, "slow down", {"Retry-After": "0"}) if count == 2 else completion(CORRECT)

    with judge_server(respond) as (url, seen):
        result = ask(url, tmp_path, claims("x", "y"))
    assert result.verdicts == [True, True] and set(seen.values()) == {3}


def test_an_endpoint_that_is_down_is_given_up(tmp_path):
    with judge_server(lambda body, count: (503, "down", {})) as (url, seen):
        result = ask(url, tmp_path, claims(*map(str, range(100))), concurrency=2)
    assert result.verdicts == [None] * 100 and result.failures.total() == 100
    assert result.failures["HTTP 503 from the judge"] <= 5
    assert sum(seen.values()) <= 5 * 3
    result = ask(url, tmp_path, claims("x"))  # nobody listens any more
    assert result.verdicts == [None] and "no reply from" in next(iter(result.failures))


def test_a_refusal_stops_at_once_with_the_servers_words(tmp_path):
    with judge_server(lambda body, count: (401, "wrong key\nmore", {})) as (url, seen):
        result = ask(url, tmp_path, claims(*map(str, range(50))), concurrency=2)
    assert sum(seen.values()) <= 2 and result.failures.total() == 50
    assert any(reason.startswith("HTTP 401") and reason.endswith("wrong key") for reason in result.failures)
    result = ask("localhost/v1", tmp_path, claims("x"))
    assert "OPENAI_BASE_URL='localhost/v1' is no address" in next(iter(result.failures))


def test_odd_replies_are_asked_again_once_and_then_left(tmp_path):
    def respond(body, count):
        if "<answer>\nhopeless" in body["prompt"]:
            return completion("I would rather not say.")
        if "<answer>\nshapeless" in body["prompt"]:
            return 200, '{"choices": []}', {}
        return completion(CORRECT if "Reply with that last line only" in body["prompt"] else "Hm. Correct? Incorrect?")

    with judge_server(respond) as (url, seen):
        result = ask(url, tmp_path, claims("odd", "hopeless", "shapeless"))
    assert result.verdicts == [True, None, None]
    assert sum(seen.values()) == 6 and result.failures.total() == 2


def test_a_stall_costs_its_timeout_and_the_whole_its_deadline(tmp_path):
    release = threading.Event()

    def respond(body, count):
        if "<answer>\nslow" in body["prompt"]:
            release.wait(20)
        return completion(CORRECT)

    try:
        with judge_server(respond) as (url, _):
            result = ask(url, tmp_path, claims("slow", "fast"), request_timeout_s=0.3, attempts=2)
            assert result.verdicts == [None, True] and result.failures == {"no reply within 0.3 s": 1}
            started = time.monotonic()
            result = ask(url, tmp_path, claims("slow", "slower", "fast"), concurrency=2, deadline_s=0.5)
            assert time.monotonic() - started < 5
            assert result.verdicts == [None, None, True]  # the last one was kept from before
            assert result.failures == {"deadline of 0.5 s": 2}
            release.set()
    finally:
        release.set()


def test_the_cache_survives_a_cut_line_and_knows_the_model(tmp_path):
    path = tmp_path / "deep" / "cache.jsonl"
    JudgeCache(path).put("a", True)
    with path.open("a") as file:
        file.write('{"key": "b", "corr')
    JudgeCache(path).put("c", False)
    cache = JudgeCache(path)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (True, None, False)
    one = claims("x")[0]
    assert len({cache.key(one, "m"), cache.key(one, "n"), cache.key(claims("y")[0], "m")}) == 3


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (CORRECT, True),
        (WRONG, False),
        ("**Verdict:** Incorrect. The correct answer is Paris.", False),
        ('{"rationale": "not incorrect at all", "judgement": "correct"}', True),
        ("<think>verdict: incorrect?</think>verdict: correct", True),
        ("verdict: incorrect ... no, I was wrong.\nVerdict: correct", True),
        ("Correct.", True),
        ("incorrect", False),
        ("Yes.", True),
        ("no", False),
        ("Incorrect. The correct answer is Paris.", None),
        ("It is not correct.", None),
        ("", None),
        ("Paris", None),
    ],
)
def test_reading_a_verdict(reply, verdict):
    assert read_verdict(reply) is verdict


def test_judge_from_the_environment():
    assert JudgeConfig.from_env({"OPENAI_API_KEY": "k"}) is None
    config = JudgeConfig.from_env({"JUDGE_MODEL": "m", "OPENAI_API_KEY": "k"}, deadline_s=5)
    assert (config.base_url, config.api_key, config.deadline_s) == ("https://api.openai.com/v1", "k", 5)
    assert "k'" not in repr(config)
