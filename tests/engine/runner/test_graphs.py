"""Which numbers of rows get graphs, and which of them graphs with drafts. Capturing itself needs a GPU."""

from itertools import pairwise

from engine.runner.graphs import drafting_buckets, row_buckets


def test_buckets_rise_to_the_largest_pass_and_none_is_far_above_the_one_before():
    for max_rows in (2, 3, 5, 32, 100, 1000, 2000):
        buckets = row_buckets(max_rows)
        assert buckets[-1] == max_rows and list(buckets) == sorted(set(buckets))
        assert all(b <= 2 * a for a, b in pairwise(buckets))


def test_every_pass_that_may_hold_drafts_finds_a_bucket_with_them():
    """Limits that are no bucket left the pass of so many rows without one, and the engine ended."""
    for max_rows in range(2, 40):
        buckets = row_buckets(max_rows)
        for limit in range(50):
            drafting = drafting_buckets(buckets, limit)
            for rows in range(1, max_rows + 1):
                bucket = next(size for size in buckets if size >= rows)
                assert bucket in drafting or not (rows <= limit >= 2), (max_rows, limit, rows)
            assert drafting or limit < 2
