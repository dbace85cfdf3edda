"""Train, or with ``trainer.val_only=true`` evaluate: ``python -m verl.trainer.main_ppo [key=value ...]``."""

import argparse
import logging
import sys
import traceback
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from verl.trainer.config import REPO_ROOT, Config, config_to_yaml, load_config
from verl.trainer.config.loading import key_table, profiles
from verl.trainer.config.validation import check_inputs
from verl.utils.checkpoint import CheckpointError, is_disk_full

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake (one sentence), 1 a failure, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="main_ppo", description="Train a search agent.", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if options.help:
        print(usage())
        return 0
    try:
        if options.cfg:  # hydra's "--cfg job" is the same
            print(config_to_yaml(load_config([text for text in overrides if text != "job"])), end="")
            return 0
        config = load_config(overrides)
        check_inputs(config)
    except ValueError as error:
        return _fail(str(error), USER_ERROR)
    return _run(config)


def usage() -> str:
    """The keys in short: name, default, meaning."""
    head = (
        "usage: main_ppo [key=value ...] [--cfg] [--help]\n\n"
        f"  profile=NAME  start from a recipe: {', '.join(profiles())}\n"
        "  --cfg         print the resolved configuration and stop\n"
    )
    return head + "\n" + "\n".join(f"  {key}={value}\n      {meaning}" for key, value, meaning in key_table())


def _run(config: Config) -> int:
    # ray, torch, transformers: only once the settings are known to be good
    print("loading PyTorch and Ray", flush=True)
    from verl.single_controller import WorkerDied
    from verl.trainer.ppo.ray_trainer import run

    try:
        run(config)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "stopped", INTERRUPTED)
    except (CheckpointError, WorkerDied, TimeoutError, ConnectionError, FloatingPointError) as error:
        return _fail(str(error), FAILURE)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return _fail(f"the disk is full ({error}); free some space and start again to resume", FAILURE)
    except ValueError as error:
        if (sentence := users_mistake(error)) is None:
            raise
        return _fail(sentence, USER_ERROR)
    return 0


def users_mistake(error: ValueError) -> str | None:
    """The sentence of a ValueError that this project raised on purpose; None for one that is a bug (show it whole).

    Ours are raised by our own line; a bug's last frame is in a library. One that came back from a Ray worker holds the
    worker's traceback as text: in its notes, or in its own text with the worker's exception as ``cause``.
    """
    cause = getattr(error, "cause", None)
    notes = "\n".join(getattr(error, "__notes__", ()))
    remote = str(error) if isinstance(cause, ValueError) else notes
    frames = [line for line in remote.splitlines() if line.lstrip().startswith('File "')]
    if frames:
        raised_in = frames[-1].split('"')[1]
    else:
        stack = traceback.extract_tb(error.__traceback__)
        raised_in = stack[-1].filename if stack else ""
    cause = cause if isinstance(cause, ValueError) else error
    ours = any(Path(raised_in).is_relative_to(REPO_ROOT / package) for package in ("verl", "scrl"))
    return str(cause) if ours else None


def _fail(sentence: str, code: int) -> int:
    print(f"main_ppo: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
