"""Finished episodes to the padded tensors that the workers take, and to the rows that people read."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scrl.types import Episode, EpisodeRequest, SearchNoise, Turn
from verl.protocol import DataProto
from verl.utils.dataset import Question

MAX_TOKENS_SHOWN = 50_000  # a step; about 2 MB of its rollout file


def group_requests(
    questions: Sequence[Question],
    *,
    n: int,
    step: int,
    max_turns: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    noise: SearchNoise | None = None,
    first: int = 0,
) -> list[EpisodeRequest]:
    """``n`` requests a question, group after group. A group's uid names its step and place in it, from ``first`` on."""
    return [
        EpisodeRequest(
            uid=f"{step}-{first + place}",
            sample_index=sample,
            index=question.index,
            question=question.question,
            ground_truths=question.ground_truths,
            data_source=question.data_source,
            prompt_ids=question.prompt_ids,
            max_turns=max_turns,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            noise=noise,
        )
        for place, question in enumerate(questions)
        for sample in range(n)
    ]


def assemble(episodes: Sequence[Episode], pad_id: int) -> DataProto:
    """B episodes as one batch: prompts left-padded to P, responses right-padded to R.

    An episode that failed keeps its tokens but is masked throughout (``response_mask`` 0), so that it adds nothing.
    """
    prompts = [episode.prompt_ids for episode in episodes]
    responses = [episode.response_ids or [pad_id] for episode in episodes]
    width, length = max(map(len, prompts)), max(map(len, responses))
    size = len(episodes)
    # As arrays: filling a row of a tensor from a list takes six times as long.
    prompt = np.full((size, width), pad_id)
    response = np.full((size, length), pad_id)
    attention = np.zeros((size, width + length), dtype=np.int64)
    mask = np.zeros((size, length), dtype=np.float32)
    logprobs = np.zeros((size, length), dtype=np.float32)
    turn_index = np.full((size, length), -1)
    for row, episode in enumerate(episodes):
        start, end = width - len(prompts[row]), len(responses[row])
        prompt[row, start:] = prompts[row]
        response[row, :end] = responses[row]
        attention[row, start : width + end] = 1
        if episode.finish == "error":
            continue
        sampled = len(episode.response_ids)
        mask[row, :sampled] = episode.response_mask
        logprobs[row, :sampled] = episode.rollout_logprobs
        for number, turn in enumerate(episode.turns):
            turn_index[row, slice(*turn.span)] = number
    arrays = {
        "prompts": prompt,
        "responses": response,
        "input_ids": np.concatenate([prompt, response], axis=1),
        "attention_mask": attention,
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "turn_index": turn_index,
    }
    uids = np.array([episode.uid for episode in episodes], dtype=object)
    return DataProto.from_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, {"uid": uids}, {})


def join(parts: Sequence[DataProto], pad_id: int) -> DataProto:
    """Batches of ``assemble`` (and whatever (B, R) was added to them) as one, padded to the largest P and R."""
    width = max(part.batch["prompts"].shape[1] for part in parts)
    length = max(part.batch["responses"].shape[1] for part in parts)
    return DataProto.concat([_widen(part, width, length, pad_id) for part in parts])


def _widen(part: DataProto, width: int, length: int, pad_id: int) -> DataProto:
    left, right = width - part.batch["prompts"].shape[1], length - part.batch["responses"].shape[1]
    fill = {"prompts": pad_id, "responses": pad_id, "input_ids": pad_id, "turn_index": -1}
    sides = {"prompts": (left, 0), "input_ids": (left, right), "attention_mask": (left, right)}
    tensors = {
        name: F.pad(tensor, sides.get(name, (0, right)), value=fill.get(name, 0)) for name, tensor in part.batch.items()
    }
    return DataProto.from_dict(tensors, part.non_tensor_batch, part.meta_info)


def episode_rows(
    episodes: Sequence[Episode],
    tokenizer: Any,
    info: Mapping[str, np.ndarray],
    tensors: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:
    """One JSON-able row an episode, in the given order: the family's ``idx``, ``question`` and ``message_str``, and
    beside them golds, answer, turns and the reward's components.

    ``tensors``, each (B, R), of a trained batch: with ``advantages`` and ``token_level_scores`` a row tells what each
    turn earned; with ``old_log_probs`` and ``response_mask`` too, the first ``MAX_TOKENS_SHOWN`` sampled tokens of the
    batch are written down one by one.
    """
    rows = []
    text_of = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))
    room = MAX_TOKENS_SHOWN
    names = ("advantages", "token_level_scores", "old_log_probs", "response_mask")
    # As arrays: a look into one costs a tenth of a tensor's, and there are several a turn.
    arrays = {name: tensors[name].numpy() for name in names if name in tensors.keys()} if tensors is not None else {}
    rewards = {
        name: (values if values.dtype == object else values.astype(float).round(6)).tolist()
        for name, values in info.items()
    }
    for place, episode in enumerate(episodes):
        row = {
            "idx": episode.index,
            "question": episode.question,
            "message_str": episode.message_str,
            "ground_truths": episode.ground_truths,
            "data_source": episode.data_source,
            "answer": episode.answer,
            "finish": episode.finish,
            "error": episode.error,
            "uid": episode.uid,
            "sample_index": episode.sample_index,
            "search_depth": episode.search_depth,
            "turns": [_turn_row(turn) for turn in episode.turns],
            "reward": {name: values[place] for name, values in rewards.items()},
        }
        rows.append(row)
        if not arrays:
            continue
        spans = [slice(*turn.span) for turn in episode.turns]
        row["advantage"] = [float(arrays["advantages"][place, span.stop - 1]) for span in spans]
        if "token_level_scores" in arrays:
            row["turn_reward"] = [float(arrays["token_level_scores"][place, span].sum()) for span in spans]
        room -= sum(span.stop - span.start for span in spans)
        if "old_log_probs" in arrays and room >= 0:
            for turn, span in zip(row["turns"], spans, strict=True):
                turn["tokens"] = _token_row(episode, place, span, arrays, text_of)
    return rows


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = {
        "kind": turn.kind,
        "think": turn.think,
        "queries": turn.queries,
        "answer": turn.answer,
        "reason": turn.reason,
        "observation": turn.observation,
        "observation_tokens": turn.observation_tokens,
        "search_ok": turn.search_ok,
        "latency_s": round(turn.latency_s, 4),
        "generate_s": round(turn.generate_s, 4),
    }
    if turn.tool_call is not None:
        row["tool_call"] = {"name": turn.tool_call.name, "arguments": turn.tool_call.arguments}
    if turn.kind == "malformed":
        row["text"] = turn.text
    return row


def _token_row(
    episode: Episode, place: int, span: slice, arrays: Mapping[str, np.ndarray], text_of: Callable[[int], str]
) -> dict[str, str]:
    """A turn's sampled tokens. Columns are strings of numbers, as JSON lists would take a line for each number.

    ``text`` is all of them together and ``widths`` each one's characters of it; ``loss`` holds a 1 for each token that
    carries loss; ``engine`` and ``trainer`` are log-probs at the sampling temperature.
    """
    ids = episode.response_ids[span]
    texts = [text_of(token) for token in ids]
    return {
        "ids": " ".join(map(str, ids)),
        "text": "".join(texts),
        "widths": " ".join(str(len(text)) for text in texts),
        "loss": "".join("1" if kept else "0" for kept in arrays["response_mask"][place, span].tolist()),
        "engine": " ".join(f"{value:.4f}" for value in episode.rollout_logprobs[span]),
        "trainer": " ".join(f"{value:.4f}" for value in arrays["old_log_probs"][place, span].tolist()),
    }
