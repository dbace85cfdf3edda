"""What a run has trained as a model of its own, or as a PEFT adapter that transformers, PEFT and vLLM load.

    python scripts/merge_lora.py outputs/{project}/{experiment} --output merged
    python scripts/merge_lora.py outputs/.../checkpoints/global_step_20 --output adapter --adapter-only

A run's folder means its latest checkpoint; a checkpoint or its adapter folder can be named too. The merged model is
computed in float32 and written in the precision in which the base stands, with the base's tokenizer. The adapter of a
checkpoint is in PEFT's own format already, so --adapter-only checks it and copies it.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any directory

from verl.utils.checkpoint import STEP_DIR, CheckpointManager, is_disk_full  # noqa: E402

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def find_weights(path: Path) -> Path:
    """The ``adapter`` or ``model`` folder of the checkpoint that ``path`` is, holds or belongs to.

    Raises ValueError where there is none.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder; give a run's folder, a checkpoints/global_step_N or an adapter's folder"
        )
    if (path / ADAPTER_FILES[0]).is_file() or (path / "config.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        latest = CheckpointManager(folder, clean=False).find()
        if latest is not None:
            path = latest
            break
    found = [path / name for name in ("adapter", "model") if (path / name).is_dir()]
    if not found:
        raise ValueError(
            f"{path} holds no checkpoint: neither checkpoints/global_step_N, nor adapter/ or model/; train first "
            "(bash train_grpo.sh), or name a folder that has one"
        )
    return found[0]


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_FILES[0]).is_file()


def export_adapter(adapter: Path, base: str | None, output: Path) -> None:
    """Copy an adapter; ``base`` is written down as what it belongs to.

    Raises ValueError where it is none that PEFT can read.
    """
    config = _read_config(adapter)
    _tensor_names(adapter)
    _need_space(output, sum((adapter / name).stat().st_size for name in ADAPTER_FILES))
    output.mkdir()
    shutil.copyfile(adapter / ADAPTER_FILES[1], output / ADAPTER_FILES[1])
    config = config if base is None else config | {"base_model_name_or_path": base}
    (output / ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def export_model(model: Path, output: Path) -> None:
    """Copy a model that was trained whole."""
    _need_space(output, sum(file.stat().st_size for file in model.rglob("*") if file.is_file()))
    shutil.copytree(model, output)


def merge(adapter: Path, base: str | None, output: Path) -> None:
    """Write W + scale B A for every adapted W of ``base`` (None: the one that the adapter names).

    Raises ValueError where the base can't be loaded, or the adapter belongs to another one.
    """
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = base or _read_config(adapter).get("base_model_name_or_path") or ""
    try:
        stored = AutoConfig.from_pretrained(base).dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the base model {base!r} can't be loaded ({reason}); name the folder it is in now: --base PATH"
        ) from error
    names = _tensor_names(adapter)
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter))
    except (RuntimeError, ValueError) as error:  # shapes, or layers that the base doesn't have
        raise ValueError(
            f"{adapter} doesn't fit {base}: {_last_line(error)}; name its own base: --base PATH"
        ) from error
    if odd := names.symmetric_difference(get_peft_model_state_dict(adapted)):
        raise ValueError(f"{adapter} doesn't fit {base}: {sorted(odd)[0]} is in one of them only; name its own base")
    merged = adapted.merge_and_unload(safe_merge=True).to(stored)
    _need_space(output, sum(p.numel() * p.element_size() for p in merged.parameters()))
    merged.save_pretrained(output)
    tokenizer.save_pretrained(output)


def write_whole(write: Callable[[Path], None], output: Path) -> None:
    """Call ``write`` with a path beside ``output`` and rename what it wrote: ``output`` is whole or not there.

    Raises ValueError where something is there already, or the disk is full.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already; remove it, or name another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        write(unfinished)
        unfinished.rename(output)
    except Exception as error:
        if is_disk_full(error):
            raise ValueError(f"the disk of {output} is full; free some space, or name another --output") from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_config(adapter: Path) -> dict:
    try:
        config = json.loads((adapter / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{adapter / ADAPTER_FILES[0]} can't be read ({error}); take another checkpoint") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{adapter / ADAPTER_FILES[0]} describes no LoRA adapter; take another checkpoint")
    return config


def _tensor_names(adapter: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(adapter / ADAPTER_FILES[1], "pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{adapter / ADAPTER_FILES[1]} can't be read ({error}); take another checkpoint") from error


def _need_space(output: Path, size: int) -> None:
    free = shutil.disk_usage(output.parent).free
    if free < size:
        raise ValueError(
            f"{size / 1e9:.2f} GB are to be written and the disk of {output.parent} has {free / 1e9:.2f} GB; free some "
            "space, or name another --output"
        )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip().rstrip(".")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its latest), a global_step_N or an adapter")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; it must not be there yet")
    parser.add_argument("--adapter-only", action="store_true", help="a PEFT adapter rather than a merged model")
    parser.add_argument("--base", help="the base model's folder or name (default: the one it was trained on)")
    args = parser.parse_args(argv)
    try:
        found, output = find_weights(args.checkpoint.expanduser()), args.output.expanduser().absolute()
        if not is_adapter(found):
            if args.adapter_only:
                raise ValueError(f"{found} was trained whole, without an adapter; leave --adapter-only away")
            write_whole(lambda folder: export_model(found, folder), output)
            what = "was trained whole, so there is nothing to merge: exported as it is"
        elif args.adapter_only:
            write_whole(lambda folder: export_adapter(found, args.base, folder), output)
            what = "exported as a PEFT adapter"
        else:
            write_whole(lambda folder: merge(found, args.base, folder), output)
            what = "merged"
    except (ValueError, OSError) as error:
        print(f"merge_lora: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("merge_lora: stopped; nothing was written", file=sys.stderr)
        return 130
    step = next((folder.name for folder in (found, *found.parents) if STEP_DIR.fullmatch(folder.name)), found.name)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{step} {what}: {output} ({size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
