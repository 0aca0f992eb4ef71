import threading
import time

import pyarrow as pa
import pytest

from embedder.executors.local_threads import encode_all, encode_with


def tables(number):
    return [pa.table({"row": [index, index]}) for index in range(number)]


def rows(encoded):
    return [table["row"][0].as_py() for table in encoded]


@pytest.mark.parametrize("num_tables", [0, 1, 3, 50])
@pytest.mark.parametrize("num_cpus", [1, 2, 3])
def test_every_table_comes_once_and_in_order(num_tables, num_cpus):
    def encode(table):
        time.sleep(0.001 * (table["row"][0].as_py() % 3))
        return table

    assert rows(encode_all(iter(tables(num_tables)), encode, num_cpus)) == list(range(num_tables))


@pytest.mark.parametrize(("threads_help", "num_workers"), [(True, 1), (False, 3)])
def test_the_threads_that_prove_faster_do_the_rest(threads_help, num_workers):
    import torch

    workers = []

    def encode(table):
        is_alone = torch.get_num_threads() == 1
        workers.append(threading.current_thread())
        time.sleep(0.02 if is_alone == threads_help else 0.002)
        return table

    assert len(rows(encode_all(iter(tables(60)), encode, 3))) == 60
    assert len(set(workers[-20:])) == num_workers


def test_an_error_ends_the_run_and_no_thread_stays():
    def encode(table):
        if table["row"][0].as_py() == 3:
            raise ValueError("broken")
        return table

    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        list(encode_with(tables(100), encode, 2, 1))
    assert threading.active_count() == before


def test_no_more_is_taken_ahead_than_workers_need():
    taken = []

    def source():
        for table in tables(100):
            taken.append(table)
            yield table

    encoded = encode_with(source(), lambda table: table, 2, 1)
    next(encoded)
    assert len(taken) <= 4
    encoded.close()
