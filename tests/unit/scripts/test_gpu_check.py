"""The check of a GPU, on a CPU: it needs few packages, its ways agree, and a part that fails is a line."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
# Of what the project needs, all that a machine with torch, transformers and peft may lack.
ABSENT = (
    "ray",
    "hydra",
    "omegaconf",
    "tensordict",
    "vllm",
    "rich",
    "pyarrow",
    "pandas",
    "fastapi",
    "tantivy",
    "pytest",
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(script):
    return script.Check(torch.device("cpu"), script.TINY, time.monotonic() + 60)


@pytest.mark.timeout(300)
def test_it_runs_with_torch_transformers_and_peft_alone(tmp_path):
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"sys.argv = ['gpu_check.py', '--device', 'cpu', '--shape', 'tiny', '--tokens', '64', '128',"
        f" '--json', 'report.json', '--markdown', 'report.md']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {(row["part"], row["tokens"]): row for row in report["rows"]}
    for part in ("log-probs", "update, checkpointing", "update, no checkpointing"):
        for tokens in (64, 128):
            row = rows[part, tokens]
            assert row["result"] == "done" and row["mfu"] > 0
            assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
    assert rows["packed SDPA", 64]["result"].startswith("equal")
    assert rows["flash attention", 64]["result"] == "skipped: it needs a GPU"
    assert rows["chunked logits", 64]["result"] == rows["full logits", 64]["result"]
    table = (tmp_path / "report.md").read_text()
    assert table.startswith("**CPU**") and "| log-probs | 128 |" in table and table.strip() in done.stdout


def test_attention_that_looks_across_episodes_would_be_seen(script, check, monkeypatch):
    """Packed episodes under plain attention read their neighbours: far from the padded ones."""
    rows = {row.part: row.result for row in script.equality(check, 256)}
    assert rows["packed SDPA"].startswith("equal")
    AttentionInterface.register(
        "leaky", lambda *given, cu_seq_lens_q=None, **kind: sdpa_attention_forward(*given, **kind)
    )
    monkeypatch.setattr(script, "PACKED_SDPA", "leaky")
    rows = {row.part: row.result for row in script.equality(check, 256)}
    assert rows["packed SDPA"].startswith("DIFFERENT")


def test_a_part_that_fails_is_a_line(script, check):
    row = script.Row("update", 64)

    def half(error: Exception):
        yield row
        raise error

    memory = list(check.guarded(row, lambda: half(torch.OutOfMemoryError("CUDA out of memory"))))
    assert [made.result for made in memory] == ["done", "out of memory"]
    kernel = list(check.guarded(row, lambda: half(RuntimeError("only Ampere GPUs or newer\nat line 3"))))
    assert kernel[1].result == "failed: only Ampere GPUs or newer"
    with pytest.raises(KeyError):  # a bug of ours is none of these
        list(check.guarded(row, lambda: half(KeyError("x"))))
    check.deadline = time.monotonic() - 1
    assert [made.result for made in check.guarded(row, lambda: half(KeyError("x")))] == [
        "skipped: out of time (--minutes)"
    ]


def test_after_out_of_memory_no_larger_update_is_tried(script, check, monkeypatch):
    class Full:
        def update_policy(self, data):
            if data.batch["input_ids"].numel() >= 128:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, "actor", lambda *_: Full())
    rows = list(script.speed(check, [64, 128, 256], False, None))
    assert [(row.tokens, row.result) for row in rows] == [(64, "done"), (128, "out of memory")]


def test_a_machine_without_a_gpu_is_told(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert "--device cpu --shape tiny" in capsys.readouterr().err
