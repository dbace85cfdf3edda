import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from verl.protocol import DataProto


@dataclass
class Thing:
    ids: list[int]


def make(rows: int = 3) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "x": torch.arange(rows * 2).reshape(rows, 2),
            "response_mask": torch.ones(rows, 2),
        },
        non_tensors={"episode": [Thing([i, i]) for i in range(rows)], "uid": [f"u{i}" for i in range(rows)]},
        meta_info={"temperature": 0.5},
    )


def column(data: DataProto) -> list[int]:
    return data.batch["x"][:, 0].tolist()


def test_from_dict_keeps_objects_one_per_row():
    data = DataProto.from_dict(non_tensors={"pair": [[1, 2], [3, 4]], "n": np.array([7, 8])})
    assert len(data) == 2
    assert data.non_tensor_batch["pair"].shape == (2,) and data.non_tensor_batch["pair"][1] == [3, 4]
    assert data.non_tensor_batch["n"].dtype == np.int64
    assert len(DataProto.from_dict(meta_info={"metrics": {"a": 1.0}})) == 0


@pytest.mark.parametrize(
    "tensors, non_tensors, message",
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, r"'a': 2, 'b': 3"),
        ({"a": torch.zeros(2)}, {"o": ["one"]}, r"'a': 2, 'o': 1"),
        ({"a": torch.tensor(1.0)}, {}, "'a' is not a tensor with a row dimension"),
    ],
)
def test_lengths_are_checked(tensors, non_tensors, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, non_tensors)
    good = make(2)
    with pytest.raises(ValueError, match="'uid' has 3 rows, the batch has 2"):
        DataProto(good.batch, {"uid": np.array(["a", "b", "c"], dtype=object)})


@pytest.mark.parametrize(
    "index, rows",
    [
        (slice(1, None), [1, 2]),
        (slice(0, 3, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        (np.array([True, False, True]), [0, 2]),
        (torch.tensor([1]), [1]),
        ([], []),
    ],
)
def test_rows_by_slice_indices_and_mask(index, rows):
    part = make()[index]
    assert column(part) == [2 * row for row in rows]
    assert [thing.ids[0] for thing in part.non_tensor_batch["episode"]] == rows
    assert part.meta_info == {"temperature": 0.5} and len(part) == len(rows)


def test_an_int_or_a_name_is_refused_as_row_index():
    with pytest.raises(TypeError, match="rows are taken by slice"):
        make()[0]
    with pytest.raises(TypeError, match="columns from data.batch"):
        make()["x"]
    with pytest.raises(ValueError, match="a mask of 2 for 3 rows"):
        make()[torch.tensor([True, False])]


def test_select_and_pop_take_columns():
    data = make()
    chosen = data.select(["x"], [])
    assert set(chosen.batch.keys()) == {"x"} and not chosen.non_tensor_batch
    taken = data.pop(["x"], ["uid"])
    assert taken.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5]] and taken.non_tensor_batch["uid"][2] == "u2"
    assert set(data.batch.keys()) == {"response_mask"} and set(data.non_tensor_batch) == {"episode"}
    with pytest.raises(KeyError, match=r"no tensor column \['y'\]; there are \['response_mask'\]"):
        data.select(["y"])


def test_union_adds_and_accepts_equal_values_with_nan():
    data = make()
    data.batch["score"] = torch.tensor([0.0, float("nan"), 1.0])
    other = DataProto.from_dict(
        {"score": torch.tensor([0.0, float("nan"), 1.0]), "y": torch.tensor([5, 6, 7])},
        {"episode": [Thing([i, i]) for i in range(3)]},
        {"step": 3},
    )
    joined = data.union(other)
    assert joined is data and data.batch["y"].tolist() == [5, 6, 7]
    assert data.meta_info == {"temperature": 0.5, "step": 3}


@pytest.mark.parametrize(
    "other, message",
    [
        (DataProto.from_dict({"x": torch.zeros(3, 2, dtype=torch.long)}), "'x' differs"),
        (DataProto.from_dict({"x": make().batch["x"].int()}), "'x' differs"),
        (DataProto.from_dict(non_tensors={"uid": ["u0", "u1", "zz"]}), "'uid' differs"),
        (DataProto.from_dict(meta_info={"temperature": 1.0}), r"meta_info\['temperature'\] is 0.5 .* 1.0"),
        (DataProto.from_dict({"z": torch.zeros(4)}), "union of 3 rows with 4"),
    ],
)
def test_union_refuses_conflicts_and_then_changes_nothing(other, message):
    data = make()
    other.meta_info.setdefault("new", 1)
    with pytest.raises(ValueError, match=message):
        data.union(other)
    assert set(data.batch.keys()) == {"x", "response_mask"} and data.meta_info == {"temperature": 0.5}
    assert column(data) == [0, 2, 4]


def test_repeat_chunk_split_concat_reorder():
    data = make(2)
    assert column(data.repeat(2)) == [0, 0, 2, 2]
    assert column(data.repeat(2, interleave=False)) == [0, 2, 0, 2]
    four = make(4)
    first, second = four.chunk(2)
    assert column(first) == [0, 2] and second.non_tensor_batch["uid"].tolist() == ["u2", "u3"]
    assert [len(part) for part in make(5).split(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="5 rows don't divide into 2"):
        make(5).chunk(2)
    assert column(DataProto.concat([second, first])) == [4, 6, 0, 2]
    moved = make(3)
    assert column(moved.reorder([2, 0, 1])) == [4, 0, 2] and moved.non_tensor_batch["uid"].tolist() == [
        "u2",
        "u0",
        "u1",
    ]
    with pytest.raises(ValueError, match="needs each row once"):
        moved.reorder([0, 0, 1])


def test_concat_reduces_metrics_and_refuses_other_differences():
    parts = [
        DataProto.from_dict(
            meta_info={"metrics": {"loss": 1.0, "length/max": 3.0, "length/min": 2.0, "max_gb": 3}, "t": 1}
        ),
        DataProto.from_dict(
            meta_info={"metrics": {"loss": 2.0, "length/max": 5.0, "length/min": 1.0, "only": 4, "max_gb": 1}}
        ),
    ]
    merged = DataProto.concat(parts)
    assert merged.meta_info == {
        "t": 1,
        "metrics": {"loss": 1.5, "length/max": 5.0, "length/min": 1.0, "max_gb": 3.0, "only": 4.0},
    }
    parts[1].meta_info["t"] = 2
    with pytest.raises(ValueError, match=r"meta_info\['t'\]"):
        DataProto.concat(parts)
    with pytest.raises(ValueError, match="differ in columns"):
        DataProto.concat([make(), make().select(["x"])])


@pytest.mark.parametrize("rows, divisor, added", [(3, 2, 1), (1, 4, 3), (4, 2, 0), (2, 5, 3)])
def test_padding_repeats_rows_without_weight_and_comes_off_again(rows, divisor, added):
    data = make(rows)
    padded, pad_size = data.pad_to_divisor(divisor)
    assert pad_size == added and len(padded) % divisor == 0
    assert column(padded)[rows:] == [2 * (i % rows) for i in range(rows, rows + added)]
    assert padded.batch["response_mask"].sum().item() == 2 * rows
    assert data.batch["response_mask"].sum().item() == 2 * rows, "the batch itself stays as it was"
    assert column(padded.unpad(pad_size)) == column(data)


def test_a_pickle_holds_only_its_own_rows_and_is_exact():
    data = DataProto.from_dict(
        {"big": torch.arange(1_000_000.0).reshape(1000, 1000), "half": torch.randn(1000, 3).bfloat16()},
        {"uid": [f"u{i}" for i in range(1000)]},
    )
    row = data[7:8]
    blob = pickle.dumps(row)
    assert len(blob) < 10_000
    back = pickle.loads(blob)
    assert torch.equal(back.batch["big"], data.batch["big"][7:8]) and back.non_tensor_batch["uid"][0] == "u7"
    assert back.batch["half"].dtype == torch.bfloat16 and torch.equal(back.batch["half"], data.batch["half"][7:8])
    back.batch["big"][0, 0] = -1.0
    assert data.batch["big"][7, 0] == 7000.0


def test_a_transposed_tensor_survives_pickling():
    data = DataProto.from_dict({"t": torch.arange(6).reshape(2, 3).t(), "flag": torch.tensor([True, False, True])})
    back = pickle.loads(pickle.dumps(data))
    assert back.batch["t"].tolist() == [[0, 3], [1, 4], [2, 5]] and back.batch["flag"].tolist() == [True, False, True]


def test_to_moves_tensors_and_keeps_the_rest():
    moved = make().to("meta")
    assert moved.batch["x"].device.type == "meta" and moved.non_tensor_batch["uid"][1] == "u1"
