"""Every shell script parses, passes shellcheck, and can be asked for help from anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/**/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_passes_shellcheck(script: Path) -> None:
    command = [Path(sys.executable).parent / "shellcheck", "--external-sources", "--shell=bash", script]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", ["train_grpo.sh", "evaluate.sh"])
def test_help_needs_no_set_up(name: str, tmp_path: Path) -> None:
    shown = subprocess.run(
        ["bash", ROOT / name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"bash {name}" in shown.stdout and not shown.stderr
    assert "#" not in shown.stdout.splitlines()[0]
