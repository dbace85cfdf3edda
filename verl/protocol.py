"""``DataProto``: the one batch type that driver and workers exchange.

Shapes: B rows (episodes); every tensor and every object array has B as its first dimension.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

Index = slice | Sequence[int] | np.ndarray | torch.Tensor


@dataclass
class DataProto:
    """B rows of tensors and objects, and what holds for all of them.

    ``batch``: tensors (B, ...) by name. ``non_tensor_batch``: arrays (B,) by name, of dtype object unless numeric.
    ``meta_info``: scalars and small dicts (``temperature``, ``global_step``, ``metrics``, ...).

    Selecting rows or columns gives a new DataProto over the same tensors where torch allows (slices), copies elsewhere.
    ``pop``, ``union`` and ``reorder`` change the batch they are called on; all others leave it alone.
    Pickling copies exactly the rows at hand (never the storage that a slice looks into) as plain NumPy buffers,
    which Ray moves through shared memory; tensors arrive on the CPU.

    Raises ``ValueError`` where lengths differ.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self)
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.ndim == 0:
                raise ValueError(f"non-tensor {name!r} is {type(values).__name__}, not an array of {rows} rows; {_USE}")
            if len(values) != rows:
                raise ValueError(f"non-tensor {name!r} has {len(values)} rows, the batch has {rows}; give one per row")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Iterable[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Build a batch from tensors (B, ...) and sequences of B objects; without either it has no rows, only meta."""
        tensors = dict(tensors or {})
        objects = {name: _as_array(values) for name, values in (non_tensors or {}).items()}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
                raise ValueError(f"{name!r} is not a tensor with a row dimension; put it into non_tensors or meta_info")
        lengths = {name: len(values) for name, values in [*tensors.items(), *objects.items()]}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}; every column needs one row per episode")
        rows = next(iter(lengths.values()), 0)
        return cls(TensorDict(tensors, batch_size=[rows]), objects, dict(meta_info or {}))

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def __getitem__(self, index: Index) -> "DataProto":
        """Rows by slice, index list or boolean mask (B,)."""
        if isinstance(index, int | np.integer | str):
            raise TypeError(f"data[{index!r}]: rows are taken by slice, indices or mask; columns from data.batch[name]")
        if not isinstance(index, slice):
            index = torch.as_tensor(np.asarray(index))
            if index.dtype == torch.bool and len(index) != len(self):
                raise ValueError(f"a mask of {len(index)} for {len(self)} rows; give one value per row")
            index = index if index.dtype == torch.bool else index.long()
        objects = index if isinstance(index, slice) else index.numpy()
        # Column by column: a batch may have no tensor at all, and each copy is one indexing operation anyway.
        tensors = {name: tensor[_on(index, tensor)] for name, tensor in self.batch.items()}
        rows = len(np.arange(len(self))[objects])
        non_tensors = {name: values[objects] for name, values in self.non_tensor_batch.items()}
        return DataProto(TensorDict(tensors, batch_size=[rows]), non_tensors, dict(self.meta_info))

    def select(
        self, batch_keys: Iterable[str] | None = None, non_tensor_keys: Iterable[str] | None = None
    ) -> "DataProto":
        """The named columns (None: all of that kind), same rows. Raises ``KeyError`` naming what there is."""
        tensors = {name: self.batch[name] for name in _known(batch_keys, self.batch.keys(), "tensor")}
        objects = {
            name: self.non_tensor_batch[name]
            for name in _known(non_tensor_keys, self.non_tensor_batch.keys(), "non-tensor")
        }
        return DataProto(TensorDict(tensors, batch_size=[len(self)]), objects, dict(self.meta_info))

    def pop(self, batch_keys: Iterable[str] = (), non_tensor_keys: Iterable[str] = ()) -> "DataProto":
        """Take the named columns out of this batch and return them."""
        taken = self.select(list(batch_keys), list(non_tensor_keys))
        for name in list(taken.batch.keys()):
            del self.batch[name]
        for name in taken.non_tensor_batch:
            del self.non_tensor_batch[name]
        return taken

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and the meta of ``other`` to this batch (returned).

        A name that both have must hold equal values in both, else ``ValueError``, and nothing is changed.
        """
        if len(other) != len(self) and (len(other.batch.keys()) or other.non_tensor_batch):
            raise ValueError(f"union of {len(self)} rows with {len(other)}; both must hold the same episodes")
        meta_info = _merge(self.meta_info, other.meta_info, "meta_info")
        for mine, theirs in ((self.batch, other.batch), (self.non_tensor_batch, other.non_tensor_batch)):
            for name in theirs.keys():
                if name in mine.keys() and not _same(mine[name], theirs[name]):
                    raise ValueError(f"union: {name!r} differs between the two batches; pop it from one of them")
        for name, tensor in other.batch.items():
            self.batch[name] = tensor
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info = meta_info
        return self

    def repeat(self, n: int, interleave: bool = True) -> "DataProto":
        """Each row n times: ``aabb`` when interleaved, else ``abab``."""
        index = torch.arange(len(self))
        return self[index.repeat_interleave(n) if interleave else index.repeat(n)]

    def chunk(self, n: int) -> list["DataProto"]:
        """n equal parts in order; raises ``ValueError`` where B isn't a multiple of n."""
        if len(self) % n:
            raise ValueError(f"{len(self)} rows don't divide into {n} equal parts; use pad_to_divisor({n}) first")
        size = len(self) // n
        return [self[i * size : (i + 1) * size] for i in range(n)]

    def split(self, size: int) -> list["DataProto"]:
        """Parts of ``size`` rows in order; the last may be shorter."""
        if size < 1:
            raise ValueError(f"split({size}): a part needs at least one row")
        return [self[start : start + size] for start in range(0, len(self), size)]

    @staticmethod
    def concat(parts: Sequence["DataProto"]) -> "DataProto":
        """Rows of all parts in order.

        Parts must have the same columns. ``meta_info`` must agree, but for ``metrics`` (name -> number), where each
        part (a rank) may have measured something else: names ending in ``max`` keep the largest value, in ``min``
        the smallest, others the mean over the parts.
        """
        if not parts:
            raise ValueError("concat of no parts; give at least one")
        columns = [(set(part.batch.keys()), set(part.non_tensor_batch)) for part in parts]
        if any(column != columns[0] for column in columns):
            raise ValueError(f"concat: parts differ in columns: {columns}")
        meta_info: dict[str, Any] = {}
        for part in parts:
            meta = {key: value for key, value in part.meta_info.items() if key != "metrics"}
            meta_info = _merge(meta_info, meta, "meta_info")
        if any("metrics" in part.meta_info for part in parts):
            meta_info["metrics"] = _reduce_metrics([part.meta_info.get("metrics", {}) for part in parts])
        tensors = {name: torch.cat([part.batch[name] for part in parts]) for name in parts[0].batch.keys()}
        objects = {
            name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in parts[0].non_tensor_batch
        }
        return DataProto(TensorDict(tensors, batch_size=[sum(map(len, parts))]), objects, meta_info)

    def reorder(self, order: Sequence[int] | np.ndarray | torch.Tensor) -> "DataProto":
        """Put row ``order[i]`` at place i, in this batch (returned). ``order`` is a permutation of all rows."""
        order = torch.as_tensor(np.asarray(order)).long()
        if not torch.equal(order.sort().values, torch.arange(len(self))):
            raise ValueError(f"reorder of {len(self)} rows needs each row once, got {order.tolist()[:20]}")
        moved = self[order]
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch
        return self

    def pad_to_divisor(self, divisor: int) -> tuple["DataProto", int]:
        """Append copies of the first rows until B is a multiple of ``divisor``; returns (padded, rows added).

        ``response_mask`` is 0 in the copies, so that they add nothing to a loss or a mean over tokens.
        """
        pad_size = -len(self) % divisor
        if pad_size == 0 or len(self) == 0:
            return self, 0
        padded = self[[row % len(self) for row in range(len(self) + pad_size)]]
        if "response_mask" in padded.batch.keys():
            padded.batch["response_mask"][-pad_size:] = 0
        return padded, pad_size

    def unpad(self, pad_size: int) -> "DataProto":
        """Without the last ``pad_size`` rows."""
        return self[: len(self) - pad_size] if pad_size else self

    def to(self, device: str | torch.device) -> "DataProto":
        """The same batch with its tensors on ``device``."""
        tensors = {name: tensor.to(device) for name, tensor in self.batch.items()}
        return DataProto(TensorDict(tensors, batch_size=[len(self)]), self.non_tensor_batch, self.meta_info)

    def __getstate__(self) -> dict[str, Any]:
        tensors = {name: _to_buffer(tensor) for name, tensor in self.batch.items()}
        return {"rows": len(self), "tensors": tensors, "objects": self.non_tensor_batch, "meta": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: _from_buffer(*packed) for name, packed in state["tensors"].items()}
        self.batch = TensorDict(tensors, batch_size=[state["rows"]])
        # Arrays that arrive through shared memory are read-only; a receiver may change its own batch.
        self.non_tensor_batch = {k: v if v.flags.writeable else v.copy() for k, v in state["objects"].items()}
        self.meta_info = state["meta"]


_USE = "use DataProto.from_dict, which converts sequences"
# NumPy has no type for these: they travel as integers of the same width.
_AS_INTEGER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def _to_buffer(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype]:
    # As an array, a slice is pickled without the rest of the storage it looks into.
    plain = tensor.detach().cpu().contiguous()
    return plain.view(_AS_INTEGER.get(plain.dtype, plain.dtype)).numpy(), tensor.dtype


def _from_buffer(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # A copy, always: torch would happily write into Ray's read-only shared memory, and crash.
    return torch.from_numpy(values.copy()).view(dtype)


def _as_array(values: Iterable[Any]) -> np.ndarray:
    """One object per row, whatever the objects are (equally long lists must not become a second dimension)."""
    if isinstance(values, np.ndarray):
        return values
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _on(index: slice | torch.Tensor, tensor: torch.Tensor) -> slice | torch.Tensor:
    return index if isinstance(index, slice) else index.to(tensor.device)


def _known(wanted: Iterable[str] | None, present: Iterable[str], kind: str) -> list[str]:
    present = list(present)
    if wanted is None:
        return present
    wanted = list(wanted)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise KeyError(f"no {kind} column {missing}; there are {sorted(present)}")
    return wanted


def _same(a: Any, b: Any) -> bool:
    """Equal in type and value; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        b = b.to(a.device)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return False
        if a.dtype == object or b.dtype == object:
            return all(_same(x, y) for x, y in zip(a.flat, b.flat, strict=True))
        return bool(((a == b) | ((a != a) & (b != b))).all())
    try:
        return bool(a == b)
    except (ValueError, RuntimeError, TypeError):  # an object holding arrays has no truth value
        return False


def _merge(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = dict(mine)
    for key, value in theirs.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = _merge(merged[key], value, f"{where}[{key!r}]")
        elif not _same(merged[key], value):
            raise ValueError(f"{where}[{key!r}] is {merged[key]!r} in one batch and {value!r} in the other; drop one")
    return merged


def _reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    reduced = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [float(part[name]) for part in parts if name in part]
        words = re.split("[/_]", name)
        how = max if "max" in words else min if "min" in words else lambda v: sum(v) / len(v)
        reduced[name] = how(values)
    return reduced
