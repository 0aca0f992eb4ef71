import pytest

from embedder.steps.batch_size_tuner import MAX_S, NUM_TRIALS, BatchSize


def run_until_chosen(batch_size, cost_s, num_rows=10_000):
    """Give blocks to the stage until a size is chosen; the rows that were tried."""
    tried = []
    while batch_size.chosen is None and sum(tried) < num_rows:
        rows = batch_size.next_rows(num_rows)
        tried.append(rows)
        batch_size.note(rows, cost_s(rows, len(tried)))
    return tried


@pytest.mark.parametrize("best", [32, 16, 8])
def test_the_cheapest_a_row_is_found(best):
    batch_size = BatchSize((32, 16, 8))
    tried = run_until_chosen(batch_size, lambda rows, _: rows * (1e-4 if rows == best else 2e-4))
    assert batch_size.chosen == batch_size.next_rows(best) == best
    assert {size: tried.count(size) for size in set(tried)} == dict.fromkeys((32, 16, 8), NUM_TRIALS + 1)


def test_the_first_call_of_a_size_loads_kernels_and_does_not_count():
    batch_size = BatchSize((32, 16))
    run_until_chosen(
        batch_size, lambda rows, number: rows * (5e-4 if number <= 2 and rows == 16 else 2e-4 + rows * 1e-6)
    )
    assert batch_size.chosen == 16


@pytest.mark.parametrize("block_rows", [256, 300, 768, 1024])
def test_a_size_that_no_block_holds_ends_no_trial_of_the_others(block_rows):
    sizes = (256, 512, 1024, 128, 64)
    batch_size, tried = BatchSize(sizes), []
    for _ in range(100):
        left = block_rows
        while left and batch_size.chosen is None:
            rows = min(left, batch_size.next_rows(block_rows))
            batch_size.note(rows, rows * 1e-4)
            tried.append(rows)
            left -= rows
    assert batch_size.chosen == 256
    assert {size for size in sizes if size <= block_rows} <= set(tried)
    assert BatchSize((32, 16, 8)).next_rows(5) == 32, "a block of fewer rows than the default is one batch"


def test_little_better_is_noise():
    batch_size = BatchSize((32, 16))
    run_until_chosen(batch_size, lambda rows, _: rows * (0.98e-4 if rows == 16 else 1e-4))
    assert batch_size.chosen == 32


def test_trials_end_in_time_and_large_models_keep_the_first_size():
    batch_size = BatchSize((32, 16, 8))
    batch_size.note(32, MAX_S)
    assert batch_size.chosen == 32


def test_one_size_is_not_tried_and_other_sizes_tell_nothing():
    assert BatchSize((7,)).chosen == 7
    batch_size = BatchSize((32, 16))
    batch_size.note(5, MAX_S)
    assert batch_size.chosen is None
