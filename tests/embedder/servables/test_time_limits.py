"""Servables that hang: ended with their process where they have one, else the end of the run in one line."""

import os

import pyarrow as pa
import pytest
from servable_runs import own_maker, run_servables

from embedder.batch_schema import HUNG
from embedder.errors import RunFailedError
from embedder.servables.running_servable import OwnThread, RunningServable, decoded_name

SOURCE = '''
import pyarrow as pa


class Slow:
    """Waits for a second where a text says so; says which process it is in."""

    def __init__(self, loads_s=0.0):
        self.loads_s = loads_s

    def load(self, device):
        import threading
        import time

        time.sleep(self.loads_s)
        self.thread = threading.get_ident()

    def __call__(self, batch):
        import os
        import threading
        import time

        assert threading.get_ident() == self.thread
        if "hang" in batch.column("text").to_pylist():
            time.sleep(60)
        return {"pid": pa.array([os.getpid()] * batch.num_rows, pa.int64())}


class Upper:
    def load(self, device):
        pass

    def __call__(self, batch):
        return pa.record_batch({"text": pa.array([text.upper() for text in batch.column("text").to_pylist()])})
'''
TEXT = {"text": {"make": "text"}}
PID = {"pid": {"type": "int64"}}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def own(file):
    """Makes a servable of the file."""
    return own_maker(file, "Slow", TEXT, PID)


@pytest.mark.slow
def test_rows_that_hang_are_told_and_the_others_are_computed_where_a_limit_in_time_is_set(own):
    table = pa.table({"caption": ["a", "hang", "ccc"]})
    found = run_servables(table, own(timeout_s=10.0, batch_size=1))
    first, hung, last = found["own.pid"].to_pylist()
    assert hung is None and os.getpid() not in (first, last)
    assert "its process took longer than 10 s and was ended" in found["own.error"][1].as_py()
    assert found["own.error"].null_count == 2


def test_what_takes_from_a_row_that_hung_says_so_too(own):
    taker = own(
        "Upper",
        name="taker",
        outputs={"text": {"type": "string"}},
        inputs={"text": {"make": "text", "of": "first.text"}},
    )
    source = own("Upper", name="first", outputs={"text": {"type": "string"}}, timeout_s=60)
    running = RunningServable(taker)
    table = pa.table({"first.text": ["A", None], "first.error": [None, f"{source.where()}: its {HUNG} 60 s"]})
    assert HUNG in running(table)["taker.error"][1].as_py()
    running.close()


@pytest.mark.medium
def test_a_module_of_this_interpreter_is_found_by_its_process(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    section = {"name": "own", "kind": "python", "uri": "own_module:Slow", "inputs": TEXT, "outputs": PID}
    found = run_servables(pa.table({"caption": ["a"]}), section | {"timeout_s": 60})
    assert found["own.error"].to_pylist() == [None]
    assert found["own.pid"].to_pylist() != [os.getpid()]


def test_what_hangs_in_this_process_ends_the_run_in_one_line_and_is_not_called_again(own, monkeypatch):
    monkeypatch.setattr("embedder.servables.running_servable.CALL_S", 0.2)
    running = RunningServable(own())
    table = pa.table({"input::text": ["hang", "a"]}).rename_columns([decoded_name(running.inputs["text"])])
    with pytest.raises(RunFailedError, match=r"servable own .*: a call of 2 rows took longer than 0.2 s.*timeout_s"):
        running(table)
    with pytest.raises(RunFailedError, match="a call of 2 rows") as again:
        running(table.slice(1))
    assert "\n" not in str(again.value)
    running.close()


def test_what_does_not_load_in_time_in_this_process_ends_the_run_in_one_line(own, monkeypatch):
    monkeypatch.setattr("embedder.servables.running_servable.LOAD_S", 0.2)
    with pytest.raises(RunFailedError, match=r"servable own .*: loading it took longer than 0.2 s in this process"):
        RunningServable(own(settings={"loads_s": 30}))


def test_threads_of_torch_are_those_of_whoever_calls(own):
    torch = pytest.importorskip("torch")
    before, here = torch.get_num_threads(), OwnThread("x")
    try:
        torch.set_num_threads(3)
        assert here.call("it", 10, torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


def test_an_error_of_a_call_is_raised_as_it_is(own):
    def fails():
        raise TimeoutError("of its own")

    here = OwnThread("x")
    with pytest.raises(TimeoutError, match="of its own"):
        here.call("it", 10, fails)
    assert here.hung is None and here.call("it", 10, int, "7") == 7
