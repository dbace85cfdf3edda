"""What every worker of a group knows about itself."""

import os


class Worker:
    """Base of the classes that a WorkerGroup runs, one instance a process.

    The group sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT before the class is even imported there,
    so that ``torch.distributed.init_process_group(backend)`` works without arguments; calling it is the worker's own
    business. Outside of a group (a test, a notebook) a worker is rank 0 of 1.

    Ray shows a GPU worker its own card only, as device 0: LOCAL_RANK is 0 there, the place on the node elsewhere.
    """

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))
