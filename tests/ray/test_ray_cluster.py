"""How a run finds or starts its Ray, and what it leaves behind. Each case is a process of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from verl.single_controller import connect
from verl.single_controller.ray_cluster import REPO_ROOT, _answers
from verl.trainer.config.schema import RayConfig

DRIVER = """
import os, signal, sys, time
sys.path.insert(0, {repo!r})
from verl.single_controller import connect
from verl.trainer.config.schema import RayConfig
import ray

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored

@ray.remote(num_cpus=0)
def where():
    import scrl.types, verl.protocol
    return scrl.types.__file__

with connect(RayConfig(num_cpus=None if {attached} else 1)) as connection:
    assert connection.local != {attached}, connection
    print("IMPORTED", ray.get(where.remote(), timeout=120), connection.address, flush=True)
    {then}
print("ENDED", os.environ.get("PYTHONPATH"), flush=True)
"""


@pytest.fixture
def machine():
    """A home and a Ray folder of its own, as of a fresh user. The folder is short: Ray keeps sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    (folder / "home").mkdir()
    (folder / "a b").mkdir()
    yield folder
    for process in of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def of(folder: Path) -> list[psutil.Process]:
    """The processes that live in this Ray folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(f"{folder}/" in part for part in process.cmdline()) or process.environ().get("RAY_TMPDIR") == str(
                folder
            ):
                found.append(process)
    return found


def environment(machine: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    return kept | {"HOME": str(machine / "home"), "RAY_TMPDIR": str(machine), "OMP_NUM_THREADS": "1"} | more


def drive(machine: Path, then: str = "pass", attached: bool = False, **more: str) -> subprocess.Popen:
    code = DRIVER.format(repo=str(REPO_ROOT), then=then, attached=attached)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=machine / "a b",
        env=environment(machine, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def all_gone(machine: Path, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while of(machine):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_two_runs_at_once_each_have_a_ray_and_leave_nothing(machine):
    runs = [drive(machine), drive(machine)]
    addresses = []
    for run in runs:
        output, _ = run.communicate(timeout=240)
        lines = output.splitlines()
        assert run.returncode == 0 and len(lines) == 3, f"more than the three lines were printed:\n{output}"
        assert lines[0] == "starting Ray" and lines[2] == "ENDED None"
        word, scrl, address = lines[1].split()
        assert word == "IMPORTED" and scrl == str(REPO_ROOT / "scrl" / "types.py")
        addresses.append(address)
    assert len(set(addresses)) == 2 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert all_gone(machine)
    assert not list(machine.glob("ray/session_2*")) and not list((machine / "home").iterdir())


@pytest.mark.parametrize(
    "then, number, says",
    [
        ("raise ValueError('nothing to train')", None, "ValueError: nothing to train"),
        ("time.sleep(600)", signal.SIGINT, "KeyboardInterrupt"),
        ("time.sleep(600)", signal.SIGTERM, ""),
        ("time.sleep(600)", signal.SIGKILL, ""),
    ],
)
def test_whatever_ends_a_run_ends_its_ray(machine, then, number, says):
    run = drive(machine, then)
    assert run.stdout.readline() == "starting Ray\n"
    assert run.stdout.readline().startswith("IMPORTED")
    assert len(of(machine)) > 3, "else this test would see nothing"
    if number is not None:
        os.killpg(run.pid, number)  # as a terminal does: to all of the group
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0 and "ENDED" not in output and says in output
    assert all_gone(machine)


@pytest.mark.timeout(900)  # five starts of Ray, on a machine that may be busy
def test_a_ray_that_runs_is_used_and_left_running_and_its_stale_record_ignored(machine):
    ray_command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=1", "--port=0"]
    ray_command += ["--include-dashboard=false", "--dashboard-agent-listen-port=0"]
    token = environment(machine, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
    subprocess.run(ray_command, env=token, check=True, capture_output=True, timeout=240)
    record = (machine / "ray" / "ray_current_cluster").read_text().strip()
    (machine / "home" / ".ray").mkdir()
    (machine / "home" / ".ray" / "auth_token").write_text("a" * 64)

    found = drive(machine, attached=True).communicate(timeout=240)[0].splitlines()
    assert found[0].startswith(f"using the Ray that runs at {record}") and "RAY_AUTH_MODE=token" in found[0]
    assert found[1].split() == ["IMPORTED", str(REPO_ROOT / "scrl" / "types.py"), record] and len(found) == 3
    named = drive(machine, attached=True, RAY_ADDRESS=record).communicate(timeout=240)[0].splitlines()
    assert named[1].split()[2] == record and len(named) == 3

    own = drive(machine, RAY_ADDRESS="local").communicate(timeout=240)[0].splitlines()
    assert own[0] == "starting Ray" and own[1].startswith("IMPORTED") and "127.0.0.1" in own[1]

    assert _answers(record), "the cluster outlives the runs that use it"
    for process in of(machine):
        process.kill()
    assert all_gone(machine) and (machine / "ray" / "ray_current_cluster").exists()
    after = drive(machine).communicate(timeout=240)[0].splitlines()
    assert after[0] == "starting Ray" and after[1].startswith("IMPORTED") and "127.0.0.1" in after[1]
    assert len(after) == 3


def test_a_named_cluster_that_does_not_answer_is_an_error_at_once(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"RAY_ADDRESS=127.0.0.1:\d+ doesn't answer; start that cluster"):
            with connect():
                pass
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere")
    with pytest.raises(ValueError, match="is not host:port; set RAY_ADDRESS=host:6379 or unset it"):
        with connect():
            pass


def test_another_server_on_the_recorded_port_is_not_taken_for_ray():
    def reply(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=reply, args=(server,))
        thread.start()
        assert not _answers(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert not _answers(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        assert time.monotonic() - start < 2


def test_no_cpus_is_refused():
    with pytest.raises(ValueError, match="ray.num_cpus=0: a local Ray needs at least 1"):
        with connect(RayConfig(num_cpus=0)):
            pass


@pytest.mark.timeout(900)
def test_a_ray_that_starts_too_slowly_is_tried_again_and_then_given_up(machine):
    """A raylet that can't hear of its agents in time: on the first attempts, on all of them."""
    code = """
import os, sys
sys.path.insert(0, {repo!r})
import ray
from verl.single_controller import connect
real, tries = ray.init, []
def slow(*args, **kwargs):
    tries.append(1)
    if len(tries) < {succeeds}:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        raise Exception("The current node timed out during startup.")
    return real(*args, **kwargs)
ray.init = slow
with connect() as connection:
    print("STARTED", len(tries), flush=True)
"""
    runs = []
    for succeeds in (3, 4):
        command = [sys.executable, "-c", code.format(repo=str(REPO_ROOT), succeeds=succeeds)]
        runs.append(subprocess.run(command, env=environment(machine), capture_output=True, text=True, timeout=200))
    third, never = runs
    assert third.stdout == "starting Ray\nSTARTED 3\n" and third.returncode == 0
    assert never.returncode == 1 and "ConnectionError: Ray didn't start in 3 attempts" in never.stderr
    assert all_gone(machine), "the failed attempts' processes too"
