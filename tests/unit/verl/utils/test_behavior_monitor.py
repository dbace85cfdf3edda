import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time

import pytest

from scrl.llm_agent.prompts import render_error, render_observation
from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config.schema import MonitorConfig
from verl.utils import behavior_monitor
from verl.utils.behavior_monitor import (
    THRESHOLDS,
    BehaviorMonitor,
    answer_avoided,
    figures,
    group_deviations,
    observation_gains,
    query_diversity,
    repeated_ngrams,
    reward_spread,
    tokens,
)


def search(*queries, text="", ok=True):
    """A tool turn as the episode loop records it."""
    hits = [[{"title": "", "text": text}] if text else [] for _ in queries]
    return Turn(
        kind="tool_call",
        text=f"<think>x</think><tool_call>{list(queries)}</tool_call>",
        tool_call=ToolCall("web_search", {"query": list(queries)}),
        queries=list(queries),
        observation=render_observation(list(queries), hits) if ok else render_error("no backend answered"),
        search_ok=ok,
    )


def answer(text="Paris"):
    return Turn(kind="answer", text=f"<think>x</think><answer>{text}</answer>", answer=text)


def episode(*turns, finish="answer", uid="q", sample_index=0, question="Who directed Halo?"):
    return Episode(
        uid=uid,
        sample_index=sample_index,
        index=0,
        question=question,
        ground_truths=["Paris"],
        data_source="demo",
        prompt_ids=[],
        turns=list(turns),
        finish=finish,
    )


def info_gain(recorded):
    return figures(recorded)["info_gain"]


def void_turn_share(recorded):
    return figures(recorded)["void_turn_share"]


# ------------------------------------------------------------------------------------------------------------- figures
def test_tokens_fold_case_and_width_and_split_chinese_by_character():
    assert tokens("The U.S. in 1,234 — Ｈａｌｏ") == ["the", "u", "s", "in", "1", "234", "halo"]
    assert tokens("北京 2008奥运") == ["北", "京", "2008", "奥", "运"]
    assert tokens("snake_case") == tokens("snake_case é")[:2] == ["snake", "case"]
    assert tokens("!?") == []


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        ([], None),
        (["who directed Halo"], None),  # once counted as 1.0
        (["Halo", "halo"], 0.0),  # once diverse for being short
        (["a b c d", "d c b a"], 0.0),
        (["a b", "c d"], 1.0),
        (["a b c", "b c d"], 0.5),
        (["a b", "a b", "c d"], 2 / 3),
        (["!", "?"], 0.0),
        (["!", "a"], 1.0),
        (["北京 奥运", "北京 导演"], 1 - 2 / 6),
    ],
)
def test_query_diversity(queries, expected):
    assert query_diversity(queries) == (expected if expected is None else pytest.approx(expected))


def test_gain_is_the_share_of_new_tokens_against_question_and_earlier_observations():
    gains = observation_gains(
        "Who directed Halo?", ["halo directed by Ann Lee", "Ann Lee Ann Lee born 1970", "Ann", ""]
    )
    assert gains == pytest.approx([3 / 5, 2 / 4, 0, 0])


def test_info_gain_looks_at_results_not_at_json_or_the_policys_own_query():
    assert info_gain(episode(answer())) is None
    assert info_gain(episode(search("something new entirely"))) == 0  # no result: nothing learnt
    assert info_gain(episode(search("x", ok=False))) == 0  # an error message is no information
    assert info_gain(episode(search("x", text="halo by Ann Lee"), search("y", text="Ann Lee"))) == (3 / 4 + 0) / 2
    foreign = search("x")
    foreign.observation = "[[[ not our JSON"
    assert info_gain(episode(foreign)) == 1.0


def test_void_turns_are_those_that_lead_nowhere():
    new, same, failed = search("x", text="Ann Lee"), search("y", text="ann lee"), search("z", ok=False)
    bad = Turn(kind="malformed", text="<think>")
    assert void_turn_share(episode(new, answer())) == 0
    assert void_turn_share(episode(new, same, failed, bad, finish="malformed")) == 3 / 4
    assert void_turn_share(episode(finish="length")) is None


def test_answer_avoidance_is_neither_an_answer_nor_a_broken_format():
    assert answer_avoided(episode(search("x"), answer())) == 0
    assert answer_avoided(episode(search("x"), answer(" \n"))) == 1
    assert answer_avoided(episode(search("x"), finish="max_turns")) == 1
    assert answer_avoided(episode(search("x"), finish="length")) == 1
    assert answer_avoided(episode(Turn(kind="malformed"), finish="malformed")) == 0


def test_repeated_ngrams():
    assert repeated_ngrams(episode(Turn(kind="malformed", text="a b c"))) is None
    assert repeated_ngrams(episode(Turn(kind="malformed", text="a b c d e f"))) == 0
    assert repeated_ngrams(episode(Turn(kind="malformed", text="la " * 23))) == pytest.approx(19 / 20)
    twice = episode(Turn(kind="tool_call", think="a b c d e"), Turn(kind="malformed", text="a b c d x"))
    assert repeated_ngrams(twice) == 1 / 4  # n-grams don't run across turns
    call, same = search("who wrote the book", text="x"), search("who wrote the book", text="x")
    assert repeated_ngrams(episode(call, same, answer())) == 1 / 2  # the query again, not the JSON around it


def test_reward_spread_by_group():
    deviations = group_deviations(["a", "b", "a", "b", "b", "c"], [1.0, 0.7, 0.0, 0.7, 0.7 + 1e-7, 5.0])
    assert deviations == {"a": pytest.approx(statistics.stdev([1, 0])), "b": 0.0}
    assert reward_spread(deviations) == {
        "reward_deviation": pytest.approx(statistics.stdev([1, 0]) / 2),
        "zero_variance_share": 0.5,
    }
    assert reward_spread(group_deviations(["a", "b"], [0.0, 1.0])) == {}


# ------------------------------------------------------------------------------------------------------------- monitor
def batch():
    same = [search("halo", text="Ann"), search("Halo", text="Lee"), answer()]
    wide = [search("halo director", "ann lee", text="Ann"), answer()]
    return [
        episode(*same, uid="a", sample_index=0),
        episode(answer(), uid="a", sample_index=1),
        episode(*wide, uid="b", sample_index=0),
        episode(Turn(kind="malformed"), uid="b", sample_index=1, finish="malformed"),
        episode(uid="b", sample_index=2, finish="error"),
    ]


def test_observe_gives_the_means_over_the_episodes_that_have_a_value(tmp_path):
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=0.15), tmp_path / "run" / "alerts.jsonl")
    metrics = monitor.observe(1, batch(), [1.0, 0.0, 0.5, 0.5, 9.0])
    assert metrics == pytest.approx(
        {
            "behavior/error_share": 1 / 5,
            "behavior/search_depth": 3 / 4,
            "behavior/query_diversity": 0.5,
            "behavior/query_diversity_defined": 1 / 2,
            "behavior/info_gain": 1.0,
            "behavior/malformed_share": 1 / 4,
            "behavior/void_turn_share": 1 / 4,
            "behavior/answer_avoidance_share": 0.0,
            "behavior/reward_deviation": statistics.stdev([1, 0]) / 2,
            "behavior/zero_variance_share": 0.5,
            "alerts/query_diversity": 0.0,
            "alerts/total": 0.0,
        }
    )
    assert monitor.alerts == []
    assert monitor.complaint == ""
    assert not (tmp_path / "run").exists()


def test_an_alert_names_the_episodes_that_show_it_and_is_appended(tmp_path):
    path = tmp_path / "run" / "behavior_alerts.jsonl"
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=0.6, min_depth=1.0), path)
    metrics = monitor.observe(7, batch(), [0.0] * 5)
    assert (metrics["alerts/query_diversity"], metrics["alerts/search_depth"], metrics["alerts/total"]) == (1, 1, 2)
    assert monitor.complaint.startswith(
        "step 7: query_diversity is 0.500, below 0.6 (1 of 2 episodes); step 7: search_"
    )
    monitor.observe(8, batch(), [0.0] * 5)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["metric"]) for row in rows] == [
        (7, "behavior/query_diversity"),
        (7, "behavior/search_depth"),
        (8, "behavior/query_diversity"),
        (8, "behavior/search_depth"),
    ]
    assert rows[0]["value"] == 0.5
    assert rows[0]["threshold"] == 0.6
    assert rows[0]["episodes"] == [{"uid": "a", "sample_index": 0, "value": 0.0}]
    shallow = [{"uid": "a", "sample_index": 1, "value": 0.0}, {"uid": "b", "sample_index": 1, "value": 0.0}]
    assert rows[1]["episodes"] == shallow  # not the failed one


def test_alerts_of_steps_that_run_again_are_forgotten_and_an_old_runs_put_aside(tmp_path):
    path = tmp_path / "behavior_alerts.jsonl"
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=None, min_depth=9.0), path)
    monitor.resume(0)
    for step in (1, 2, 3, 4):
        monitor.observe(step, batch(), [0.0] * 5)
    with path.open("a") as file:
        file.write('{"step": 5, "metr')  # killed while it wrote
    again = BehaviorMonitor(MonitorConfig(min_diversity=None, min_depth=9.0), path)
    again.resume(2)
    again.observe(3, batch(), [0.0] * 5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    again.resume(0)
    assert not path.exists() and len((tmp_path / "behavior_alerts.1.jsonl").read_text().splitlines()) == 3


def test_the_complaint_is_of_the_last_step_only():
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=None, min_depth=0.5))
    monitor.observe(1, [episode(answer())], [0.0])
    assert monitor.complaint == "step 1: search_depth is 0.000, below 0.5 (1 of 1 episodes)"
    monitor.observe(2, [episode(search("x"), answer())], [0.0])
    assert monitor.complaint == ""


def test_every_threshold_watches_its_figure_from_its_side():
    """All at once on a batch that breaks each of them, with the episodes that show it."""
    same = [search("a b c d"), search("a b c d"), Turn(kind="malformed", text="x")]
    bad = [episode(*same, uid="a", sample_index=i, finish="malformed") for i in range(2)]
    avoids = [episode(search("a b c d"), uid="b", sample_index=i, finish="length") for i in range(2)]
    bounds = {key: 0.1 if key.startswith("min_") else 0.2 for key in THRESHOLDS}
    bounds |= {"min_depth": 3.0, "max_llds": 0.05, "max_rollout_gap": 0.01}
    monitor = BehaviorMonitor(MonitorConfig(**bounds))
    measured = {"actor/llds": 0.07, "training/rollout_probs_diff_mean": 0.02}
    metrics = monitor.observe(4, bad + avoids, [0.5] * 4, measured, [0.0, 0.05, 0.03, math.nan])
    alerts = {alert.metric: alert for alert in monitor.alerts}
    assert set(alerts) == set(THRESHOLDS.values()) and metrics["alerts/total"] == len(THRESHOLDS)
    named = {m: [(e["uid"], e["sample_index"]) for e in alert.episodes] for m, alert in alerts.items()}
    everyone = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert named == {
        "behavior/query_diversity": everyone[:2],
        "behavior/search_depth": [("b", 0), ("b", 1), ("a", 0), ("a", 1)],
        "behavior/info_gain": everyone,
        "behavior/reward_deviation": everyone,
        "behavior/zero_variance_share": everyone,
        "behavior/malformed_share": everyone[:2],
        "behavior/void_turn_share": everyone,
        "behavior/answer_avoidance_share": everyone[2:],
        "behavior/repeated_ngrams": everyone[:2],
        "actor/llds": [],
        "training/rollout_probs_diff_mean": [("a", 1), ("b", 0)],
    }
    assert alerts["actor/llds"].message == "step 4: llds is 0.070, above 0.05"
    assert "rollout_probs_diff_mean is 0.020, above 0.01 (2 of 4 episodes)" in monitor.complaint


def test_a_figure_that_is_no_number_is_out_of_range_and_written_as_null(tmp_path):
    path = tmp_path / "alerts.jsonl"
    monitor = BehaviorMonitor(MonitorConfig(max_llds=0.5), path)
    monitor.observe(1, batch(), [0.0] * 5, {"actor/llds": math.nan})
    assert json.loads(path.read_text())["value"] is None
    monitor.observe(2, batch(), [0.0] * 5)  # not measured at this step
    assert monitor.alerts == []


def test_an_undefined_figure_raises_no_alert_and_disabling_stops_alerts():
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=0.9))
    assert "behavior/query_diversity" not in monitor.observe(1, [episode(answer())], [0.0])
    assert monitor.alerts == []
    off = BehaviorMonitor(MonitorConfig(enable=False, min_depth=5.0))
    assert off.observe(1, [episode(answer())], [0.0])["behavior/search_depth"] == 0
    assert off.alerts == []
    unwatched = BehaviorMonitor(MonitorConfig(min_diversity=None)).observe(1, [episode(answer())], [0.0])
    assert not any(name.startswith("alerts/") for name in unwatched)


def test_many_episodes_are_counted_and_the_worst_named():
    monitor = BehaviorMonitor(MonitorConfig(min_diversity=None, min_depth=3.0))
    episodes = [episode(*[search("x")] * (i % 3), answer(), uid=f"{i:03d}") for i in range(120)]
    monitor.observe(1, episodes, [0.0] * 120)
    (alert,) = monitor.alerts
    assert (alert.n_episodes, len(alert.episodes)) == (120, 50)
    assert [shown["value"] for shown in alert.episodes] == [0.0] * 40 + [1.0] * 10


def test_only_failed_or_no_episodes():
    monitor = BehaviorMonitor(MonitorConfig())
    assert monitor.observe(1, [episode(finish="error")], [0.0]) == {"behavior/error_share": 1.0, "alerts/total": 0.0}
    assert monitor.observe(2, [], []) == {}
    with pytest.raises(ValueError, match="2 rewards for 1 episodes"):
        monitor.observe(3, [episode()], [0.0, 1.0])


def test_of_a_large_batch_only_a_sample_is_read(monkeypatch):
    """Depth and diversity are of all episodes, texts of 512 spread evenly: the time of a step doesn't grow with it."""
    read = []
    plain = behavior_monitor.observation_text
    monkeypatch.setattr(behavior_monitor, "observation_text", lambda turn: read.append(turn) or plain(turn))
    episodes = [
        episode(
            *[search("x", text="Ann") for _ in range(2 * (i >= 2048))], answer(), uid=str(i // 8), sample_index=i % 8
        )
        for i in range(4096)
    ]
    metrics = BehaviorMonitor(MonitorConfig()).observe(1, episodes, [0.0] * 4096)
    assert metrics["behavior/search_depth"] == 1 and metrics["behavior/info_gain"] == 0.5
    assert len(read) == 512  # half of 512 episodes have two observations
    read.clear()
    BehaviorMonitor(MonitorConfig()).observe(1, episodes[2048:2560], [0.0] * 512)
    assert len(read) == 1024  # up to 512 episodes every text is read


def test_diversity_is_the_mean_over_all_pairs():
    """Against the sum over pairs as it is written, on queries that share much, little or nothing."""
    rng = random.Random(1)
    for _ in range(300):
        queries = [" ".join(rng.choices("abcdef", k=rng.randint(0, 4))) for _ in range(rng.randint(2, 8))]
        sets = [set(query.split()) for query in queries]
        pairs = [1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in itertools.combinations(sets, 2)]
        assert query_diversity(queries) == pytest.approx(statistics.fmean(pairs))


def test_hostile_text_takes_linear_time():
    start = time.process_time()
    for text in ("_" * 200_000, "\u0301" * 200_000, "é_" * 100_000, "北" * 200_000):
        tokens(text)
    nested = search("x")
    nested.observation = "[" * 100_000
    info_gain(episode(nested))
    assert time.process_time() - start < 5.0


def test_imports_without_torch_or_ray():
    code = (
        "import sys, verl.utils.behavior_monitor, verl.trainer.ppo.curriculum_scheduler; "
        "print(sorted({'torch', 'ray', 'vllm', 'hydra', 'omegaconf', 'fastapi'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
