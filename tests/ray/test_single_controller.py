"""Two real worker processes on a local Ray."""

import os
import signal
import sys
import time

import pytest
import torch
from ray import cloudpickle

from verl.protocol import DataProto
from verl.single_controller import Dispatch, ResourcePool, Worker, WorkerDied, WorkerGroup, connect, register
from verl.single_controller.dispatch import DISPATCH
from verl.trainer.config.schema import RayConfig

# The workers can't import a test module by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counter(Worker):
    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    @register(Dispatch.ONE_TO_ALL)
    def add(self, times: int) -> tuple[int, int]:
        self.value += self.step * times
        return self.rank, self.value

    @register(Dispatch.RANK_ZERO)
    def first(self, scale: int) -> int:
        self.value = -1  # on every rank
        return scale * (self.rank + 1)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto, factor: int) -> DataProto:
        x, mask = data.batch["x"] * factor, data.batch["response_mask"]
        metrics = {"rows": float(len(data)), "weight": mask.sum().item(), "rank/max": float(self.rank)}
        return DataProto.from_dict(
            {"y": x + 100 * self.rank}, {"uid": data.non_tensor_batch["uid"]}, {"metrics": metrics}
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def only_metrics(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(meta_info={"metrics": {"weight": data.batch["response_mask"].sum().item()}})

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        return {name: os.environ[name] for name in names} | {"threads": str(torch.get_num_threads())}

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self, value: float) -> float:
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(value * (self.rank + 1))
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, others_hang: bool) -> None:
        if self.rank == rank:
            raise FileNotFoundError(2, "no such model", f"rank{rank}.bin")
        if others_hang:
            time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def hang_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(600)

    def not_registered(self) -> None: ...


class Broken(Worker):
    def __init__(self) -> None:
        raise ValueError("lora_rank=0 makes no adapter; give at least 1")


@pytest.fixture(scope="module")
def local_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        with connect(RayConfig(num_cpus=3)):
            yield


@pytest.fixture(scope="module")
def group(local_ray):
    return WorkerGroup(Counter, ResourcePool(2, cpu_per_process=0.5), 10, step=2, env_vars={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def pool(local_ray):
    """Room for the groups that tests break."""
    return ResourcePool(2, cpu_per_process=0.5)


@pytest.fixture
def doomed(pool):
    group = WorkerGroup(Counter, pool, 0)
    yield group
    group.shutdown()


def batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows), "response_mask": torch.ones(rows, 2)}, {"uid": [f"u{i}" for i in range(rows)]}
    )


def test_one_to_all_reaches_every_rank_and_answers_by_rank(group):
    before = group.add(0)
    assert [rank for rank, _ in before] == [0, 1]
    assert group.add(3) == [(rank, value + 6) for rank, value in before]


def test_rank_zero_runs_everywhere_and_answers_once(group):
    assert group.first(7) == 7
    assert group.add(0) == [(0, -1), (1, -1)]


@pytest.mark.parametrize("rows", [4, 3, 1])
def test_rows_are_dealt_in_order_padded_without_weight_and_joined(group, rows):
    answer = group.scale(batch(rows), factor=10)
    share = -(-rows // 2)
    assert answer.batch["y"].tolist() == [10 * i + (100 if i >= share else 0) for i in range(rows)]
    assert answer.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in range(rows)]
    # Means over two ranks of: rows with padding, tokens with weight; and the largest rank.
    assert answer.meta_info["metrics"] == {"rows": float(share), "weight": float(rows), "rank/max": 1.0}


def test_an_answer_of_metrics_alone_is_joined(group):
    answer = group.only_metrics(batch(3))
    assert len(answer) == 0 and answer.meta_info == {"metrics": {"weight": 3.0}}


def test_padding_carries_no_response_mask():
    into_calls, _ = DISPATCH[Dispatch.DP_COMPUTE_PROTO]
    calls = into_calls(4, (batch(2), "same"), {})
    assert calls.pad_size == 2
    assert [args[0].batch["x"].item() for args, _ in calls.per_rank] == [0, 1, 0, 1]
    assert [args[0].batch["response_mask"].sum().item() for args, _ in calls.per_rank] == [2, 2, 0, 0]
    assert [args[1] for args, _ in calls.per_rank] == ["same"] * 4
    with pytest.raises(ValueError, match=r"of one length, got lengths \[2, 3\]"):
        into_calls(2, (batch(2), batch(3)), {})
    with pytest.raises(ValueError, match=r"got lengths \[\]"):
        into_calls(2, (1,), {})


def test_without_blocking_there_is_a_reference_a_rank(group):
    import ray

    refs = group.call("first", 5, blocking=False)
    assert ray.get(refs, timeout=60) == [5, None]


def test_the_environment_is_complete_before_torch_is_imported(group):
    one, two = group.environment()
    assert (one["RANK"], two["RANK"]) == ("0", "1") and (one["LOCAL_RANK"], two["LOCAL_RANK"]) == ("0", "1")
    for each in (one, two):
        assert each["WORLD_SIZE"] == "2" and each["OMP_NUM_THREADS"] == "1" and each["threads"] == "1"
        assert each["MASTER_ADDR"] == "127.0.0.1" and each["MASTER_PORT"] == one["MASTER_PORT"]


def test_the_ranks_find_one_another(group):
    assert group.all_reduce(2.0) == [6.0, 6.0]


def test_a_typo_names_the_method_that_was_meant(group):
    with pytest.raises(AttributeError, match="no method 'scael'; did you mean 'scale'.* registers add, first, scale"):
        group.scael(batch(2))
    with pytest.raises(AttributeError, match="'not_registered'"):
        group.call("not_registered")
    assert "scale" in dir(group)


def test_a_remote_exception_keeps_type_and_message_and_says_where(group):
    with pytest.raises(FileNotFoundError) as caught:
        group.fail_on(1, others_hang=False)
    assert caught.value.filename == "rank1.bin" and str(caught.value) == "[Errno 2] no such model: 'rank1.bin'"
    assert "raised by Counter.fail_on on rank 1" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0], "the remote traceback is there for who looks for it"
    assert [rank for rank, _ in group.add(1)] == [0, 1], "a group whose ranks all came back goes on"


def test_an_exception_on_one_rank_does_not_wait_for_the_others(doomed):
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match="rank1.bin"):
        doomed.fail_on(1, others_hang=True)
    assert time.monotonic() - start < 20
    with pytest.raises(RuntimeError, match="this Counter group is broken since: .*no such model"):
        doomed.add(1)


def test_a_dead_worker_is_one_error_at_once(doomed):
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="Counter.die_on on rank 1: the worker's process died"):
        doomed.die_on(1)
    assert time.monotonic() - start < 20
    with pytest.raises(RuntimeError, match="broken since: .*rank 1"):
        doomed.add(1)


def test_a_deadline_names_who_is_late(doomed):
    with pytest.raises(TimeoutError, match="Counter.hang_on: no answer from rank 1 within 0.5 s"):
        doomed.call("hang_on", 1, timeout_s=0.5)
    with pytest.raises(RuntimeError, match="broken since: .*0.5 s"):
        doomed.add(1)


def test_a_constructor_that_fails_surfaces_and_frees_its_place(pool):
    with pytest.raises(ValueError, match="^lora_rank=0 makes no adapter; give at least 1\n"):
        WorkerGroup(Broken, pool)
    again = WorkerGroup(Counter, pool, 1)
    with pytest.raises(ValueError, match="filled by a Counter group"):
        WorkerGroup(Counter, pool, 1)
    assert again.add(1) == [(0, 2), (1, 2)]
    again.shutdown()
    with pytest.raises(RuntimeError, match="broken since: it was shut down"):
        again.add(1)


def test_a_pool_that_does_not_fit_says_what_there_is(local_ray):
    with pytest.raises(ValueError, match=r"no room within 0.5 s for 1 x 4 processes of {'CPU': 1.0} .* \(CPU 3, GPU 0"):
        ResourcePool(4, timeout_s=0.5)
    with pytest.raises(ValueError, match="'GPU': 1"):  # a card of its own, whatever it takes of it
        ResourcePool(1, use_gpu=True, gpus_per_process=0.6, timeout_s=0.5)
    free = ResourcePool(1, cpu_per_process=1.0, timeout_s=10)  # the refused pools hold nothing back
    free.release()
    free.release()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n_per_node": 0}, "n_per_node=0"),
        ({"gpus_per_process": 1.5}, "gpus_per_process=1.5"),
        ({"gpus_per_process": 0}, "gpus_per_process=0"),
        ({"cpu_per_process": -1}, "cpu_per_process=-1"),
    ],
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResourcePool(**arguments)
