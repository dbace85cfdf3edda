"""doc/configuration.md is what the schema says, and says what a key takes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_document_is_up_to_date() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import build_configuration_doc as b; print(b.document(), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    written = (ROOT / "doc" / "configuration.md").read_text(encoding="utf-8")
    assert made.stdout == written, "run python scripts/build_configuration_doc.py"
    row = next(line for line in written.splitlines() if line.startswith("| `gamma` |"))
    assert "at least 0 and at most 1" in row and "between turns" in row
