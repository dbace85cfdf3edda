"""Micro-batches: nothing lost, nothing above the limit, long episodes alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.seqlen_balancing import balanced_partition, micro_batches_by_count, micro_batches_by_tokens


def test_partition_balances_by_hand():
    assert balanced_partition([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]  # 8 and 10, the greedy's answer


def test_fewer_episodes_than_parts_leaves_parts_empty():
    assert balanced_partition([7], 3) == [[0], [], []]


def test_long_episode_is_alone_and_empty_ones_are_left_out():
    assert micro_batches_by_tokens([3, 0, 20, 4, 0, 3], 10) == [[2], [0, 3, 5]]


def test_nothing_to_do_is_no_micro_batch():
    assert micro_batches_by_tokens([], 10) == micro_batches_by_tokens([0, 0], 10) == []
    assert micro_batches_by_count([0], 10) == []


def test_by_count_keeps_the_order():
    assert micro_batches_by_count([1, 0, 1, 1], 2) == [[0, 2], [3]]


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 60))
def test_every_episode_once_within_the_limit(lengths, limit):
    batches = micro_batches_by_tokens(lengths, limit)
    assert sorted(i for part in batches for i in part) == [i for i, length in enumerate(lengths) if length]
    for part in batches:
        assert sum(lengths[i] for i in part) <= limit or len(part) == 1
    total = sum(length for length in lengths if length <= limit)
    shared = [part for part in batches if lengths[part[0]] <= limit]
    assert len(shared) <= 2 * -(-total // limit)  # two half-full micro-batches would have been one


@pytest.mark.parametrize("split", [micro_batches_by_tokens, micro_batches_by_count])
def test_limit_must_be_positive(split):
    with pytest.raises(ValueError, match="=0 holds no"):
        split([1], 0)
