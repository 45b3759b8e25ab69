"""The statistics and the rewriting of tests/benchmark.py, by hand."""
import numpy as np
import pytest

import benchmark


def test_interquartile_mean_is_the_mean_of_the_middle_half():
    assert benchmark.interquartile_mean([1000.0, 2.0, 4.0, -7.0]) == 3.0
    assert benchmark.interquartile_mean(np.arange(20.0) ** 2) == np.mean(np.arange(5.0, 15.0) ** 2)


def test_bootstrap_interval_is_as_wide_as_the_standard_error_says():
    """Of normal values the interquartile mean has about 1.2 times the variance of the mean."""
    values = np.random.default_rng(1).normal(50.0, 10.0, 400)
    low, high = benchmark.bootstrap_interval(values, 2000)
    assert low < benchmark.interquartile_mean(values) < high
    assert high - low == pytest.approx(2 * 1.96 * 10 * np.sqrt(1.2 / 400), rel=0.2)
    assert list(benchmark.bootstrap_interval(np.full(20, 500.0))) == [500.0, 500.0]


def test_only_what_stands_between_the_markers_is_rewritten():
    begin, end = benchmark.MARKERS
    assert benchmark.rewrite(f"a\n{begin}\nold\n{end}\nb\n", ["new", "lines"]) == f"a\n{begin}\nnew\nlines\n{end}\nb\n"


def test_solved_counts_only_runs_that_were():
    runs = [dict(solved_at=step) for step in (90_000, None, 110_000)]
    assert benchmark.solved(dict(runs=runs)) == ("2 of 3", "100 k (90 - 110 k)")
    assert benchmark.solved(dict(runs=runs[1:2])) == ("0 of 1", "-")
