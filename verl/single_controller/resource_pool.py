"""Where the processes of a worker group run: Ray placement groups, held for as long as the pool."""

import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class ResourcePool:
    """Room for ``n_per_node`` processes together on one node, ``nnodes`` times: for one worker group at a time.

    ``cpu_per_process``: CPUs, may be a fraction. With ``use_gpu`` each process has a card of its own, of which it takes
    ``gpus_per_process``; the rest is for guests (``beside``), such as an engine that generates on it. Or it has several
    whole cards.

    Raises ``ValueError`` for impossible numbers, or when the cluster hasn't given the room after ``timeout_s``.
    """

    def __init__(
        self,
        n_per_node: int = 1,
        nnodes: int = 1,
        use_gpu: bool = False,
        gpus_per_process: float = 1.0,
        cpu_per_process: float = 1.0,
        timeout_s: float = 30.0,
    ) -> None:
        if n_per_node < 1 or nnodes < 1:
            raise ValueError(f"n_per_node={n_per_node}, nnodes={nnodes}: a pool needs at least one process on one node")
        if gpus_per_process <= 0 or (gpus_per_process > 1 and gpus_per_process % 1):
            raise ValueError(
                f"gpus_per_process={gpus_per_process}: a process takes a share of its card above 0, or whole cards"
            )
        if cpu_per_process < 0:
            raise ValueError(f"cpu_per_process={cpu_per_process} is negative; give 0 or more")
        self.n_per_node, self.nnodes, self.use_gpu = n_per_node, nnodes, use_gpu
        self.world_size = n_per_node * nnodes
        self.holder: str | None = None  # the worker group that fills it
        self._need = {"CPU": cpu_per_process, "GPU": gpus_per_process if use_gpu else 0}
        # Whole cards: Ray fills one before it opens the next, and two ranks on one card break NCCL.
        self._bundle = {"CPU": cpu_per_process, "GPU": max(1, gpus_per_process) if use_gpu else 0}
        self._groups: list[PlacementGroup] = []
        self._reserve(timeout_s)

    def options(self, rank: int) -> dict[str, Any]:
        """Ray ``options`` that put an actor into the place of this rank."""
        return {"num_cpus": self._need["CPU"], "num_gpus": self._need["GPU"], "scheduling_strategy": self._place(rank)}

    def beside(self, index: int, gpu_share: float) -> dict[str, Any]:
        """Ray ``options`` that put a guest, an actor outside of the group, onto the card of rank ``index`` (counted
        round), where it takes ``gpu_share``. Without ``use_gpu``: onto its node, where it takes nothing."""
        share = gpu_share if self.use_gpu else 0
        return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": self._place(index % self.world_size)}

    def _place(self, rank: int) -> PlacementGroupSchedulingStrategy:
        assert self._groups, "the pool was released"
        return PlacementGroupSchedulingStrategy(
            placement_group=self._groups[rank // self.n_per_node],
            placement_group_bundle_index=rank % self.n_per_node,
        )

    def release(self) -> None:
        """Give the room back; the actors in it are killed. May be called again."""
        groups, self._groups = self._groups, []
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)

    def _reserve(self, timeout_s: float) -> None:
        bundle = {name: amount for name, amount in self._bundle.items() if amount} or {"CPU": 0.001}
        # One group a node, packed strictly: ranks of a node are neighbours, whatever the cluster's nodes look like.
        self._groups = [placement_group([bundle] * self.n_per_node, "STRICT_PACK") for _ in range(self.nnodes)]
        deadline = time.monotonic() + timeout_s
        try:
            if all(group.wait(max(0.0, deadline - time.monotonic())) for group in self._groups):
                return
            there = _what_there_is()
        except BaseException:
            self.release()
            raise
        self.release()
        raise ValueError(
            f"Ray gave no room within {timeout_s:g} s for {self.nnodes} x {self.n_per_node} processes of {bundle} "
            f"each, those of a node together; it has {there}. Lower trainer.n_gpus_per_node or trainer.nnodes, raise "
            f"ray.num_cpus, or stop what else runs on that Ray"
        )


def _what_there_is() -> str:
    free = ray.available_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    sizes = "; ".join(f"CPU {node.get('CPU', 0):g}, GPU {node.get('GPU', 0):g}" for node in nodes)
    return f"{len(nodes)} node(s) ({sizes}), of which CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g} are free"
