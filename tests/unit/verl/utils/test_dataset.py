"""Rows become questions; what is wrong with a file is said once, with its place; batches resume where they stopped."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scrl.llm_agent.prompts import encode_prompt
from verl.utils.dataset import QuestionStream, RLHFDataset

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that lengths can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={ch: i for i, ch in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    return fast


def row(
    question: str = "Who wrote Dune?", gold: str = "Frank Herbert<|answer_split|>Herbert", key: str = "nq_1"
) -> dict:
    return {
        "data_source": "nq",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "qa",
        "reward_model": {"ground_truth": gold, "style": "unknown"},
        "extra_info": {"index": key, "split": "dev"},
    }


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write(path, [row(question=f"Question {i}?", key=f"k{i}") for i in range(count)])


def load(files, tokenizer, **options) -> RLHFDataset:
    return RLHFDataset(files, tokenizer, **{"max_prompt_length": 4096, **options})


def test_a_row_becomes_a_question(tmp_path, tokenizer):
    dataset = load(write(tmp_path / "d.parquet", [row(), row("Where is Pi?", "Nowhere", "x")]), tokenizer)
    first, second = dataset[0], dataset[-1]
    assert len(dataset) == 2
    assert first.question == "Who wrote Dune?"
    assert first.ground_truths == ["Frank Herbert", "Herbert"]
    assert (first.index, first.key, first.data_source) == (0, "nq_1", "nq")
    assert first.prompt_ids == encode_prompt(tokenizer, "Who wrote Dune?")
    assert (second.index, second.ground_truths) == (1, ["Nowhere"])


def test_several_files_and_globs_keep_their_order(tmp_path, tokenizer):
    numbered(tmp_path / "b.parquet", 1)
    write(tmp_path / "a.parquet", [row("A?")])
    by_name = load([str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")], tokenizer)
    by_glob = load(str(tmp_path / "*.parquet"), tokenizer)
    assert [by_name[i].question for i in range(2)] == ["Question 0?", "A?"]
    assert [by_glob[i].question for i in range(2)] == ["A?", "Question 0?"]
    assert len(load(str(tmp_path / "*.parquet"), tokenizer, max_samples=1)) == 1


def test_a_system_message_before_the_question_and_a_list_of_golds_are_read(tmp_path, tokenizer):
    given = row()
    given["prompt"] = [{"content": "Be brief.", "role": "system"}, {"content": " Who? ", "role": "user"}]
    given["reward_model"] = {"ground_truth": ["a", "b<|answer_split|>c"], "style": "x"}
    question = load(write(tmp_path / "d.parquet", [given]), tokenizer)[0]
    assert question.question == "Who?"
    assert question.ground_truths == ["a", "b", "c"]


def test_a_missing_column_is_named_beside_those_that_exist(tmp_path, tokenizer):
    broken = row()
    del broken["reward_model"]
    with pytest.raises(
        ValueError, match=r"d\.parquet: column reward_model is missing; it has data_source, prompt, abil"
    ):
        load(write(tmp_path / "d.parquet", [broken]), tokenizer)


def test_empty_golds_are_listed_five_at_most(tmp_path, tokenizer):
    rows = [row()] + [row(gold=" <|answer_split|> ", key=f"k{i}") for i in range(7)]
    with pytest.raises(ValueError) as caught:
        load(write(tmp_path / "d.parquet", rows), tokenizer)
    message = str(caught.value)
    assert "7 unusable rows" in message and "row 1 (k0): empty reward_model.ground_truth" in message
    assert "k4" in message and "k5" not in message and "2 more" in message


def test_a_row_without_a_question_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="row 0 .nq_1.: no user message"):
        load(write(tmp_path / "d.parquet", [row("  ")]), tokenizer)


@pytest.mark.parametrize("files", ["nowhere.parquet", "nowhere/*.parquet"])
def test_a_wrong_path_is_named(files, tokenizer):
    with pytest.raises(ValueError, match="no such data file: nowhere"):
        load(files, tokenizer)


def test_a_file_that_is_not_parquet_is_named(tmp_path, tokenizer):
    (tmp_path / "d.parquet").write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"d\.parquet can't be read as parquet"):
        load(str(tmp_path / "d.parquet"), tokenizer)


def test_prompt_length_is_checked_to_the_token(tmp_path, tokenizer):
    long = "why " * 30 + "?"
    path = write(tmp_path / "d.parquet", [row(), row(long, key="long_1"), row(long[4:], key="long_2")])
    tokens = len(encode_prompt(tokenizer, long))
    assert len(load(path, tokenizer, max_prompt_length=tokens)) == 3
    with pytest.raises(ValueError) as caught:
        load(path, tokenizer, max_prompt_length=tokens - 1)
    message = str(caught.value)
    assert f"row 1 (long_1): the prompt has {tokens} tokens" in message
    assert f"data.max_prompt_length={tokens - 1} (1 of 3 rows" in message and f"to {tokens}" in message


def test_a_question_with_special_tokens_stays_text(tmp_path, tokenizer):
    dataset = load(write(tmp_path / "d.parquet", [row("<|im_start|>assistant")]), tokenizer)
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert dataset[0].prompt_ids.count(special) == 3  # system, user, assistant: the frame's own


def test_an_epoch_shows_every_question_once_and_no_batch_one_twice(tmp_path, tokenizer):
    dataset = load(numbered(tmp_path / "d.parquet", 10), tokenizer)
    for seed in range(20):
        stream = QuestionStream(dataset, 4, seed=seed)
        batches = [[q.index for q in stream.next_batch()] for _ in range(5 * 5)]
        assert all(len(set(batch)) == 4 for batch in batches)
        drawn = [i for batch in batches for i in batch]
        for epoch in range(10):
            assert sorted(drawn[epoch * 10 : epoch * 10 + 10]) == list(range(10))
        assert drawn[:10] != drawn[10:20]


def test_steps_cover_the_epochs(tmp_path, tokenizer):
    stream = QuestionStream(load(numbered(tmp_path / "d.parquet", 10), tokenizer), 4)
    assert [stream.steps(epochs) for epochs in (1, 2, 3)] == [3, 5, 8]


def test_without_shuffle_the_order_is_the_files(tmp_path, tokenizer):
    stream = QuestionStream(load(numbered(tmp_path / "d.parquet", 4), tokenizer), 2, shuffle=False)
    assert [[q.index for q in stream.next_batch()] for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7, 12])
def test_a_resumed_stream_goes_on_as_if_never_stopped(tmp_path, tokenizer, done):
    dataset = load(numbered(tmp_path / "d.parquet", 10), tokenizer)
    for seed in range(20):  # in some of them an epoch begins with what the one before has left for the same batch
        whole = QuestionStream(dataset, 4, seed=seed)
        expected = [[q.index for q in whole.next_batch()] for _ in range(20)]
        first = QuestionStream(dataset, 4, seed=seed)
        for _ in range(done):
            first.next_batch()
        state = json.loads(json.dumps(first.state_dict()))
        second = QuestionStream(dataset, 4, seed=seed)
        second.next_batch()
        second.load_state_dict(state)
        assert [[q.index for q in second.next_batch()] for _ in range(20 - done)] == expected[done:]


def test_fewer_questions_at_once_change_neither_the_order_nor_what_is_resumed(tmp_path, tokenizer):
    """Refills ask for any number; what is left of a batch comes first the next time, also after resuming."""
    dataset = load(numbered(tmp_path / "d.parquet", 10), tokenizer)
    whole = QuestionStream(dataset, 4, seed=3)
    expected = [q.index for _ in range(20) for q in whole.next_batch()]
    asked, first, drawn = [4, 3, 1, 4, 2, 4, 4, 7, 4], QuestionStream(dataset, 4, seed=3), []
    for count in asked:
        taken = first.next_batch(None if count == 4 else count)
        assert len(taken) == count
        drawn += [q.index for q in taken]
    assert drawn == expected[: sum(asked)]
    state = json.loads(json.dumps(first.state_dict()))
    assert len(state["held"]) == -sum(asked) % 4
    second = QuestionStream(dataset, 4, seed=3)
    second.next_batch(3)
    second.load_state_dict(state)
    rest = [q.index for q in second.next_batch(5) + second.next_batch()]
    assert rest == expected[sum(asked) :][:9]
    del state["held"]  # a checkpoint from before there were refills
    second.load_state_dict(state)
    assert [q.index for q in second.next_batch()] == expected[-(-sum(asked) // 4) * 4 :][:4]


def test_a_stream_refuses_a_state_of_other_data_or_settings(tmp_path, tokenizer):
    dataset = load(numbered(tmp_path / "d.parquet", 10), tokenizer)
    other = load(write(tmp_path / "e.parquet", [row(f"Other {i}?") for i in range(10)]), tokenizer)
    state = QuestionStream(dataset, 4, seed=3).state_dict()
    for stream, named in [
        (QuestionStream(dataset, 5, seed=3), "train_batch_size=4, this run has 5"),
        (QuestionStream(dataset, 4, seed=2), "seed=3, this run has 2"),
        (QuestionStream(dataset, 4, seed=3, shuffle=False), "shuffle=True"),
        (QuestionStream(other, 4, seed=3), "fingerprint="),
    ]:
        with pytest.raises(ValueError, match=named):
            stream.load_state_dict(state)


def test_a_batch_larger_than_the_data_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="train_batch_size=5 is more than the 4 questions"):
        QuestionStream(load(numbered(tmp_path / "d.parquet", 4), tokenizer), 5)


REAL = Path(__file__).resolve().parents[5] / "shared" / "data" / "deepresearcher"


@pytest.mark.skipif(not (REAL / "dev.parquet").is_file(), reason="DeepResearcher's data is not beside the repository")
def test_deepresearchers_own_rows_load(tokenizer):
    dataset = load([str(REAL / "dev.parquet"), str(REAL / "test.parquet")], tokenizer)
    assert len(dataset) == 875 + 3197
    sources = {dataset._rows[i].data_source for i in range(len(dataset))}
    assert sources == {"nq", "tq", "popqa", "hotpotqa", "2wiki", "musique", "Bamboogle"}
    assert dataset[1].ground_truths == ["Jacob", "Israel", "Ya'akov", "Ya'aqov", "Yaakov", "Yisrael"]
