"""Actor ranks and engines share cards by fraction. Ray's GPUs are numbers here: it hands them out as it would cards."""

from collections.abc import Iterator

import pytest
import ray

from verl.single_controller import ResourcePool

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two_cards() -> Iterator[None]:
    for attempt in range(3):  # on a busy machine Ray gives its own processes too little time
        try:
            ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="ERROR")
            break
        except Exception as error:
            if attempt == 2 or "timed out" not in str(error):
                raise
    yield
    ray.shutdown()


@ray.remote
class Where:
    def card(self) -> tuple[list[int], str]:
        return ray.get_gpu_ids(), ray.get_runtime_context().get_node_id()


def cards(options: list[dict]) -> list[list[int]]:
    actors = [Where.options(**one).remote() for one in options]
    return [ids for ids, _ in ray.get([actor.card.remote() for actor in actors], timeout=60)]


@pytest.mark.parametrize(("engines", "share"), [(2, 0.4), (4, 0.3)])
def test_every_rank_has_a_card_and_engine_i_is_on_that_of_rank_i(two_cards, engines, share):
    """By fractions alone Ray would put the first two engines onto one card, and then have none left for a rank."""
    pool = ResourcePool(2, use_gpu=True, gpus_per_process=round(1 - engines // 2 * share, 4), cpu_per_process=0.1)
    guests = cards([pool.beside(index, share) for index in range(engines)])
    ranks = cards([pool.options(rank) for rank in range(2)])
    assert sorted(ranks) == [[0], [1]]
    assert guests == [ranks[index % 2] for index in range(engines)]
    pool.release()


def test_an_engine_over_two_cards_has_them_to_itself(two_cards):
    pool = ResourcePool(1, use_gpu=True, gpus_per_process=2, cpu_per_process=0)
    (held,) = cards([pool.options(0)])
    assert sorted(held) == [0, 1]
    with pytest.raises(ValueError, match="'GPU': 1"):
        ResourcePool(1, use_gpu=True, timeout_s=0.5)
    pool.release()


def test_without_gpus_a_guest_takes_nothing(two_cards):
    pool = ResourcePool(1, cpu_per_process=0.1)
    assert cards([pool.beside(index, 0.4) for index in range(3)]) == [[], [], []]
    pool.release()
