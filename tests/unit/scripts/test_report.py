"""scripts/report.py: what is in the page, under every state that a run's files can be in. How it looks and answers is
tests/e2e/test_report_browser.py."""

import base64
import gzip
import hashlib
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from verl.utils.report.build import LEVELS, PAGE, choose, config_differences, cut_observation, evenly
from verl.utils.report.rollouts import RolloutFile, hits, read_rollout
from verl.utils.report.source import open_runs

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("report", ROOT / "scripts" / "report.py")
assert spec and spec.loader
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)


def make(*args: object) -> str:
    assert report.main([str(arg) for arg in args]) == 0
    return (Path(str(args[0])) / "report.html").read_text(encoding="utf-8")


def blocks(page: str) -> list[Any]:
    found = re.findall(r'<script type="text/plain" id="block-\d+">([^<]*)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in found]


# ------------------------------------------------------------------------------------------------------ what is in it
def test_page_holds_curves_episodes_and_what_each_turn_earned(write_run):
    overview, *bodies = blocks(make(write_run()))
    (run,) = overview["runs"]
    assert (run["name"], run["steps"]) == ("demo", [1, 2, 3])
    assert run["columns"]["val/f1/mean"] == [None, 0.5, None]
    assert run["columns"]["extra/unknown"] == [1, 2, 3]
    assert run["phases"]["seconds"]["generation and search"] == [3, 3, 3]
    assert run["phases"]["seconds"]["other"] == [1, 1, 1]
    assert "max_turns: 4" in run["config"]
    episodes = overview["episodes"]
    assert overview["blockSizes"] == [8, 8, 2, 8] == [len(body) for body in bodies]
    assert [episodes["split"][n] for n in (0, 8, 16, 18)] == [0, 0, 1, 0]  # training before validation
    assert [episodes["step"][n] for n in (0, 8, 16, 18)] == [1, 2, 2, 3]
    assert episodes["score"][:4] == [-0.25, 0.75, -0.25, 0.75]
    assert [overview["sources"][n] for n in episodes["source"][:8:4]] == ["two_hop", "one_hop"]
    assert overview["questions"][episodes["question"][4]] == {"text": "Who is mayor number 1?", "golds": ["Ann"]}
    assert len({*episodes["group"]}) == 3 * 2 + 2
    search, end = bodies[0][1]["turns"]
    assert (search["parts"], search["reward"], search["advantage"], search["phi"]) == (
        {"pbrs": 0.5},
        0.5,
        1.0,
        [0, 0.5],
    )
    assert end["parts"] == {"outcome": 1.0, "pbrs": -0.5, "repetition": -0.25}
    assert (end["reward"], end["advantage"], end["phi"]) == (0.25, -1.0, [0.5, 0.5])
    assert end["tokens"]["trainer"] == "-1.0000 -0.2500"
    assert (overview["notes"], overview["problems"]) == ([], [])


def test_alerts_name_their_episodes_once(write_run):
    folder = write_run()
    file = folder / "behavior_alerts.jsonl"
    file.write_text(file.read_text() * 2 + '{"step": 3, "metric": "m"}\nno alert\n')  # step 2 was done again
    overview, *_ = blocks(make(folder))
    first, second = overview["alerts"]
    (number,) = first["episodes"]  # the other is in no file
    at = {name: column[number] for name, column in overview["episodes"].items()}
    assert (at["step"], at["sample"], overview["questions"][at["question"]]["text"]) == (2, 0, "Who is mayor number 1?")
    assert (first["value"], first["threshold"], second["value"], second["episodes"]) == (0.5, 0.6, None, [])
    assert overview["problems"] == ["demo: 1 lines of behavior_alerts.jsonl were left out, they are no alerts"]


def test_several_runs_are_named_apart_and_differ_where_they_do(write_run):
    folders = [write_run("a/same"), write_run("b/same", steps=2), write_run("other")]
    overview, *_ = blocks(make(*folders))
    assert [run["name"] for run in overview["runs"]] == ["a/same", "b/same", "other"]
    assert overview["configDiff"] == [["trainer.experiment_name", ["a/same", "b/same", "other"]]]
    assert overview["episodes"]["run"].count(1) == 2 * 8 + 2
    runs = open_runs([folders[0], folders[0], folders[2]])
    assert [run.name for run in runs] == ["same", "other"]  # named twice is one
    runs[0].config = "max_turns: [1"
    assert config_differences(runs) == []  # one that can be read has nothing to differ from


def test_it_is_one_file_whose_policy_allows_its_own_scripts_only(write_run):
    page = make(write_run())
    code = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in code}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert len(code) == 2 and hashes == set(re.findall(r"'sha256-[^']*'", policy))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.partition("style-src")[0]
    html = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|<link(?! rel=\"icon\" href=\"data:)|\bsrc=", html)


def test_page_code_never_makes_markup_of_text():
    for file in sorted((PAGE / "app").glob("*.js")):
        code = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", code), (
            file.name
        )


def test_vendored_charts_are_those_of_their_release():
    name = "echarts.common.min.js"
    digest = hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest()
    assert digest in (PAGE / "vendor" / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ hostile, broken, old
def test_hostile_texts_stay_inside_their_block(write_run):
    nasty = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\ud800\u2028"
    row = json.loads(json.dumps({"question": nasty, "ground_truths": [nasty], "data_source": nasty, "answer": nasty}))
    row["turns"] = [{"kind": nasty, "think": nasty, "queries": [nasty], "observation": nasty, "tokens": {"ids": nasty}}]
    page = make(write_run("<b>run", rows={1: [row]}))
    assert "alert(" not in page and "<b>run" not in page
    assert page.count("<script") == 2 + 1 + 4
    overview, body, *_ = blocks(page)
    assert overview["questions"][0]["text"] == nasty.replace("\ud800", "?")  # a lone surrogate has no UTF-8
    assert body[0]["turns"][0]["tokens"]["ids"].startswith("</script>")


ODD = [None, 7, "text", [], {}, [1], {"turns": 3, "reward": [], "question": 5, "ground_truths": "Ann", "uid": None}]


def test_rows_of_any_shape_are_read_or_counted(tmp_path):
    turns = [None, {"queries": "q", "tool_call": {"arguments": {"query": 3}}, "search_ok": None, "tokens": 4}]
    more = {
        "filtered": True,
        "turns": turns,
        "advantage": ["x", 2],
        "reward": {"phi": [0, None], "f1": float("nan"), "by_turn": [1]},
    }
    file = tmp_path / "rollout_step_1.json"
    file.write_text(json.dumps([*ODD, more]))
    episodes, problems = read_rollout(RolloutFile(1, "train", file))
    assert problems == ["rollout_step_1.json: 5 of 8 rows were left out, they are no episodes"]
    assert [(e.question, e.golds, e.f1) for e in episodes] == [("", [], None), ("5", ["Ann"], None), ("", [], None)]
    assert [one.filtered for one in episodes] == [False, False, True]
    (turn,) = episodes[2].turns
    assert (turn.asked, turn.ok, turn.tokens, turn.advantage, turn.phi, turn.parts) == ([], True, None, None, None, {})


@pytest.mark.parametrize(
    "content, said",
    [
        ('[{"question": "half', "was left out: "),
        ('{"question": "?"}', "it holds dict, not a list of episodes"),
        ("", "was left out: "),
        ("[" * 100_000, "was left out: "),
        ("[3, 4]", "2 of 2 rows were left out, they are no episodes"),
    ],
)
def test_a_broken_file_is_named_and_the_others_are_shown(write_run, capsys, content, said):
    folder = write_run()
    (folder / "rollout" / "rollout_step_2.json").write_text(content)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 4, "critic/score/mean": 0.5}\n{"step": 5, "crit')
    overview, *bodies = blocks(make(folder))
    assert overview["blockSizes"] == [8, 2, 8]
    assert overview["runs"][0]["steps"] == [1, 2, 3, 4]  # the last line is still being written
    line, file_problem = overview["problems"]
    assert line == "demo: metrics.jsonl, line 4 is no metrics object with a step ('not json')"
    assert file_problem.startswith("demo: rollout_step_2.json") and said in file_problem
    assert said in capsys.readouterr().err


def test_files_of_older_versions_open(write_run):
    row = {"question": "?", "answer": "x", "finish": "answer", "turns": [{"kind": "tool_call"}, {"kind": "answer"}]}
    row["reward"] = {"outcome": 0.5, "early_stop": -0.5, "score": 0.0, "phi": [0, 1, 1]}
    overview, (episode,), *_ = blocks(make(write_run(rows={1: [row]})))
    first, last = episode["turns"]
    assert "parts" not in first and last["parts"] == {"outcome": 0.5, "early_stop": -0.5}
    assert first["phi"] == [0, 1] and "tokens" not in first and "reward" not in first
    assert overview["episodes"]["depth"][0] == 1


@pytest.mark.parametrize(
    ("named", "charts", "parts"),
    [
        (
            {"custom/right": 0.5, "custom/short": -0.25},
            ["custom/right", "custom/short"],
            {"custom/right", "custom/short"},
        ),
        ({}, ["custom"], {"custom"}),
    ],
)
def test_a_reward_function_of_the_users_own_stands_by_its_names(write_run, named, charts, parts):
    turns = [{"kind": "tool_call"}, {"kind": "answer"}]
    by_turn = [{}, {"outcome": 0.25, "early_stop": -0.5}]
    reward = {"outcome": 0.25, "early_stop": -0.5, "score": -0.25, "custom_failed": 0.0, "by_turn": by_turn} | named
    folder = write_run(rows={1: [{"question": "?", "turns": turns, "reward": reward}]})
    logged = {"reward/outcome": 0.25, "reward/custom_failed": 0.0} | {f"reward/{name}": v for name, v in named.items()}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **logged}) + "\n")
    overview, (episode,), *_ = blocks(make(folder))
    assert [panel["title"] for panel in overview["panels"]][: 3 + len(charts)] == [
        *("Score", "F1", *charts, "Searches an episode")
    ]
    assert all(panel["metric"] in overview["runs"][0]["columns"] for panel in overview["panels"][2 : 2 + len(charts)])
    last = episode["turns"][1]["parts"]
    assert last.keys() == parts | {"early_stop"} and sum(last.values()) == -0.25
    assert episode["reward"] == {"early_stop": -0.5, "score": -0.25} | {name: last[name] for name in parts}


def test_a_rollout_of_its_own_is_neither_training_nor_validation(write_run):
    folder = write_run()
    (folder / "rollout" / "val_step_2.json").rename(folder / "rollout" / "rollout_step_0.json")
    overview, *_ = blocks(make(folder))
    assert overview["episodes"]["split"][:3] == [2, 2, 0]


def test_metrics_alone_or_episodes_alone_are_a_run(write_run):
    folder = write_run()
    (folder / "metrics.jsonl").unlink()
    overview, *bodies = blocks(make(folder))
    assert (overview["runs"][0]["steps"], len(bodies)) == ([], 4)
    assert overview["problems"] == ["demo: no curves, metrics.jsonl can't be read (No such file or directory)"]
    other = write_run("curves")
    for file in (other / "rollout").iterdir():
        file.unlink()
    overview, *bodies = blocks(make(other))
    assert (overview["runs"][0]["steps"], overview["blockSizes"], bodies) == ([1, 2, 3], [], [])


def test_a_missing_run_is_one_sentence(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "nowhere", "is not there"), (tmp_path / "empty", "holds no run")):
        assert report.main([str(path)]) == 1
        out, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1 and not out
    assert list(tmp_path.glob("**/*.html")) == []


def test_an_unwritable_place_is_one_sentence(write_run, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert report.main([str(write_run()), "--out", str(tmp_path / "file" / "r.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------- its size
def test_what_does_not_fit_is_left_out_and_told(write_run, capsys):
    dice = random.Random(0)
    steps, size = 12, 64
    rows = {
        step: [
            {"question": "?", "turns": [{"kind": "tool_call", "observation": dice.randbytes(600).hex()}]}
            for _ in range(size)
        ]
        for step in range(1, steps + 1)
    }
    folder = write_run(steps=steps, rows=rows)
    page = make(folder)
    whole = sum(len(text) for text in re.findall(r'id="block-\d+">([^<]*)<', page))
    for share, told in ((0.6, "results are cut at"), (0.1, "of their 780 episodes")):
        limit = (len(page) - (1 - share) * whole) / 1e6
        smaller = make(folder, "--max-mb", limit)
        overview, *bodies = blocks(smaller)
        assert len(smaller) <= limit * 1e6
        assert any(told in note for note in overview["notes"]) and told in capsys.readouterr().out
        assert overview["blockSizes"] == [len(body) for body in bodies]
    assert report.main([str(folder), "--max-mb", "0.5"]) == 1
    assert "allow more with --max-mb" in capsys.readouterr().err


def test_levels_go_from_all_to_little_without_turning_back():
    def keeps(trim):
        return [float("inf") if value is None else value for value in vars(trim).values()]

    for softer, harder in zip(LEVELS[:-1], LEVELS[1:], strict=True):
        assert all(less <= more for less, more in zip(keeps(harder), keeps(softer), strict=True))


def test_samples_are_spread_and_groups_stay_whole():
    assert evenly(10, 3) == [0, 4, 9]
    assert (evenly(3, 9), evenly(3, None), evenly(5, 0)) == ([0, 1, 2], [0, 1, 2], [])
    assert choose(range(8), 4, "train") == range(4)
    assert choose(range(8), 4, "val") == [0, 2, 5, 7]


def test_results_are_cut_text_by_text():
    observation = json.dumps([{"query": "q", "results": [{"title": "T", "text": "abcdef" * 4}, {"text": "short"}]}])
    assert cut_observation(observation, None) == observation
    (query, (first, second)) = hits(cut_observation(observation, 10))[0]
    assert (query, first.title, first.text, second.text) == ("q", "T", "abcdefabcd […]", "short")
    assert cut_observation("x" * 100, 10) == "x" * 40 + " […]"
