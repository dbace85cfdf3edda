"""Arms are compared by seed: known means and intervals, runs that ended early, a log that gives the same again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_runs.py"


def write_run(folder: Path, name: str, values: list[float]) -> None:
    (folder / name).mkdir(parents=True)
    lines = [json.dumps({"step": step, "reward/f1": value}) for step, value in enumerate(values, start=1)]
    (folder / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def compare(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "exp_07"
    for seed, last in ((1, 0.5), (2, 0.75), (3, 0.625)):
        write_run(folder, f"7a_seed{seed}", [0.125, 0.25, last])
    write_run(folder, "7b_seed1", [0.1, 0.3, 0.9])
    write_run(folder, "7b_seed2", [0.3])
    return folder


def test_mean_and_interval_over_the_seeds_that_got_there(experiment: Path) -> None:
    shown = compare(experiment, "--metrics", "reward/f1", "--steps", 1, 3)
    assert shown.returncode == 0, shown.stderr
    # t(0.975, 2) = 4.303; sd 0.125; 4.303 * 0.125 / sqrt(3) = 0.311
    assert "| 7a | 3 | 0.125 ± 0 | 0.625 ± 0.31 |" in shown.stdout
    # t(0.975, 1) = 12.706; sd 0.1414; 12.706 * 0.1414 / sqrt(2) = 1.27
    assert "| 7b | 2 | 0.2 ± 1.3 | 0.9 (1 of 2) |" in shown.stdout
    assert (experiment / "plot.png").stat().st_size > 1000


def test_window_averages_the_steps_up_to_one(experiment: Path) -> None:
    shown = compare(experiment, "--metrics", "reward/f1", "--steps", 3, "--window", 2)
    assert "| 7a | 3 | 0.438 ± 0.16 |" in shown.stdout


def test_committed_logs_give_the_same_table(experiment: Path, tmp_path: Path) -> None:
    first = compare(experiment, "--metrics", "reward/f1", "--out", tmp_path / "logs")
    again = compare(tmp_path / "logs", "--metrics", "reward/f1")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout.splitlines()[:-1] == again.stdout.splitlines(), "and no line that names files: none is written"
    thrice = compare(tmp_path / "logs", "--metrics", "reward/f1", "--out", tmp_path / "again")
    assert thrice.returncode == 0, thrice.stderr
    written = [{path.name: path.read_text() for path in (tmp_path / f).glob("*.jsonl")} for f in ("logs", "again")]
    assert written[0] == written[1] and len(written[0]) == 5
    assert (tmp_path / "logs" / "7b_seed2.jsonl").read_text() == '{"step": 1, "reward/f1": 0.3}\n'


def test_a_run_that_failed_before_its_first_step_costs_nobody_the_table(experiment: Path, tmp_path: Path) -> None:
    (experiment / "7a_seed4").mkdir()
    (experiment / "7a_seed4" / "metrics.jsonl").touch()
    (experiment / "7c_seed1").mkdir()
    (experiment / "7c_seed1" / "metrics.jsonl").write_text("no json")
    shown = compare(experiment, "--metrics", "reward/f1", "--steps", 3)
    assert shown.returncode == 0 and "| 7a | 3 | 0.625 ± 0.31 |" in shown.stdout and "7c" not in shown.stdout
    assert shown.stderr.count("left out: ") == 2, shown.stderr
    write_run(tmp_path / "empty", "8a_seed1", [])
    refused = compare(tmp_path / "empty")
    assert refused.returncode == 1 and "no {arm}_seed{n} run with a step" in refused.stderr


def test_best_arm_is_the_one_that_ends_highest(experiment: Path) -> None:
    assert compare(experiment, "--best", "7", "--metrics", "reward/f1").stdout == "7a\n"  # 7b_seed2 ended at 0.3
    refused = compare(experiment, "--best", "8", "--metrics", "reward/f1")
    assert refused.returncode == 1 and "no arm 8" in refused.stderr


def test_an_empty_folder_is_one_sentence(tmp_path: Path) -> None:
    refused = compare(tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and "_seed{n}" in refused.stderr
