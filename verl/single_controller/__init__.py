"""One driver, many processes: methods of a worker class are called on a whole group of them at once."""

from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.ray_cluster import RayConnection, connect
from verl.single_controller.resource_pool import ResourcePool
from verl.single_controller.waiting import WorkerDied, wait_all
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import WorkerGroup

__all__ = [
    "Dispatch",
    "RayConnection",
    "ResourcePool",
    "Worker",
    "WorkerDied",
    "WorkerGroup",
    "connect",
    "register",
    "wait_all",
]
