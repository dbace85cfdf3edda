"""Which process runs where: actor ranks and rollout workers on the cluster's cards."""

import math
from typing import Any

import ray

from verl.single_controller import ResourcePool, WorkerGroup
from verl.trainer.config.schema import Config
from verl.trainer.ppo.rollout_pool import RolloutPool
from verl.workers.fsdp_workers import ActorRefWorker


def start_workers(config: Config) -> tuple[WorkerGroup, RolloutPool, dict[str, int]]:
    """Actor ranks and rollout workers, worker i on the card (without GPUs: the node) of rank i, counted round.

    An engine over several cards (``tensor_model_parallel_size``) has these to itself. Returns the actor, the rollout
    workers, and counts of ``parameters`` and ``trainable_parameters``. ValueError where the cards can't hold them all.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    gpu = ray.cluster_resources().get("GPU", 0) > 0  # the cluster's: the driver's machine may have none
    threads = {} if gpu else {"OMP_NUM_THREADS": "1"}
    share, cards = rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size
    shared = not gpu or cards == 1
    guests = math.ceil(rollout.num_workers / (trainer.n_gpus_per_node * trainer.nnodes)) if shared else 0
    if gpu and guests * share >= 1:
        raise ValueError(
            f"{guests} engines a card of actor_rollout_ref.rollout.gpu_memory_utilization={share} leave the actor "
            f"nothing; lower it below {1 / guests:.2f}, or actor_rollout_ref.rollout.num_workers"
        )
    left = round(1 - guests * share, 4)  # Ray counts no finer
    pool = ResourcePool(trainer.n_gpus_per_node, trainer.nnodes, use_gpu=gpu, gpus_per_process=left)
    apart = None if shared else ResourcePool(1, rollout.num_workers, True, cards, cpu_per_process=0)

    def place(index: int) -> dict[str, Any]:
        options = pool.beside(index, share) if apart is None else apart.options(index)
        return options | {"runtime_env": {"env_vars": threads}}

    if not gpu:  # both load at the same time
        rollouts = RolloutPool(config, place)
    actor = WorkerGroup(ActorRefWorker, pool, config, env_vars=threads)
    counts = actor.init_model()[0]
    if gpu:  # vLLM sizes its cache by what it finds free
        rollouts = RolloutPool(config, place)
    rollouts.wait_ready()
    return actor, rollouts, counts
