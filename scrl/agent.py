"""The trained agent as one object: a rollout worker in this process, asked one question at a time."""

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrl.llm_agent.generation import EpisodeListener
from scrl.llm_agent.prompts import encode_prompt, writable
from scrl.types import Episode, EpisodeRequest

if TYPE_CHECKING:
    from verl.trainer.config.schema import Config

CHECKPOINT = "global_step_"


def find_run(adapter: Path) -> Path | None:
    """The config.yaml of the run whose checkpoint ``adapter`` is; None for one from elsewhere."""
    for folder in adapter.resolve().parents:
        if folder.name == "checkpoints":
            config = folder.parent / "config.yaml"
            return config if config.is_file() else None
    return None


def latest_checkpoint(run: Path) -> Path:
    """The newest ``global_step_{n}`` of a run's folder. ValueError where there is none."""
    found = [path for path in (run / "checkpoints").glob(f"{CHECKPOINT}*") if path.name[len(CHECKPOINT) :].isdigit()]
    if not found:
        raise ValueError(
            f"{run} has no checkpoint; train first (bash train_grpo.sh), or name one: --model PATH [--adapter PATH], "
            "such as the demo's untrained one: --model data/demo/policy"
        )
    return max(found, key=lambda path: int(path.name[len(CHECKPOINT) :]))


def read_adapter(folder: Path) -> dict[str, Any]:
    """A PEFT adapter, or the checkpoint that holds one, as engines take weights. ValueError for anything else."""
    from safetensors.torch import load_file

    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return {"weights": load_file(folder / "adapter_model.safetensors"), "peft_config": config}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no PEFT adapter ({error}); give a folder with adapter_config.json and "
            "adapter_model.safetensors, or a run's checkpoints/global_step_N"
        ) from None


class Agent:
    """Answers questions with the episode loop, prompts, tools and engine of training."""

    def __init__(self, config: "Config", adapter: Path | None = None) -> None:
        from verl.utils.tokenizer import load_tokenizer
        from verl.workers.rollout_worker import RolloutWorker

        self.config = config
        self._weights = None if adapter is None else read_adapter(adapter)
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        self._worker = RolloutWorker(config, 0)
        self._numbers = itertools.count()
        self._is_open = False

    async def open(self) -> "Agent":
        """Load model and search, quietly; once. Raises ValueError for what can't be loaded, or doesn't answer."""
        from transformers.utils import logging

        if not self._is_open:
            logging.disable_progress_bar()
            await self._worker.ready(self._weights, version=1)
            self._is_open = True
        return self

    def encode(self, question: str) -> list[int]:
        """The prompt's token ids. Raises ValueError for a question that is empty or doesn't fit."""
        if not question.strip():
            raise ValueError("there is no question")
        prompt_ids = encode_prompt(self.tokenizer, question, self.config.tools)
        longest = self.config.data.max_prompt_length
        if len(prompt_ids) > longest:
            raise ValueError(
                f"the question is too long: {len(prompt_ids)} tokens with the instructions, and "
                f"data.max_prompt_length={longest}; ask in fewer words"
            )
        return prompt_ids

    async def answer(self, question: str, listener: EpisodeListener | None = None, temperature: float = 0.0) -> Episode:
        """Play one episode. Raises ValueError as ``encode`` does."""
        prompt_ids = self.encode(question)
        request = EpisodeRequest(
            uid=f"ask-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}",
            sample_index=0,
            index=next(self._numbers),
            question=writable(question),
            ground_truths=[],
            data_source="ask",
            prompt_ids=prompt_ids,
            max_turns=self.config.max_turns,
            temperature=temperature,
        )
        return await self._worker.play(request, listener)

    def save(self, episode: Episode) -> Path:
        """Write the episode as rollout files have it; scripts/view_rollouts.py and scripts/report.py open it."""
        from verl.trainer.config.paths import REPO_ROOT
        from verl.trainer.ppo.batch import episode_rows
        from verl.utils.checkpoint import save_json

        folder = REPO_ROOT / "outputs" / "ask"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{episode.uid}.json"
        save_json(file, episode_rows([episode], self.tokenizer, {}))
        return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file

    @property
    def failed(self) -> bool:
        """Its engine has died, and answers no more."""
        return self._is_open and self._worker.failed

    def close(self) -> None:
        self._worker.close()
        self._is_open = False
