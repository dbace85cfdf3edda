"""Models that come from ModelScope instead of Hugging Face: ``modelscope://organisation/name``.

With ``VERL_USE_MODELSCOPE=True``, as verl's users know it, every name that is no folder means that. The name is settled
once, where the configuration is read; the download happens in each process that loads the model, since a node of a
cluster may lack it (ModelScope locks and caches it).
"""

import importlib.util
import os
import re
from pathlib import Path

MODELSCOPE = "modelscope://"


def settle_name(path: str) -> str:
    """``path`` as the configuration should hold it: with the prefix where the environment asks for ModelScope."""
    asked = os.environ.get("VERL_USE_MODELSCOPE", "").strip().lower() in ("true", "1", "yes")
    return f"{MODELSCOPE}{path}" if asked and is_name(path) and not Path(path).exists() else path


def is_name(path: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith(".")


def check_name(path: str) -> None:
    """ValueError where ``path`` means ModelScope and can't be fetched from there. Asks no network."""
    if not path.startswith(MODELSCOPE):
        return
    if not is_name(path.removeprefix(MODELSCOPE)):
        raise ValueError(f"{path!r} names no model; write {MODELSCOPE}organisation/name")
    if importlib.util.find_spec("modelscope") is None:
        raise ValueError(
            f"{path} is on ModelScope, and the package modelscope isn't installed; pip install modelscope, or name a "
            "folder or a Hugging Face model (and unset VERL_USE_MODELSCOPE)"
        )


def model_folder(path: str) -> str:
    """What transformers and vLLM load: a ModelScope name's downloaded folder, anything else as it is.

    Raises ValueError where it can't be downloaded.
    """
    check_name(path)
    if not path.startswith(MODELSCOPE):
        return path
    from modelscope import snapshot_download

    try:
        return snapshot_download(path.removeprefix(MODELSCOPE))
    except (OSError, ValueError) as error:  # its network errors are OSErrors
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} can't be fetched ({reason}); check the name and the network, or name a folder that holds the model"
        ) from error
