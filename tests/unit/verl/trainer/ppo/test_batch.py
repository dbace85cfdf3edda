"""Episodes to tensors, worked by hand."""

import numpy as np
import torch
from tensordict import TensorDict

from scrl.types import Episode, ToolCall, Turn
from verl.trainer.ppo.batch import assemble, episode_rows, group_requests
from verl.utils.dataset import Question

PAD = 0


def episode(**changes) -> Episode:
    """A searching episode: turn 0 samples 11 12, the frame is 90 91 92, turn 1 samples 13."""
    fields = {
        "uid": "1-0",
        "sample_index": 0,
        "index": 7,
        "question": "Who?",
        "ground_truths": ["Ann"],
        "data_source": "demo",
        "prompt_ids": [1, 2, 3],
        "response_ids": [11, 12, 90, 91, 92, 13],
        "response_mask": [1, 1, 0, 0, 0, 1],
        "rollout_logprobs": [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0],
        "turns": [
            Turn("tool_call", tool_call=ToolCall("web_search", {"query": ["q"]}), queries=["q"], span=(0, 2)),
            Turn("answer", answer="Ann", span=(5, 6)),
        ],
        "finish": "answer",
    }
    return Episode(**(fields | changes))


def short(**changes) -> Episode:
    fields = {
        "uid": "1-1",
        "prompt_ids": [1],
        "response_ids": [21],
        "response_mask": [1],
        "rollout_logprobs": [-2.0],
        "turns": [Turn("answer", answer="Bo", span=(0, 1))],
    }
    return episode(**(fields | changes))


def test_rows_are_padded_on_their_sides_and_nothing_else_changes():
    batch = assemble([episode(), short()], PAD).batch
    assert batch["prompts"].tolist() == [[1, 2, 3], [PAD, PAD, 1]]
    assert batch["responses"].tolist() == [[11, 12, 90, 91, 92, 13], [21, PAD, PAD, PAD, PAD, PAD]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 11, 12, 90, 91, 92, 13], [0, 0, 1, 21, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 9, [0, 0, 1, 1, 0, 0, 0, 0, 0]]


def test_mask_logprobs_and_turns_stand_on_the_sampled_tokens():
    batch = assemble([episode(), short()], PAD).batch
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0, 0, 0, -1.0], [-2.0, 0, 0, 0, 0, 0]]
    assert batch["turn_index"].tolist() == [[0, 0, -1, -1, -1, 1], [0, -1, -1, -1, -1, -1]]
    assert batch["response_mask"].dtype == torch.float32


def test_the_trained_ids_are_the_sampled_ids():
    one = episode()
    batch = assemble([one, short()], PAD).batch
    trained = batch["responses"][0][batch["response_mask"][0].bool()].tolist()
    sampled = [token for turn in one.turns for token in one.response_ids[slice(*turn.span)]]
    assert trained == sampled == [11, 12, 13]


def test_a_failed_episode_is_masked_throughout_and_a_silent_one_has_a_row():
    batch = assemble([episode(finish="error"), short(response_ids=[], response_mask=[], rollout_logprobs=[])], PAD)
    assert batch.batch["response_mask"].sum() == 0
    assert len(batch) == 2


def test_groups_share_a_uid_and_steps_do_not():
    questions = [Question(4, "a?", ["x"], "demo", [1]), Question(9, "b?", ["y"], "demo", [2])]
    options = {"n": 2, "max_turns": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5}
    requests = group_requests(questions, step=3, **options)
    assert [(r.uid, r.sample_index, r.index) for r in requests] == [
        ("3-0", 0, 4),
        ("3-0", 1, 4),
        ("3-1", 0, 9),
        ("3-1", 1, 9),
    ]
    later = group_requests(questions, step=4, **options)
    assert not {r.uid for r in requests} & {r.uid for r in later}


def test_rows_for_people_hold_the_turns_with_their_advantages():
    info = {"f1": np.array([1.0])}
    info["phi"] = np.empty(1, dtype=object)
    info["phi"][0] = [0.0, 1.0, 1.0]
    advantages = torch.tensor([[0.1, 0.2, 0.0, 0.0, 0.0, 0.3]])
    (row,) = episode_rows([episode(message_str="all of it")], Letters(), info, {"advantages": advantages})
    assert row["message_str"] == "all of it"
    assert (row["idx"], row["question"], row["ground_truths"], row["answer"]) == (7, "Who?", ["Ann"], "Ann")
    assert [turn["kind"] for turn in row["turns"]] == ["tool_call", "answer"]
    assert row["turns"][0]["queries"] == ["q"]
    assert row["reward"] == {"f1": 1.0, "phi": [0.0, 1.0, 1.0]}
    assert [round(value, 4) for value in row["advantage"]] == [0.2, 0.3]


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join({11: "é", 12: "<|im_end|>", 13: "Ann"}.get(token, "?") for token in ids)


def trained(row: Episode) -> TensorDict:
    tensors = assemble([row, episode(finish="error")], PAD).batch
    tensors["old_log_probs"] = tensors["rollout_log_probs"] + 0.125
    tensors["advantages"] = torch.full((2, 6), 0.5)
    tensors["token_level_scores"] = torch.tensor([[0.0, -0.25, 9.0, 9.0, 9.0, 1.0], [0.0] * 6])
    return tensors


def test_rows_of_a_trained_batch_hold_what_a_turn_earned_and_its_tokens():
    rows = episode_rows([episode(), episode(finish="error")], Letters(), {}, trained(episode()))
    assert rows[0]["turn_reward"] == [-0.25, 1.0]
    assert rows[0]["turns"][0]["tokens"] == {
        "ids": "11 12",
        "text": "é<|im_end|>",
        "widths": "1 10",
        "loss": "11",
        "engine": "-0.5000 -0.2500",
        "trainer": "-0.3750 -0.1250",
    }
    assert rows[0]["turns"][0]["tool_call"] == {"name": "web_search", "arguments": {"query": ["q"]}}
    assert [turn["tokens"]["loss"] for turn in rows[1]["turns"]] == ["00", "0"]  # failed: no loss


def test_tokens_are_written_for_the_first_episodes_only(monkeypatch):
    monkeypatch.setattr("verl.trainer.ppo.batch.MAX_TOKENS_SHOWN", 5)
    rows = episode_rows([episode(), episode()], Letters(), {}, trained(episode()))
    assert [["tokens" in turn for turn in row["turns"]] for row in rows] == [[True, True], [False, False]]
