"""The overhead bench in small: a whole step is measured, every part once, and calls grow with the episodes alone."""

import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "bench" / "overhead.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_overhead", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_overhead"] = module
    spec.loader.exec_module(module)
    return module


def test_a_parts_time_is_without_that_of_the_parts_inside(bench):
    clock = bench.Clock()
    with clock("outer"):
        with clock("inner"):
            time.sleep(0.05)
        with clock("inner"):
            time.sleep(0.05)
    (_, outer), (_, inner) = clock.seconds["outer"], clock.seconds["inner"]
    assert inner >= 0.1 and outer < 0.05


def test_growth_is_the_exponent(bench):
    rows = [{"episodes": n, "parts": {"a": (n * 1e-3, 0.0), "b": (n**2 * 1e-3, 0.0)}} for n in (8, 64, 512)]
    assert bench.growth(rows, "a") == pytest.approx([1.0, 1.0])
    assert bench.growth(rows, "b") == pytest.approx([2.0, 2.0])


def test_a_step_is_measured_whole(bench, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert bench.main(["--episodes", "32", "8", "--turns", "2", "--repeats", "1", "--json", str(figures)]) == 0
    small, large = json.loads(figures.read_text())["sizes"]
    expected = {*bench.PARTS.values(), "monitor", "curriculum", "tracker"}
    assert set(small["parts"]) == set(large["parts"]) == expected
    assert large["tokens"] == pytest.approx(4 * small["tokens"], rel=0.15)
    assert large["rollout_file_mb"] == pytest.approx(4 * small["rollout_file_mb"], rel=0.15)
    assert all(cpu >= 0 and wall > 0 for cpu, wall in large["parts"].values())
    assert "rollout rows" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 3])
def test_work_is_linear_by_calls(bench, tmp_path, ranks):
    """Python calls of a step at 16, 32 and 64 episodes: what is beyond a straight line would be pairs of episodes."""
    counts = []
    for episodes in (16, 32, 64):
        trainer = bench.build(episodes, 2, ranks, tmp_path / str(episodes))
        player = bench.Player(trainer.tokenizer, 2)
        state = trainer.stream.state_dict()
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None}
        requests = bench.group_requests(trainer.stream.next_batch(), n=8, step=1, max_turns=2, **sampling)
        trainer.rollouts = bench.ReplayedRollouts([player.play(request) for request in requests])
        trainer.stream.load_state_dict(state)
        calls: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, _, calls=calls: calls.update([event]))
        try:
            metrics = trainer.train_step(1)
        finally:
            sys.setprofile(None)
        trainer.tracking.close()
        counts.append(calls["call"])
        assert metrics["behavior/search_depth"] == 2.0 and metrics["training/rollout_probs_diff_mean"] > 0
    assert counts[2] - counts[1] == pytest.approx(2 * (counts[1] - counts[0]), rel=0.2)
