"""FSDP2 for a policy whose base may be frozen: what to wrap, in which precision, and full tensors out and in."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def init_process_group() -> tuple[torch.device, DeviceMesh]:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Returns:
        This rank's device (``cuda:LOCAL_RANK`` or ``cpu``) and the one-dimensional mesh over all ranks.
    """
    cuda = torch.cuda.is_available()
    # Ray shows an actor only its own GPU, so LOCAL_RANK may be beyond what this process can see.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # gloo beside nccl: small CPU tensors (counts, flags) are reduced without touching the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return device or torch.device("cpu"), mesh


def lora_wrap_policy(layer_names: Iterable[str]) -> Callable[[nn.Module], bool]:
    """The lambda that picks what becomes an FSDP unit of its own: the decoder layers.

    An adapter's leaves stay in their layer's unit. FSDP1 had to wrap each leaf, because trainable and frozen
    parameters could not share a flat buffer; FSDP2 shards every parameter by itself, so a layer with q, k, v, o
    adapters costs one all-gather instead of nine, and its reduce-scatter carries the adapter alone.

    Args:
        layer_names: class names of the decoder layers (``model._no_split_modules``).
    """
    names = frozenset(layer_names)
    return lambda module: type(module).__name__ in names


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    wrap: Callable[[nn.Module], bool],
    compute_dtype: torch.dtype,
) -> list[nn.Module]:
    """Shard ``model`` over ``mesh``, in place: one unit for each module that ``wrap`` picks, the rest in the root.

    Parameters keep their dtype (frozen base in ``compute_dtype``, what is trained in float32), are gathered and used
    in ``compute_dtype``, and gradients are reduced in float32. All ranks must hold the same values before.

    Returns:
        The units, root last.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = [module for module in model.modules() if module is not model and wrap(module)] + [model]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return units


def world_size() -> int:
    """Ranks that share each optimizer step; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def reduce_numbers(values: Sequence[float], op: str = "sum") -> list[float]:
    """``values`` summed (or their ``max``) over all ranks, in float64. A collective; the lists must be as long."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(numbers, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
    return numbers.tolist()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Live name -> parameter, only what is trained, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the CPU, on every rank. A collective where the tensor is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def gather_full_state(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Whole CPU tensors by name on rank 0, an empty dict on the others. All ranks must call it.

    One tensor is whole at a time on the ranks that don't keep it.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    state = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor)
        if keep:
            state[name] = whole if dtype is None else whole.to(dtype)
    return state


@torch.no_grad()
def copy_full_state(tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Write whole tensors, which every rank has at hand, into (sharded) ``tensors``.

    Raises:
        ValueError: names or shapes differ.
    """
    if tensors.keys() != state.keys():
        odd = sorted(tensors.keys() ^ state.keys())
        raise ValueError(f"the saved tensors don't fit this model: {len(odd)} names differ, such as {odd[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"the saved {name} is {tuple(state[name].shape)}, the model's is {tuple(tensor.shape)}; "
                "resume with the lora_rank and model that wrote the checkpoint"
            )
        tensor.copy_(like(tensor, state[name]))


def like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole``, which every rank has, laid out over ranks and devices as ``tensor`` is. No communication."""
    whole = whole.to(device=tensor.device, dtype=tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model's shards; nothing where they are there already."""
    if next(model.parameters()).device.type != device.type:
        model.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments. Step counters stay: Adam keeps them on the CPU."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.dim():
                state[key] = value.to(device)


def make_deterministic() -> None:
    """One thread and deterministic kernels: the same inputs give the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers, at each backward
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
