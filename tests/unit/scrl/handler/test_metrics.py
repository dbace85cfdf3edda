"""The latency histogram against sorted values."""

import random

import pytest

from scrl.handler.metrics import LatencyHistogram


def test_quantiles_are_within_a_bucket_of_the_exact_ones():
    draw = random.Random(1)
    values = sorted(draw.lognormvariate(-1.2, 1.5) for _ in range(5000))
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    for q in (0.5, 0.9, 0.99):
        exact = values[int(q * len(values)) - 1]
        assert exact <= histogram.quantile(q) <= exact * 2**0.5
    assert histogram.quantile(1.0) == histogram.max == values[-1]
    assert histogram.total / histogram.count == pytest.approx(sum(values) / len(values))


def test_edges():
    histogram = LatencyHistogram()
    assert histogram.quantile(0.5) == 0.0
    histogram.add(0.0)
    assert histogram.quantile(0.5) == 0.0
    histogram.add(1e6)
    assert histogram.quantile(0.99) == 1e6
