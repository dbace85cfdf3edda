"""Use the Ray that runs, or run one for as long as a training lasts."""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.utils import read_ray_address
from ray._raylet import AuthenticationTokenLoader

from verl.trainer.config.schema import RayConfig

_START_ATTEMPTS = 3
REPO_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RayConnection:
    """``address``: host:port of the cluster. ``local``: we started it, and it ends with the connection."""

    address: str
    local: bool


@contextlib.contextmanager
def connect(config: RayConfig | None = None) -> Iterator[RayConnection]:
    """Connect this process to Ray, for the length of a ``with`` block.

    In this order: a Ray this process already uses (left as it is), the one of RAY_ADDRESS, the one that ``ray start``
    left running on this machine, else an own local one, which only this machine can reach and which ends with the
    block, whatever ends it. Its workers, on any node, import ``verl`` and ``scrl`` from this repository.

    Workers' output stays in Ray's log files; RAY_LOG_TO_DRIVER=1 shows it on the console.

    Raises ``ConnectionError`` when RAY_ADDRESS names a cluster that doesn't answer or a local one can't start,
    ``ValueError`` for an impossible configuration.
    """
    config = config or RayConfig()
    if config.num_cpus is not None and config.num_cpus < 1:
        raise ValueError(f"ray.num_cpus={config.num_cpus}: a local Ray needs at least 1; null takes all of the machine")
    if ray.is_initialized():
        yield RayConnection(ray.get_runtime_context().gcs_address, local=False)
        return
    # ray.init sets a handler of its own, for good.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as undo:
        undo.callback(_restore_sigterm, on_sigterm)
        address = _attach()
        if address is None:
            _start_local(config, undo)
        else:
            undo.push(_shutdown)
        yield RayConnection(ray.get_runtime_context().gcs_address, local=address is None)


def _attach() -> str | None:
    """Connect to the Ray that runs, if any, and return its host:port; None: start one.

    A local Ray of another training is never taken for one: Ray records only what ``ray start`` started.
    """
    named = os.environ.get("RAY_ADDRESS", "").strip()
    if named == "local":
        return None
    if named and named != "auto":
        if not _answers(named):
            raise ConnectionError(
                f"RAY_ADDRESS={named} doesn't answer; start that cluster (`ray start --head`), "
                f"or unset RAY_ADDRESS to use a local Ray"
            )
        if error := _try_init(named):
            raise ConnectionError(f"RAY_ADDRESS={named} can't be used: {error}")
        return named
    recorded = read_ray_address()
    if not recorded or not _answers(recorded):  # a record outlives a cluster that was killed
        return None
    if error := _try_init(recorded):
        # Another user's, perhaps: nobody asked for it by name, so it is no reason to stop.
        print(f"leaving the Ray at {recorded} alone ({error}); starting an own one", flush=True)
        return None
    return recorded


def _try_init(address: str) -> str | None:
    """Connect; returns why not, or None."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray looks for its token by itself only where it finds the cluster by itself. A cluster without tokens, where one
    # lies about from another, takes RAY_AUTH_MODE=disabled: else its calls to us are refused.
    with_token = maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    python_path = {"PYTHONPATH": _python_path()}
    try:
        ray.init(address, runtime_env={"env_vars": python_path}, log_to_driver=_show_output(), logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        if isinstance(error, ConnectionError):
            return "it refused us, most likely for its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        return str(error).strip().splitlines()[0]
    hint = "; its commands, like `ray status`, may need RAY_AUTH_MODE=token" if with_token else ""
    print(f"using the Ray that runs at {address} (RAY_ADDRESS=local starts an own one{hint})", flush=True)
    return None


def _answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether a gRPC server listens at ``address``: Ray's own client would try a dead one for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"Ray address {address!r} is not host:port; set RAY_ADDRESS=host:6379 or unset it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return True
            # HTTP/2: the client's preface and an empty SETTINGS frame; a server's first frame is SETTINGS (type 4).
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return connection.recv(9)[3:4] == b"\4"
    except OSError:
        return False


def _start_local(config: RayConfig, undo: contextlib.ExitStack) -> None:
    """Start a Ray for this process alone; ``undo`` gets what takes it away again."""
    environment = {
        "PYTHONPATH": _python_path(),
        # Listen on 127.0.0.1 only, as Ray does by itself on macOS and Windows: nothing reaches it from outside, and a
        # laptop may change its network while it trains.
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        # Our workers each get a process started for them; idle ones only compete for the cores.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    undo.callback(_restore_environment, {name: os.environ.get(name) for name in environment})
    os.environ.update(environment)
    undo.callback(setattr, ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    ray_constants.ENABLE_RAY_CLUSTER = False  # it read the variable when it was imported
    _ensure_token()
    undo.push(_shutdown)
    print("starting Ray", flush=True)
    for _ in range(_START_ATTEMPTS):
        others = set(psutil.Process().children())
        try:
            ray.init(
                "local",
                num_cpus=config.num_cpus,
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                log_to_driver=_show_output(),
                logging_level="ERROR",
            )
            return
        except Exception as error:
            _end(set(psutil.Process().children()) - others)
            # Ray gives its own processes 15 s, fixed, to load their libraries: a cold disk or busy cores take longer,
            # and the next attempt finds the files in memory.
            if "timed out" not in str(error):
                raise
    load = os.getloadavg()[0]
    raise ConnectionError(
        f"Ray didn't start in {_START_ATTEMPTS} attempts; this machine is too busy for it (load {load:.0f} on "
        f"{os.cpu_count()} cores). Stop what else runs, or set RAY_ADDRESS to a Ray that runs"
    )


def _end(processes: set[psutil.Process]) -> None:
    """End what a failed start left: Ray forgets about those processes, and they would live as long as we do."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _ensure_token() -> None:
    """A token for this run where the user has none. Ray would write one into the home folder, where two first runs
    at the same time overwrite each other's."""
    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        loader.reset_cache()


def _object_store_bytes() -> int:
    """Half of the free shared memory, 8 GiB at most (full weights of a 3B model are 6): pages count once used."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return 2 * 2**30
    return max(128 * 2**20, min(8 * 2**30, free // 2))


def _python_path() -> str:
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(REPO_ROOT)]
    return os.pathsep.join([str(REPO_ROOT), *others])


def _show_output() -> bool:
    return os.environ.get("RAY_LOG_TO_DRIVER", "0") not in ("", "0", "false")


def _shutdown(error_type: type[BaseException] | None, *_: object) -> None:
    """Disconnect; end a local Ray, and remove its logs unless the block failed.

    A second Ctrl-C here would leave processes behind: it is ignored.
    """
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    node = ray._private.worker.global_worker.node
    folder = node.get_session_dir_path() if node is not None and node.is_head() else None
    try:
        ray.shutdown()
        if folder and (error_type is None or not issubclass(error_type, Exception)):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _restore_environment(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _restore_sigterm(handler: signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
