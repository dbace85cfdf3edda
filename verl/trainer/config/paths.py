"""Where things are: the repository root, a run's folder, and paths that people type."""

import glob
from pathlib import Path

from verl.trainer.config.schema import Config

REPO_ROOT = Path(__file__).resolve().parents[3]


def locate(path: str) -> str:
    """Absolute form of a path or glob: under the working directory if it is there, else under the repository root.

    What is in neither place comes back unchanged, so that an error can show what was typed.
    """
    expanded = Path(path).expanduser()
    for base in (Path.cwd(), REPO_ROOT):
        if (base / expanded).exists():
            return str(base / expanded)
        pattern = Path(glob.escape(str(base))) / expanded  # a bracket in a folder's own name is no pattern
        if glob.has_magic(path) and glob.glob(str(pattern), recursive=True):
            return str(pattern)
    return path


def run_dir(config: Config) -> Path:
    """Where it writes: ``trainer.default_local_dir``, else ``outputs/{project}/{experiment}`` in the repository."""
    trainer = config.trainer
    if trainer.default_local_dir:
        return Path(trainer.default_local_dir).expanduser().absolute()
    return REPO_ROOT / "outputs" / trainer.project_name / trainer.experiment_name
