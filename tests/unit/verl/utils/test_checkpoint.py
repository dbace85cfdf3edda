"""A checkpoint is whole or absent, whatever happens while it is written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.utils.checkpoint import (
    LATEST,
    CheckpointError,
    CheckpointManager,
    is_disk_full,
    load_json,
    lock_folder,
    rng_state,
    save_json,
    save_rows,
    set_rng_state,
)


def writer(text: str = "x"):
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text(text)

    return write


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_save_puts_the_folder_in_place_and_names_it_the_latest(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    path = manager.save(3, writer("three"))
    assert path == tmp_path / "checkpoints" / "global_step_3"
    assert (path / "actor" / "weights").read_text() == "three"
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "3\n"
    assert names(tmp_path / "checkpoints") == ["global_step_3", LATEST]
    assert manager.find("auto") == path


def test_old_ones_go_and_the_newest_stay(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (1, 2, 10, 11):
        manager.save(step, writer())
    assert names(tmp_path) == ["global_step_10", "global_step_11", LATEST]


def test_going_back_keeps_what_was_just_saved_and_the_abandoned_future(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    manager.save(20, writer("old"))
    manager.save(30, writer("old"))
    for step in (21, 22):
        manager.save(step, writer("new"))
    assert names(tmp_path) == ["global_step_21", "global_step_22", "global_step_30", LATEST]
    assert manager.find("auto").name == "global_step_22"


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, writer("first"))
    path = manager.save(1, writer("second"))
    assert (path / "actor" / "weights").read_text() == "second"
    assert names(tmp_path) == ["global_step_1", LATEST]


def test_a_full_disk_is_one_sentence_and_the_previous_checkpoint_stays(tmp_path):
    manager = CheckpointManager(tmp_path)
    before = manager.save(1, writer("good"))

    def write(folder: Path) -> None:
        (folder / "part").write_text("half")
        with open("/dev/full", "w") as file:  # the kernel's own ENOSPC
            file.write("x" * 100_000)

    with pytest.raises(CheckpointError) as caught:
        manager.save(2, write)
    message = str(caught.value)
    assert "disk is full" in message and "step 2" in message and "of step 1 is intact" in message
    assert "\n" not in message
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert manager.find("auto") == before and (before / "actor" / "weights").read_text() == "good"


def test_a_full_disk_is_recognised_through_wrappers():
    rust = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert is_disk_full(rust)  # safetensors reports the errno as text

    class RemoteError(RuntimeError):  # as Ray hands it over
        cause = OSError(28, "No space left on device")

    assert is_disk_full(RemoteError("task failed"))
    assert not is_disk_full(PermissionError(13, "Permission denied"))


def test_another_failure_passes_through_and_leaves_nothing(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, writer())

    def write(folder: Path) -> None:
        writer()(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.save(2, write)
    assert names(tmp_path) == ["global_step_1", LATEST]


def test_a_kill_while_writing_leaves_the_last_whole_one(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom verl.utils.checkpoint import CheckpointManager\n"
        "m = CheckpointManager(sys.argv[1])\nm.save(1, lambda f: (f / 'w').write_text('whole'))\n"
        "def slow(f):\n    (f / 'w').write_text('half')\n    Path(sys.argv[1], 'ready').touch()\n    time.sleep(60)\n"
        "m.save(2, slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[4])
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ".global_step_2.tmp" in names(tmp_path)
    found = CheckpointManager(tmp_path).find("auto")
    assert found.name == "global_step_1" and (found / "w").read_text() == "whole"
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_kill_between_the_renames_is_mended(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, writer("old")).rename(tmp_path / ".global_step_1.old")
    found = CheckpointManager(tmp_path).find("auto")
    assert found.name == "global_step_1" and (found / "actor" / "weights").read_text() == "old"


@pytest.mark.parametrize("latest", [None, "", "seven", "9"])
def test_without_a_usable_latest_file_the_newest_folder_counts(tmp_path, latest):
    manager = CheckpointManager(tmp_path)
    for step in (2, 10):
        manager.save(step, writer())
    (tmp_path / LATEST).unlink()
    if latest is not None:
        (tmp_path / LATEST).write_text(latest)
    assert manager.find("auto").name == "global_step_10"


def test_find_in_an_empty_run(tmp_path):
    manager = CheckpointManager(tmp_path / "none")
    assert manager.find("auto") is None and manager.find("disable") is None
    assert not (tmp_path / "none").exists()


def test_find_by_path(tmp_path):
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    path = manager.save(5, writer())
    assert manager.find("disable") is None
    assert CheckpointManager(tmp_path / "elsewhere").find(str(path)) == path
    with pytest.raises(ValueError, match="resume_mode=gone: there is no such folder"):
        manager.find("gone")
    with pytest.raises(ValueError, match="is not a checkpoint; it holds global_step_5"):
        manager.find(str(tmp_path / "run"))


def test_driver_state_comes_back_to_the_last_bit(tmp_path):
    state = {
        "f1": 0.1 + 0.2,
        "np": np.float32(0.7),
        "n": np.int64(3),
        "t": torch.tensor(0.25),
        "list": (1, 2),
        "é": None,
    }
    save_json(tmp_path / "driver.json", state)
    loaded = load_json(tmp_path / "driver.json")
    assert loaded == {"f1": 0.1 + 0.2, "np": float(np.float32(0.7)), "n": 3, "t": 0.25, "list": [1, 2], "é": None}
    with pytest.raises(TypeError, match="set in a checkpoint's driver state"):
        save_json(tmp_path / "driver.json", {"x": {1, 2}})
    assert load_json(tmp_path / "driver.json") == loaded


def test_missing_or_broken_driver_state_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="has no driver.json"):
        load_json(tmp_path / "driver.json")
    (tmp_path / "driver.json").write_text('{"step": 3')
    with pytest.raises(CheckpointError, match="can't be read"):
        load_json(tmp_path / "driver.json")


def test_generators_go_on_where_they_were():
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    kept = json.loads(json.dumps(rng_state()))
    first = draw()
    assert draw() != first
    set_rng_state(kept)
    assert draw() == first


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    held = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="another run is writing to .*experiment_name"):
        lock_folder(tmp_path / "run")
    held.close()
    lock_folder(tmp_path / "run").close()


def test_rows_are_json_a_line_each(tmp_path):
    rows = [{"a": np.float64(0.1), "b": "x\ny – é"}, {"a": [1, 2], "b": None}]
    save_rows(tmp_path / "rows.json", rows)
    text = (tmp_path / "rows.json").read_text(encoding="utf-8")
    assert json.loads(text) == [{"a": 0.1, "b": "x\ny – é"}, {"a": [1, 2], "b": None}]
    assert len(text.splitlines()) == 2 + len(rows)
    save_rows(tmp_path / "rows.json", [])
    assert json.loads((tmp_path / "rows.json").read_text()) == []
