"""The load bench in small: what it simulates, and that a server killed in the middle loses no answer."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "scripts/bench/handler_load.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("handler_load", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["handler_load"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_latencies_are_those_that_it_promises(bench):
    seconds = [bench.latency(f"call {i}", 1.0) for i in range(20_000)]
    assert median(seconds) == pytest.approx(0.3, rel=0.05)
    assert sum(s > 3.0 for s in seconds) / len(seconds) == pytest.approx(0.05, rel=0.1)
    assert bench.latency("call 1", 0.1) == pytest.approx(0.1 * bench.latency("call 1", 1.0))


def test_the_ideal_is_a_schedule_by_hand(bench):
    # Two clients: 3 | 1, then the second takes 2, then both are free at 3: 4 | 1.
    assert bench.ideal_wall([3.0, 1.0, 2.0, 4.0, 1.0], 2) == 7.0
    assert bench.ideal_wall([1.0] * 8, 4) == 2.0


@pytest.mark.timeout(600)
def test_a_killed_server_loses_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SCRL_TOKEN")}
    options = ("--calls", "300", "--clients", "24", "--scale", "0.1", "--kill", "--json", tmp_path / "report.json")
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["calls"], report["lost"], report["swapped"]) == (300, 0, 0)
    assert report["searches (of living servers)"] >= 150, "the living one did its half and what was moved to it"
    assert report["proxy: MB at the end"] > 10
    assert report["wall/ideal"] > 1
