"""Tokenizers from a folder or a name."""

from typing import Any

from verl.utils.hub import model_folder


def load_tokenizer(path: str) -> Any:
    """A model's tokenizer, with a pad token. Raises ValueError where ``path`` holds none."""
    from transformers import AutoTokenizer

    folder = model_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"actor_rollout_ref.model.path={path!r} holds no tokenizer ({reason}); give a model's folder or name"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
