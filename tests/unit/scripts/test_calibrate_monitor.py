"""Thresholds from a cold policy: which quartile of what, and what is of no use. The run itself on the demo's policy."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from scrl.llm_agent.prompts import render_observation
from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config import load_config
from verl.utils.behavior_monitor import THRESHOLDS

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("calibrate_monitor", ROOT / "scripts" / "calibrate_monitor.py")
calibrate = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = calibrate
spec.loader.exec_module(calibrate)


def episode(uid, searches, finish="answer"):
    call = ToolCall("web_search", {"query": ["a b"]})
    found = render_observation(["a b"], [[{"title": "", "text": "new"}]])
    turns = [Turn("tool_call", tool_call=call, queries=["a b"], observation=found) for _ in range(searches)]
    turns.append(Turn("answer", answer="x") if finish == "answer" else Turn("malformed"))
    return Episode(uid, 0, 0, "q", ["x"], "demo", [1], turns=turns, finish=finish)


def test_values_are_of_episodes_or_of_groups_and_failed_ones_count_nowhere():
    episodes = [episode("a", 0), episode("a", 2, "malformed"), episode("b", 2), episode("b", 1, "error")]
    values = calibrate.cold_values(episodes, [0.0, 1.0, 0.5, 9.0])
    assert values["min_depth"] == [0, 2, 2]
    assert values["min_diversity"] == [0, 0]  # only where there are two queries
    assert values["min_info_gain"] == [0.5, 0.5]
    assert values["max_malformed_share"] == [0.5, 0.0]  # of each group
    assert values["min_reward_deviation"] == [pytest.approx(0.5**0.5)]
    assert set(THRESHOLDS) - set(values) == {"max_zero_variance_share", "max_llds", "max_rollout_gap"}


@pytest.mark.parametrize(
    ("key", "values", "bound", "why"),
    [
        ("min_depth", list(range(9)), 2.0, ""),  # the lower quartile
        ("max_repeated_ngrams", [k / 10 for k in range(9)], 0.6, ""),  # the upper one
        ("min_depth", [0.0] * 3 + [1.0] * 6, None, "a quarter is at 0"),
        ("max_malformed_share", [0.0] * 8 + [1.0], None, "the worst is at 1"),
        ("max_malformed_share", [0.0] * 8 + [0.5], 0.5, "the worst value: three quarters are at the best"),
        ("max_malformed_share", [0.0] * 9, None, "all are at the best"),
        ("max_repeated_ngrams", [0.00001] * 9, None, "all are at the best"),  # it would be written as 0
        ("min_depth", [0.0] * 9, None, "a quarter is at 0"),
        ("min_diversity", [0.25] + [1.0] * 8, 0.25, "the worst value: three quarters are at the best"),
        ("min_diversity", [0.0] + [1.0] * 8, None, "the worst is at 0"),
        ("max_malformed_share", [1.0] * 9, None, "a quarter is at 1"),
        ("min_depth", [1.0] * 7, None, "only 7 values"),
    ],
)
def test_the_quartile_on_the_bad_side(key, values, bound, why):
    found, said = calibrate.threshold(key, values)
    assert found == (bound if bound is None else pytest.approx(bound)) and said.startswith(why)


def test_a_file_of_thresholds_is_taken_and_the_command_line_stands_over_it(tmp_path, monkeypatch):
    (tmp_path / "cold.yaml").write_text(yaml.safe_dump({"monitor": {"min_depth": 1.5, "min_diversity": 0.4}}))
    monkeypatch.chdir(tmp_path)
    monitor = load_config(["monitor.thresholds_file=cold.yaml", "monitor.min_diversity=0.2"]).monitor
    assert (monitor.min_depth, monitor.min_diversity, monitor.max_malformed_share) == (1.5, 0.2, None)
    assert monitor.thresholds_file == str(tmp_path / "cold.yaml")


@pytest.mark.parametrize("text", [None, "", "monitor: 3", "monitor: {min_depth: deep}", "- 1", "a: {b"])
def test_a_file_that_holds_none_is_one_sentence(tmp_path, text):
    path = tmp_path / "cold.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"thresholds_file=.*cold.yaml can't be read .* scripts/calibrate_monitor.py"):
        load_config([f"monitor.thresholds_file={path}"])


def test_a_threshold_that_does_not_exist_is_named(tmp_path):
    path = tmp_path / "cold.yaml"
    path.write_text("monitor: {min_deth: 1}")
    with pytest.raises(ValueError, match="monitor.min_deth; did you mean monitor.min_depth"):
        load_config([f"monitor.thresholds_file={path}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile=cpu_demo", "--episodes=0"], "--episodes=0 plays none"),
        (["profile=cpu_demo", "data.train_files=[nowhere.parquet]"], "nowhere.parquet is not there"),
        (["profile=cpu_demo", "--episodes=8", "--timeout-s=0.01"], "of 8 episodes were done after 0.01 s; raise"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message, capsys):
    assert calibrate.main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if "calibrate_monitor: " in line]) == 1 and message in errors[-1]


def test_the_demos_cold_policy_gives_a_file_that_a_run_takes(tmp_path, capsys):
    path = tmp_path / "cold.yaml"
    assert calibrate.main(["profile=cpu_demo", "--episodes=64", f"--output={path}"]) == 0
    printed = capsys.readouterr().out
    held = yaml.safe_load(path.read_text())["monitor"]
    assert all(0 < value for value in held.values()) and set(held) <= set(THRESHOLDS)
    assert all(f"monitor.{key}={value:g}" in printed for key, value in held.items())
    assert f"monitor.thresholds_file={path}" in printed.replace("\n", "")
    monitor = load_config(["profile=cpu_demo", f"monitor.thresholds_file={path}"]).monitor
    assert {key: getattr(monitor, key) for key in held} == held


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert calibrate.main(["--output", str(tmp_path / "file" / "x.yaml"), "profile=cpu_demo"]) == 2
    assert "x.yaml can't be written (" in capsys.readouterr().err
