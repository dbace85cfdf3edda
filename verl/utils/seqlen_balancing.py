"""Which episodes share a micro-batch: balanced by tokens, never above a limit that they can keep."""

from collections.abc import Sequence


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split indices into ``num_parts`` parts with sums as equal as longest-first greedy makes them.

    Longest-processing-time scheduling (Graham 1969): the largest part is at most 4/3 of the best possible.

    Args:
        lengths: tokens of each episode.
        num_parts: parts wanted; parts stay empty where there are fewer episodes than parts.

    Returns:
        ``num_parts`` lists of indices into ``lengths``, each in ascending order.
    """
    assert num_parts >= 1, num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # Fewest tokens first, then fewest episodes, so that episodes of length 0 are spread as well.
        part = min(range(num_parts), key=lambda p: (sums[p], len(parts[p]), p))
        parts[part].append(index)
        sums[part] += lengths[index]
    return [sorted(part) for part in parts]


def micro_batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group episodes into as few balanced micro-batches as hold at most ``max_tokens`` each.

    An episode longer than ``max_tokens`` gets a micro-batch of its own. Episodes of length 0 carry no loss and are
    left out. Results need no reordering when each is written back by its row index.

    Args:
        lengths: tokens of each episode.
        max_tokens: limit of a micro-batch.

    Returns:
        Lists of indices into ``lengths``; each index of positive length occurs exactly once.

    Raises:
        ValueError: ``max_tokens`` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"ppo_max_token_len_per_gpu={max_tokens} holds no token; set it to 1 or more")
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    shared = [i for i, length in enumerate(lengths) if 0 < length <= max_tokens]
    total = sum(lengths[i] for i in shared)
    batches: list[list[int]] = []
    # Greedy may overfill a part though the sum would fit; len(shared) parts always fit, so this ends.
    for count in range(-(-total // max_tokens), len(shared) + 1):
        if count == 0:
            break
        parts = balanced_partition([lengths[i] for i in shared], count)
        if all(sum(lengths[shared[j]] for j in part) <= max_tokens for part in parts):
            batches = [[shared[j] for j in part] for part in parts]
            break
    return alone + batches


def micro_batches_by_count(lengths: Sequence[int], max_episodes: int) -> list[list[int]]:
    """Group episodes of positive length, in order, ``max_episodes`` at a time.

    Raises:
        ValueError: ``max_episodes`` is not positive.
    """
    if max_episodes < 1:
        raise ValueError(f"ppo_micro_batch_size_per_gpu={max_episodes} holds no episode; set it to 1 or more")
    rows = [i for i, length in enumerate(lengths) if length > 0]
    return [rows[start : start + max_episodes] for start in range(0, len(rows), max_episodes)]
