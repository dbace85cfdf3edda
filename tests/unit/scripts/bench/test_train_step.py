"""The bench of the update: the batch is what it says, its cases compute the same, and their memory is told apart."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from verl.utils.torch_functional import ValueGuard, log_probs_from_hidden

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "bench" / "train_step.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("train_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_step"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_batch_has_the_demos_length_mix(bench):
    depths = bench.searches(64)
    shares = [depths.count(k) / 64 for k in range(5)]
    assert shares == pytest.approx([number / 768 for number in bench.SEARCHES.values()], abs=1 / 64)
    batch = bench.make_batch(bench.make_episodes(8))
    lengths = batch.batch["attention_mask"].sum(1)
    assert lengths.tolist() == [271 + 26 + 227 * depth for depth in bench.searches(8)]
    assert batch.batch["response_mask"].sum(1).tolist() == [26 + 62 * depth for depth in bench.searches(8)]


def test_full_logits_give_what_chunks_give(bench):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 8, generator=generator), torch.randn(50, 8, generator=generator)
    targets = torch.randint(0, 50, (20,), generator=generator)
    found = []
    for compute in (bench.full_log_probs, log_probs_from_hidden):
        leaf = hidden.clone().requires_grad_()
        log_probs, entropies = compute(leaf, weight, targets, 0.7, ValueGuard(), True, entropy_gradient=False)
        (log_probs * torch.arange(20)).sum().backward()
        found.append((log_probs.detach(), entropies.detach(), leaf.grad))
    for full, chunked in zip(*found, strict=True):
        torch.testing.assert_close(full, chunked, rtol=1e-5, atol=1e-5)


def test_model_operations_by_hand(bench):
    case = bench.Case("update", "2M", 1792, episodes=1)  # the median episode: two searches
    row = bench.to_row(case, {"seconds": 2.0}, rate=1e9)
    length, sampled = 271 + 26 + 2 * 227, 26 + 2 * 62
    base = 4 * (2 * 192 * 192 + 2 * 192 * 96 + 3 * 192 * 512)
    adapter = 4 * 64 * (2 * 384 + 2 * 288)
    attention = 2 * 4 * 192 * length**2
    flops = 2 * (2 * base + 3 * adapter) * length + 3 * attention + 2 * 2 * sampled * 192 * 1792
    assert (row["tokens"], row["tokens_per_s"]) == (length, length / 2)
    assert row["mfu"] == pytest.approx(flops / 2 / 1e9)


def test_the_log_probs_alone_shrink_to_the_memory_that_is_free(bench):
    assert bench.logits_tokens(8192, 1792) == 8192
    fewer = bench.logits_tokens(2**40, 151_936)
    assert fewer < 2**40 and 2**40 % fewer == 0


def test_every_way_takes_the_same_step(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run_case", lambda case, repeats, _: bench.MEASURES[case.what](case, repeats))  # in here
    monkeypatch.setattr(bench.dp_actor, "log_probs_from_hidden", log_probs_from_hidden)  # restored: full logits stay
    figures = tmp_path / "figures.json"
    options = ["--sizes", "2M", "--vocabularies", "20000", "--episodes", "2", "--logits-tokens", "2048"]
    bench.main([*options, "--repeats", "1", "--json", str(figures)])
    report = json.loads(figures.read_text())
    assert report["matmul_flops_per_s"] > 1e8
    rows = {row["name"]: row for row in report["rows"]}
    ways = [rows[name] for name in ("packed", "padded", "packed, full logits")]
    assert [way["grad_norm"] for way in ways] == pytest.approx([ways[0]["grad_norm"]] * 3, rel=1e-4)
    assert all(way["seconds"] > 0 and 0 < way["mfu"] < 1.5 for way in ways)
    chunked, full = (rows["log-probs alone" + name] for name in ("", ", full logits"))
    assert chunked["checksum"] == pytest.approx(full["checksum"], rel=1e-5)
    if full["peak_mb"] is not None:  # 2,048 x 20,000 logits are 156 MB a copy
        assert full["peak_mb"] > 300 > chunked["peak_mb"]
    printed = capsys.readouterr().out
    assert "packed, full logits" in printed and "matrix product" in printed


def test_a_case_in_its_own_process_and_one_that_fails_there(bench, capsys):
    alone = bench.run_case(bench.Case("logprobs", "2M", 1792, tokens=16), 1, timeout_s=300)
    here = bench.measure_logprobs(bench.Case("logprobs", "2M", 1792, tokens=16), 1)
    assert alone["checksum"] == pytest.approx(here["checksum"])
    case = bench.Case("update", "2M", 1792, episodes=1)
    late = bench.run_case(case, 1, timeout_s=0.05)
    assert "--case-timeout" in late["error"]
    broken = bench.run_case(bench.Case("nothing", "2M", 1792), 1, timeout_s=300)
    assert "nothing" in broken["error"]
    bench.show([bench.to_row(case, late, 1e9)], 1e9)
    assert "--case-timeout" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--vocabularies", "100"])
    assert "the batch holds ids up to 1700" in capsys.readouterr().err
