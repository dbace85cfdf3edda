"""Groups that teach nothing are replaced: who is asked for, who is trained, what happens at the limit."""

import numpy as np
import torch

from scrl.types import Episode, Turn
from verl.trainer.ppo.batch import assemble
from verl.trainer.ppo.core_algos import silent_rows
from verl.trainer.ppo.dynamic_sampling import Sample, fill
from verl.utils.dataset import Question

PAD, SIZE = 0, 2


def player(loud: str):
    """Plays questions 0, 1, ...; question i has signal where ``loud[i]`` is "1". Returns (play, the calls it got)."""
    calls = []

    def play(count: int, first: int) -> Sample:
        calls.append((count, first))
        places = range(first, first + count)
        questions = [Question(place, f"q{place}", ["x"], "demo", [1] * (1 + place)) for place in places]
        episodes = [
            Episode(
                f"1-{place}", number, place, f"q{place}", ["x"], "demo", [1] * (1 + place), [7] * (2 + place + number),
                [1] * (2 + place + number), [-0.5] * (2 + place + number),
                [Turn("answer", answer="x", span=(0, 2 + place + number))], "answer",
            )
            for place in places
            for number in range(SIZE)
        ]  # fmt: skip
        returns = np.array([number * float(loud[place]) for place in places for number in range(SIZE)])
        batch = assemble(episodes, PAD)
        batch.batch["token_level_scores"] = torch.zeros(batch.batch["responses"].shape)
        batch.batch["token_level_scores"][:, 0] = torch.from_numpy(returns).float()
        return Sample(questions, episodes, batch, {"return": returns})

    return play, calls


def is_silent(sample: Sample) -> list[bool]:
    tensors = sample.batch.batch
    uids = sample.batch.non_tensor_batch["uid"]
    return silent_rows(tensors["token_level_scores"], tensors["response_mask"], uids).tolist()[::SIZE]


def run(loud: str, wanted: int, rounds: int = 9):
    play, calls = player(loud)
    trained, left_out, metrics = fill(play, is_silent, wanted=wanted, max_rounds=rounds, pad_id=PAD)
    names = {name.removeprefix("filter_groups/"): value for name, value in metrics.items()}
    return trained, left_out, names, calls


def places(sample: Sample | None) -> list[int]:
    return [] if sample is None else [question.index for question in sample.questions]


def test_a_batch_full_of_signal_is_played_once_and_left_as_it_is():
    trained, left_out, metrics, calls = run("111", wanted=3)
    assert calls == [(3, 0)] and left_out is None and places(trained) == [0, 1, 2]
    expected = {"gen_batches": 1, "groups_played": 3, "groups_silent": 0, "groups_surplus": 0, "groups_missing": 0}
    assert metrics == expected


def test_silent_groups_are_refilled_by_as_many_as_the_share_so_far_asks_for():
    # 2 of 4 have signal, 2 are missing: 4 more; 1 of these has it, so 3 of 8, and 1 is missing: ceil(8 / 3) = 3 more.
    trained, left_out, metrics, calls = run("0101" + "0001" + "110", wanted=4)
    assert calls == [(4, 0), (4, 4), (3, 8)]
    assert places(trained) == [1, 3, 7, 8] and places(left_out) == [0, 2, 4, 5, 6, 9, 10]
    expected = {"gen_batches": 3, "groups_played": 11, "groups_silent": 6, "groups_surplus": 1, "groups_missing": 0}
    assert metrics == expected


def test_at_the_limit_the_groups_with_signal_make_the_step():
    trained, left_out, metrics, calls = run("0100" + "0010", wanted=4, rounds=2)
    assert calls == [(4, 0), (4, 4)]
    assert places(trained) == [1, 6] and len(places(left_out)) == 6
    assert metrics["groups_missing"] == 2 and metrics["gen_batches"] == 2


def test_where_nothing_has_signal_the_first_batch_is_the_step():
    trained, left_out, metrics, calls = run("0" * 6, wanted=2, rounds=3)
    assert calls == [(2, 0), (2, 2), (2, 4)]
    assert places(trained) == [0, 1] and places(left_out) == [2, 3, 4, 5]
    assert metrics["groups_silent"] == 6 and metrics["groups_missing"] == 2


def test_rows_of_episodes_tensors_and_rewards_stay_together():
    trained, left_out, _, _ = run("01" + "01", wanted=2)
    for sample in (trained, left_out):
        uids = sample.batch.non_tensor_batch["uid"].tolist()
        assert uids == [episode.uid for episode in sample.episodes]
        tensors = sample.batch.batch
        for row, episode in enumerate(sample.episodes):
            prompt, width = len(episode.prompt_ids), tensors["prompts"].shape[1]
            assert tensors["prompts"][row].tolist() == [PAD] * (width - prompt) + episode.prompt_ids
            length = len(episode.response_ids)
            assert tensors["responses"][row, :length].tolist() == episode.response_ids
            assert tensors["response_mask"][row].sum() == length == tensors["turn_index"][row].eq(0).sum()
            assert tensors["attention_mask"][row].sum() == prompt + length
            assert torch.equal(tensors["input_ids"][row], torch.cat([tensors["prompts"], tensors["responses"]], 1)[row])
            assert tensors["token_level_scores"][row].sum() == sample.info["return"][row]
    assert trained.info["return"].tolist() == [0, 1, 0, 1] and not left_out.info["return"].any()
