"""Metrics by value on a batch small enough to work out by hand."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from scrl.types import Episode, ToolCall, Turn
from verl.trainer.config.schema import RewardConfig
from verl.trainer.ppo.metrics import (
    batch_metrics,
    episode_metrics,
    reward_metrics,
    rollout_gap_metrics,
    throughput_metrics,
    timing_metrics,
    validation_metrics,
)
from verl.workers.reward_manager.naive import NaiveRewardManager

ROOT = Path(__file__).resolve().parents[5]


def make_batch():
    """Three rows of P = 3 and R = 4; the third failed, so its mask is empty although it holds numbers."""
    return TensorDict(
        {
            "prompts": torch.ones(3, 3, dtype=torch.long),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]),
            "response_mask": torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.25, 0, 0.5, 0], [0, 0, 0, -1.0], [9, 9, 9, 9]]),
            "advantages": torch.tensor([[1.0, 50, 2, 50], [-1, -1, 50, -6], [70, 70, 70, 70]]),
            "returns": torch.tensor([[0.75, 50, 0.5, 50], [-1, -1, 50, -1], [70, 70, 70, 70]]),
        },
        batch_size=[3],
    )


def make_episodes():
    """Four endings in two data sources; reward info as the manager gives it."""
    searched = Turn("tool_call", tool_call=ToolCall("web_search", {"query": ["x"]}), queries=["x"], span=(0, 1))
    failed = Turn("tool_call", queries=["y"], search_ok=False, span=(2, 3))
    golds = ["Paris"]

    def make(source, turns, finish):
        return Episode("u", 0, 0, "?", golds, source, [1], [5] * 5, [1, 0, 1, 0, 1], [0.0] * 5, turns, finish)

    episodes = [
        make("nq", [searched, failed, Turn("answer", answer="Paris", span=(4, 5))], "answer"),
        make("nq", [Turn("answer", answer="Paris Texas", span=(0, 1))], "answer"),
        make("tq", [searched, Turn("malformed", span=(2, 3))], "malformed"),
        make("tq", [searched], "error"),
    ]
    _, info = NaiveRewardManager(RewardConfig())(episodes, 5)
    return episodes, info


def test_batch_counts_sampled_tokens_of_valid_rows():
    metrics = batch_metrics(make_batch())
    assert metrics["critic/score/mean"] == pytest.approx(-0.125)
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (0.75, -1)
    assert metrics["critic/advantages/mean"] == pytest.approx(-1)
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (2, -6)
    assert metrics["critic/returns/mean"] == pytest.approx(-0.35)
    assert [metrics[f"prompt_length/{k}"] for k in ("mean", "max", "min")] == [2.5, 3, 2]
    assert [metrics[f"response_length/{k}"] for k in ("mean", "max", "min")] == [3.5, 4, 3]
    assert metrics["response_length/sampled"] == 2.5
    assert all(type(value) is float for value in metrics.values())


def test_a_batch_of_failures_has_no_statistics():
    batch = make_batch()
    batch["response_mask"].zero_()
    assert batch_metrics(batch) == {}
    ones = torch.ones(2, 2)
    assert rollout_gap_metrics(ones, ones, torch.zeros(2, 2)) == {}


def test_reward_components_are_means_over_valid_episodes():
    _, info = make_episodes()
    metrics = reward_metrics(info)
    # outcomes 1, 2/3, -1; the second answered without a search
    assert metrics["reward/outcome"] == pytest.approx((1 + 2 / 3 - 1) / 3)
    assert metrics["reward/f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert metrics["reward/early_stop"] == pytest.approx(-0.5 / 3)
    assert metrics["reward/early_stop_raw"] == pytest.approx(1 / 3)
    assert metrics["critic/rewards/mean"] == pytest.approx((1 + 2 / 3 - 0.5 - 1) / 3)
    assert (metrics["critic/rewards/max"], metrics["critic/rewards/min"]) == (1, -1)
    assert metrics["reward/phi"] == 0
    assert "reward/score" not in metrics and "reward/valid" not in metrics


def test_episodes_by_ending():
    metrics = episode_metrics(make_episodes()[0])
    assert metrics["behavior/search_depth"] == pytest.approx((2 + 0 + 1) / 3)
    shares = {
        kind: metrics[f"episodes/finish/{kind}"] for kind in ("answer", "malformed", "max_turns", "length", "error")
    }
    assert shares == {"answer": 0.5, "malformed": 0.25, "max_turns": 0, "length": 0, "error": 0.25}
    assert metrics["episodes/search_failed"] == 0.25
    assert episode_metrics([]) == {}


def test_validation_by_source_counts_an_error_as_wrong():
    metrics = validation_metrics(*make_episodes())
    assert metrics["val/f1/nq"] == pytest.approx(5 / 6) and metrics["val/f1/tq"] == 0
    assert metrics["val/f1/mean"] == pytest.approx(5 / 12)
    assert metrics["val/em/nq"] == 0.5 and metrics["val/em/mean"] == 0.25
    assert metrics["val/score/tq"] == pytest.approx(-0.5)
    assert metrics["val/search_depth/nq"] == 1 and metrics["val/search_depth/mean"] == 1
    assert metrics["val/answered/nq"] == 1 and metrics["val/answered/tq"] == 0
    assert metrics["val/errors"] == 0.25


def test_rollout_gap_is_of_probabilities_on_sampled_tokens():
    engine = torch.tensor([[math.log(0.5), -9.0, math.log(0.9)]])
    trainer = torch.tensor([[math.log(0.4), 0.0, math.log(0.6)]])
    metrics = rollout_gap_metrics(engine, trainer, torch.tensor([[1.0, 0, 1]]))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.3)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.2)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.1)


def test_rollout_gap_as_kl_and_effective_sample_size():
    ratio = torch.tensor([[2.0, 1.0, 0.5], [4.0, 9.0, 1.0]])  # pi_trainer / pi_engine; the 9 was not sampled
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 1]])
    metrics = rollout_gap_metrics(torch.full((2, 3), -3.0), ratio.log() - 3.0, mask, cap=2.5)
    weights, log_weights = [2, 1, 0.5, 4, 1], [math.log(2), 0, -math.log(2), math.log(4), 0]
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(log_weights) / 5)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(
        sum(w - 1 - log for w, log in zip(weights, log_weights, strict=True)) / 5
    )
    assert metrics["rollout_corr/log_ratio_max"] == pytest.approx(math.log(4))
    assert metrics["rollout_corr/token_weight_max"] == pytest.approx(4)
    assert metrics["rollout_corr/token_above_cap"] == pytest.approx(0.2)
    assert metrics["rollout_corr/token_eff_sample_size"] == pytest.approx(8.5**2 / (5 * 22.25))
    assert metrics["rollout_corr/sequence_weight_max"] == pytest.approx(4)  # the products are 1 and 4
    assert metrics["rollout_corr/sequence_above_cap"] == 0.5
    assert metrics["rollout_corr/sequence_eff_sample_size"] == pytest.approx(25 / (2 * 17))
    same = rollout_gap_metrics(torch.full((2, 3), -3.0), torch.full((2, 3), -3.0), mask)
    assert same["rollout_corr/token_eff_sample_size"] == same["rollout_corr/sequence_eff_sample_size"] == 1
    assert same["rollout_corr/kl"] == same["rollout_corr/k3_kl"] == same["rollout_corr/token_above_cap"] == 0


def test_overhead_is_what_no_model_and_no_search_took():
    timing = {"step": 10.0, "gen": 5.0, "old_log_prob": 1.0, "update_actor": 2.0, "reward": 0.5, "sync": 0.5}
    metrics = timing_metrics(timing)
    assert metrics["timing_s/gen"] == 5 and metrics["timing_s/reward"] == 0.5
    assert metrics["timing_s/overhead"] == pytest.approx(2) and metrics["perf/overhead_share"] == pytest.approx(0.2)
    # The greedy episodes of ReMax are generation, not overhead.
    assert timing_metrics(timing | {"gen_max": 1.5})["timing_s/overhead"] == pytest.approx(0.5)


def test_throughput():
    metrics = throughput_metrics(make_batch(), {"step": 4.0, "gen": 2.0}, devices=2)
    assert metrics == {
        "perf/total_num_tokens": 16,
        "perf/time_per_step": 4,
        "perf/throughput": 2,
        "perf/gen_tokens_per_s": 2.5,
    }
    more = throughput_metrics(make_batch(), {"step": 4.0, "gen": 2.0}, left_out=3)  # played, not trained on
    assert more["perf/gen_tokens_per_s"] == 4 and more["perf/total_num_tokens"] == 16
    assert "perf/gen_tokens_per_s" not in throughput_metrics(make_batch(), {"step": 1.0})


def test_metrics_of_numbers_stay_plain_floats():
    episodes, info = make_episodes()
    for metrics in (reward_metrics(info), episode_metrics(episodes), validation_metrics(episodes, info)):
        assert all(type(value) is float for value in metrics.values())
        assert np.isfinite(list(metrics.values())).all()


def test_imports_neither_ray_nor_transformers():
    code = (
        "import sys, verl.trainer.ppo.metrics\nprint([m for m in ('ray', 'transformers', 'hydra') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"
