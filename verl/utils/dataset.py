"""Questions from parquet files in the DeepResearcher row format, and the order in which training draws them."""

import glob
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scrl.llm_agent.prompts import encode_prompt
from verl.utils.reward_score.qa import split_golds

COLUMNS = ("data_source", "prompt", "reward_model")


@dataclass(frozen=True)
class Question:
    """One row. ``index`` is its place in the dataset; ``key`` is the row's own ``extra_info.index``, "" without one."""

    index: int
    question: str
    ground_truths: list[str]
    data_source: str
    prompt_ids: list[int]
    key: str = ""


class RLHFDataset:
    """Rows of one or many parquet files, in order, checked when they are loaded and tokenised when they are drawn.

    A row: ``data_source``; ``prompt``, a list of {role, content} whose last user message is the question;
    ``reward_model.ground_truth``, the aliases joined by ``<|answer_split|>``; optionally ``extra_info.index``.

    Raises ValueError, naming file and row, for a missing file or column, a row without question or gold, and a prompt
    (system prompt, tools and question) of more than ``max_prompt_length`` tokens.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        *,
        max_prompt_length: int,
        max_samples: int | None = None,
        tools: tuple[str, ...] = ("web_search",),
    ) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_length = max_prompt_length
        self._tools = tools
        self._rows: list[QuestionRow] = []
        for path in expand_files(files):
            self._rows.extend(read_rows(path))
        if not self._rows:
            raise ValueError(f"{files} hold no rows; a dataset needs at least one question")
        self._rows = self._rows[:max_samples]
        self._check_prompt_lengths()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Question:
        row = self._rows[index]
        return Question(
            index=range(len(self))[index],
            question=row.question,
            ground_truths=list(row.ground_truths),
            data_source=row.data_source,
            prompt_ids=self._encode(row.question),
            key=row.key,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any question, gold or their order: a resumed run must see the same data."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(repr((row.question, row.ground_truths, row.data_source)).encode())
        return digest.hexdigest()[:16]

    def _encode(self, question: str) -> list[int]:
        return encode_prompt(self._tokenizer, question, self._tools)

    def _check_prompt_lengths(self) -> None:
        """Only questions that could be too long are tokenised: a token covers at least one byte of text."""
        room = self._max_prompt_length - len(self._encode(""))
        too_long = []
        for row in self._rows:
            if len(row.question.encode()) > room:
                tokens = len(self._encode(row.question))
                if tokens > self._max_prompt_length:
                    too_long.append((tokens, row))
        if too_long:
            tokens, row = max(too_long, key=lambda pair: pair[0])
            raise ValueError(
                f"{row.place}: the prompt has {tokens} tokens, more than data.max_prompt_length="
                f"{self._max_prompt_length} ({len(too_long)} of {len(self)} rows are too long, this one most); raise "
                f"data.max_prompt_length to {tokens} or remove them"
            )


class QuestionStream:
    """An endless, seeded, resumable sequence of batches.

    Each epoch goes through the whole dataset in its own order. Every batch is full: where an epoch ends inside a batch,
    the next epoch's first questions complete it, so nothing is dropped, and no question stands twice in one batch.
    Fewer questions can be asked for at once (to refill a step); what is left of a batch then comes first the next time.
    """

    def __init__(self, dataset: RLHFDataset, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if batch_size > len(dataset):
            raise ValueError(
                f"data.train_batch_size={batch_size} is more than the {len(dataset)} questions of data.train_files; "
                f"lower it to {len(dataset)} or less"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0, pending=[])
        self._held: list[int] = []  # drawn, not handed out yet

    def steps(self, epochs: int) -> int:
        """Batches that show every question ``epochs`` times; the last may go a little beyond."""
        return -(-epochs * len(self._dataset) // self._batch_size)

    def next_batch(self, count: int | None = None) -> list[Question]:
        """The next ``batch_size`` questions, or the next ``count``."""
        count = count or self._batch_size
        while len(self._held) < count:
            self._held += self._draw()
        taken, self._held = self._held[:count], self._held[count:]
        return [self._dataset[i] for i in taken]

    def _draw(self) -> list[int]:
        indices = self._order[self._position : self._position + self._batch_size]
        self._position += len(indices)
        if (missing := self._batch_size - len(indices)) > 0:
            self._epoch, self._position = self._epoch + 1, missing
            self._order = self._order_of(self._epoch, pending=indices)
            indices = indices + self._order[:missing]
        return indices

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. What is compared at loading stands beside the position."""
        return {"epoch": self._epoch, "position": self._position, "held": list(self._held), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises ValueError when data, batch size, shuffle or seed differ."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the checkpoint was made with {name}={state.get(name)}, this run has {here}; "
                    "restore it, or start afresh with trainer.resume_mode=disable"
                )
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0, pending=[])
        for epoch in range(1, state["epoch"] + 1):  # an epoch's order depends on where the one before was cut
            drawn = (epoch * len(self._dataset)) % self._batch_size
            self._order = self._order_of(epoch, pending=self._order[len(self._order) - drawn :] if drawn else [])
        self._epoch, self._position = state["epoch"], state["position"]
        self._held = list(state.get("held", []))  # checkpoints from before refills have none

    def _identity(self) -> dict[str, Any]:
        return {
            "questions": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "train_batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _order_of(self, epoch: int, pending: list[int]) -> list[int]:
        """Row numbers of an epoch; those ``pending`` in the batch that it must complete don't come first."""
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        if not pending:
            return order
        missing, held = self._batch_size - len(pending), set(pending)
        head = [i for i in order if i not in held][:missing]
        taken = set(head)
        return head + [i for i in order if i not in taken]


@dataclass(frozen=True)
class QuestionRow:
    """A row as it stands in its file."""

    question: str
    ground_truths: tuple[str, ...]
    data_source: str
    key: str
    place: str  # for messages: "dev.parquet, row 3 (tq_123)"


def expand_files(files: str | Sequence[str]) -> list[Path]:
    """The files that paths and globs name, each glob sorted. Raises ValueError when one names nothing."""
    found: list[Path] = []
    for name in [files] if isinstance(files, str) else files:
        matches = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise ValueError(f"no such data file: {name}; check the path (a glob needs quotes in the shell)")
        found.extend(Path(match) for match in matches)
    if not found:
        raise ValueError("no data files were given; set data.train_files, such as data/demo/train.parquet")
    return found


def read_rows(path: Path) -> list[QuestionRow]:
    """One parquet file's rows; form and errors as in RLHFDataset."""
    try:
        schema = pq.read_schema(path)
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            raise ValueError(
                f"{path}: column {', '.join(missing)} is missing; it has {', '.join(schema.names) or 'none'}, and a "
                f"dataset needs {', '.join(COLUMNS)}"
            )
        wanted = [name for name in (*COLUMNS, "extra_info") if name in schema.names]
        columns = pq.read_table(path, columns=wanted).to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as parquet: {str(error).splitlines()[0]}") from error
    rows, bad = [], []
    extras = columns.get("extra_info") or [None] * len(columns["prompt"])
    filled = zip(*(columns[name] for name in COLUMNS), extras, strict=True)
    for i, (source, prompt, reward, extra) in enumerate(filled):
        key = str(extra["index"]) if isinstance(extra, dict) and extra.get("index") is not None else ""
        place = f"{path.name}, row {i}" + (f" ({key})" if key else "")
        question, golds = _question_of(prompt), _golds_of(reward)
        if not question or not golds:
            bad.append(f"{place}: {'no user message in prompt' if not question else 'empty reward_model.ground_truth'}")
        else:
            rows.append(QuestionRow(question, golds, str(source), key, place))
    if bad:
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"{path} has {len(bad)} unusable rows ({'; '.join(bad[:5])}{more}); mend or remove them")
    return rows


def _question_of(prompt: Any) -> str:
    """Text of the last user message; "" when there is none."""
    if not isinstance(prompt, list):
        return ""
    texts = [m.get("content") for m in prompt if isinstance(m, dict) and m.get("role") == "user"]
    return texts[-1].strip() if texts and isinstance(texts[-1], str) else ""


def _golds_of(reward: Any) -> tuple[str, ...]:
    truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    aliases = [truth] if isinstance(truth, str) else truth if isinstance(truth, list) else []
    return tuple(gold for alias in aliases if isinstance(alias, str) for gold in split_golds(alias))
