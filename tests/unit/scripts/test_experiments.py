"""What experiments share (scripts/experiments/common.sh), on a miniature repository whose trainer only keeps books."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.unit.scripts.test_env import ROOT, Repository

EXPERIMENT = """#!/usr/bin/env bash
# Exp-99: does it start, go on, and stop?
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
arm 99a 3 key=a
arm 99b 3 key=b
wait_for_all
echo "$experiment" "$jobs"
"""
# Makes its checkpoint after `steps` files named go, or when it is asked to stop, which takes it a second.
TRAINER = """
import os, signal, sys, time
from pathlib import Path

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = Path(__file__).parents[2] / "outputs" / given["trainer.project_name"] / given["trainer.experiment_name"]
if given["key"] == "b" and given["trainer.seed"] == "1":
    sys.exit("this one fails")

def stop(*_):
    time.sleep(1)
    (folder / "saved").touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, stop)
(folder / "started").touch()
while given.get("wait"):
    time.sleep(0.05)
(folder / "checkpoints" / f"global_step_{given['trainer.total_training_steps']}").mkdir(parents=True)
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = Repository(tmp_path_factory.mktemp("experiments"))
    (made.root / "scripts" / "experiments").mkdir()
    shutil.copy(ROOT / "scripts/experiments/common.sh", made.root / "scripts/experiments/common.sh")
    made.write("scripts/experiments/exp_99.sh", EXPERIMENT)
    made.write("verl/trainer/main_ppo.py", TRAINER)
    return made


def experiment(repo: Repository, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
    code, out, err = repo.run(str(repo.root / "scripts/experiments/exp_99.sh"), *arguments, **environment)
    return code, sorted(line.split(" in ")[0].split(" after ")[0] for line in out.splitlines()), err


def test_runs_go_on_past_one_that_fails_and_are_done_once(repo: Repository) -> None:
    code, told, err = experiment(repo, SEEDS="1 2")
    assert code == 0, err
    assert told == ["99a_seed1: 3 steps", "99a_seed2: 3 steps", "99b_seed1: FAILED", "99b_seed2: 3 steps", "exp_99 2"]
    assert "this one fails" in (repo.root / "outputs/exp_99/99b_seed1/console.log").read_text()
    assert experiment(repo, SEEDS="2", ARMS="99a")[1] == ["99a_seed2: done before", "exp_99 2"]


def test_other_settings_are_other_runs(repo: Repository) -> None:
    experiment(repo, SEEDS="3", ARMS="99a")
    told = experiment(repo, "more=1", SEEDS="3", ARMS="99a")[1]
    assert told[0].startswith("99a_seed3: SKIPPED, it was begun with other settings")
    told = experiment(repo, "profile=a100_80g", SEEDS="3", ARMS="99a")[1]
    assert told == ["99a_seed3: 3 steps", "exp_99_full 1"]
    assert (repo.root / "outputs/exp_99_full/99a_seed3/checkpoints").is_dir()


def test_stopping_waits_until_every_run_is_saved(repo: Repository) -> None:
    process = repo.start(str(repo.root / "scripts/experiments/exp_99.sh"), "wait=1", SEEDS="4 5", ARMS="99a")
    folders = [repo.root / f"outputs/exp_99/99a_seed{seed}" for seed in (4, 5)]
    deadline = time.monotonic() + 120
    while not all((folder / "started").exists() for folder in folders):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert all((folder / "saved").exists() for folder in folders), "it ended before its runs"
    assert out.count("the same command goes on") == 2 and "FAILED" not in out


def test_help_needs_no_set_up(repo: Repository) -> None:
    code, out, _ = repo.run(str(repo.root / "scripts/experiments/exp_99.sh"), "--help", HOME=str(Path("/nowhere")))
    assert code == 0 and out.startswith("Exp-99: does it start") and "SEEDS=" in out and "shellcheck" not in out
