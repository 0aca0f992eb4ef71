"""Programs in another interpreter: a second environment that has pyarrow and NumPy, nothing else of this project."""

import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from servable_runs import run_servables

from embedder.servables import make_servable
from embedder.servables.interpreter import ChildError, InterpreterLimits, child_environment, start_program
from embedder.servables.program import ServableProgram
from embedder.servables.servable_errors import ServableError

SOURCE = '''
import os
import subprocess
import sys
import time

import pyarrow as pa


class Words:
    """Counts letters, and does to its process what the text says."""

    def __init__(self, loud=False):
        self.loud = loud

    def load(self, device, num_threads):
        if self.loud:
            print("noise of a library " * 10000)
            os.write(1, b"written past Python")
        self.threads = num_threads

    def __call__(self, batch):
        texts = batch.column("text").to_pylist()
        if "die" in texts:
            print("the last words", flush=True)
            os.kill(os.getpid(), 9)
        if "leave" in texts:
            sys.exit(7)
        if "hang" in texts:
            time.sleep(1000)
        if "slow" in texts:
            time.sleep(1)
        if "raise" in texts:
            raise ValueError("no such text")
        if "fork" in texts:
            return {"length": [subprocess.Popen(["sleep", "1000"]).pid for _ in texts]}
        if self.loud:
            print("more noise")
        return {"length": pa.array([len(text) for text in texts], pa.int64())}


class Environment:
    """Says what it sees."""

    def load(self, device):
        pass

    def __call__(self, batch):
        import importlib.util

        found = [name for name in ("embedder", "pydantic", "torch", "ray") if importlib.util.find_spec(name)]
        values = [sys.prefix, " ".join(sorted(os.environ)), " ".join(found), sys.stdin.read()]
        return {"seen": pa.array(values[: batch.num_rows], pa.string())}


class Missing:
    def load(self, device):
        import a_framework_of_another_environment

    def __call__(self, batch):
        pass


class Dead(Missing):
    def load(self, device):
        print("no device found", file=sys.stderr)
        os._exit(3)


class Endless(Missing):
    def load(self, device):
        time.sleep(1000)


class Tensors(Missing):
    """Mean colour of images, from a tensor of Arrow's own type."""

    def load(self, device):
        pass

    def __call__(self, batch):
        return {"means": batch.column("image").to_numpy_ndarray().mean((1, 2))}
'''


@pytest.fixture(scope="module")
def second_python(tmp_path_factory):
    """The interpreter of a virtual environment with links to only pyarrow and NumPy."""
    folder = tmp_path_factory.mktemp("second") / "env"
    venv.create(folder, symlinks=True)
    here = Path(pa.__file__).parents[1]
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("pyarrow", "numpy", "numpy.libs", "pyarrow.libs"):
        if (here / name).is_dir():
            (packages / name).symlink_to(here / name)
    return str(folder / "bin/python")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "words.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def start(second_python, source):
    """Starts a class of the source; what it started is ended with the test."""
    started = []

    def starts(class_name="Words", python=second_python, limits=None, **settings):
        program = ServableProgram(source, class_name, settings)
        found = start_program(python, program, where="servable s", device="cpu", num_threads=2, limits=limits)
        started.append(found)
        return found

    yield starts
    for each in started:
        each.close()


def texts(*values):
    return pa.record_batch({"text": pa.array(values, pa.string())})


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid):
    for _ in range(500):
        if not is_alive(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_class_runs_in_the_environment_that_is_named_without_this_ones_packages_and_secrets(
    start, second_python, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("VLLM_API_KEY", "x")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    program = start("Environment")
    prefix, environment, found, stdin = program(texts(*"abcd"))["seen"].to_pylist()
    assert prefix == str(Path(second_python).parents[1])
    assert not {"AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "PYTHONPATH"} & set(environment.split())
    assert "PATH" in environment.split()
    assert found == stdin == ""
    assert program.versions["pyarrow"] == pa.__version__


def test_what_libraries_print_breaks_no_message(start):
    program = start(loud=True)
    for _ in range(3):
        assert program(texts("a", "bcd"))["length"].to_pylist() == [1, 3]


def test_large_batches_and_tensors_travel(start):
    images = np.random.default_rng(0).integers(0, 256, (40, 224, 224, 3), dtype=np.uint8)
    batch = pa.record_batch({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images)})
    means = np.array(start("Tensors")(batch)["means"].to_pylist())
    assert np.abs(means - images.mean((1, 2))).max() < 1e-9


def test_an_error_is_told_and_the_process_goes_on(start):
    program = start()
    pid = program.pid
    with pytest.raises(ChildError, match="ValueError: no such text"):
        program(texts("a", "raise"))
    assert program(texts("a"))["length"].to_pylist() == [1]
    assert program.pid == pid


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "said"),
    [("die", "was ended by SIGKILL: the last words"), ("leave", "ended with exit code 7"), ("hang", "longer than 1 s")],
)
def test_a_death_or_a_hang_is_told_and_another_process_follows(text, said, start):
    program = start(limits=InterpreterLimits(call_s=1.0))
    pid = program.pid
    with pytest.raises(ChildError, match=said):
        program(texts(text))
    assert not is_alive(pid)
    assert program(texts("a"))["length"].to_pylist() == [1]
    assert program.pid != pid


def test_the_answer_to_an_interrupted_call_is_not_that_to_the_next(start):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    program, slow = start(), texts("slow")
    program(texts("a"))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            program(slow)
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(1)
    assert program(texts("a"))["length"].to_pylist() == [1]


def test_too_many_deaths_end_it(start):
    program = start(limits=InterpreterLimits(max_deaths=1))
    with pytest.raises(ChildError):
        program(texts("die"))
    with pytest.raises(ServableError, match="servable s: .*the last words; that was death 2 in 2 batches, and 1"):
        program(texts("die"))


@pytest.fixture
def counting(source, second_python):
    """Makes a servable of a class of the source in the other interpreter; by default one that counts letters."""

    def make(class_name="Words", **keys):
        section = {"name": "words", "kind": "python", "uri": f"{source}:{class_name}", "python": second_python}
        columns = {"inputs": {"text": {"make": "text"}}, "outputs": {"length": {"type": "int64"}}}
        return make_servable(section | columns | keys)

    return make


@pytest.mark.medium
def test_rows_that_kill_the_process_are_found_and_the_others_are_computed(counting):
    captions = ["a", "bb", "die", "dddd", "raise", "ffffff"]
    table = run_servables(pa.table({"image": pa.nulls(6, pa.binary()), "caption": captions}), counting())
    assert table["words.length"].to_pylist() == [1, 2, None, 4, None, 6]
    errors = table["words.error"].to_pylist()
    assert "was ended by SIGKILL: the last words" in errors[2]
    assert "ValueError: no such text" in errors[4]
    assert [each for row, each in enumerate(errors) if row not in (2, 4)] == [None] * 4


@pytest.mark.medium
def test_rows_that_hang_longer_than_the_servable_allows_are_ended_and_the_others_are_computed(counting):
    found = run_servables(pa.table({"caption": ["a", "hang", "ccc"]}), counting(timeout_s=0.5))
    assert found["words.length"].to_pylist() == [1, None, 3]
    assert "its process took longer than 0.5 s and was ended" in found["words.error"][1].as_py()


def test_loading_ends_after_the_time_that_the_servable_names(counting):
    with pytest.raises(ServableError, match=r"can't be loaded: its process took longer than 0.5 s and was ended"):
        counting("Endless", load_timeout_s=0.5).load()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"timeout_s": float("inf")}, "timeout_s = inf"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s = nan"),
        ({"load_timeout_s": 1e7}, "less than or equal to 1000000"),
    ],
)
def test_limits_in_time_that_can_not_hold_are_refused_in_a_line(keys, said, counting):
    with pytest.raises(ServableError, match=re.escape(said)) as caught:
        counting(**keys)
    assert "\n" not in str(caught.value)


def test_limits_in_time_change_no_fingerprint(counting):
    assert counting(timeout_s=5, load_timeout_s=7).fingerprint() == counting().fingerprint()


def test_closing_ends_the_process_and_those_that_it_started(start):
    program = start()
    child = program.pid
    (grandchild,) = program(texts("fork"))["length"].to_pylist()
    program.close()
    program.close()
    assert wait_for_end(child)
    assert wait_for_end(grandchild)


def test_the_process_dies_with_its_parent_while_it_hangs(source, second_python, tmp_path):
    parent = f"""
import pyarrow as pa
from embedder.servables.interpreter import start_program
from embedder.servables.program import ServableProgram

program = start_program(
    {second_python!r}, ServableProgram({source!r}, "Words"), where="s", device="cpu", num_threads=1
)
print(program.pid, flush=True)
program(pa.record_batch({{"text": ["hang"]}}))
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.communicate()
    assert wait_for_end(pid)


@pytest.mark.parametrize(
    ("class_name", "said"),
    [
        ("Missing", "it imports 'a_framework_of_another_environment', which python = .* doesn't have; install it"),
        ("Dead", "can't be loaded: its process ended with exit code 3: no device found"),
        ("Nothing", "has no class or function 'Nothing'; it has"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_a_line(class_name, said, start):
    with pytest.raises(ServableError, match=said) as caught:
        start(class_name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("python", "said"), [("/nowhere/python", "there is no such executable"), ("true", "process ended with exit code 0")]
)
def test_what_is_no_interpreter_is_told_in_a_line(python, said, start):
    with pytest.raises(ServableError, match=said):
        start(python=python)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, r"of pyarrow, found none .*bin/python -m pip install -U pyarrow"),
        ("__version__ = '13.0.0'\n", r"of pyarrow, found version 13.0.0; 14 or later is needed; .*install -U"),
    ],
)
def test_an_interpreter_without_pyarrow_or_with_an_older_one_is_told_with_the_cure(start, tmp_path, module, said):
    venv.create(tmp_path / "other", symlinks=True)
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    if module:
        (packages / "pyarrow.py").write_text(module)
    with pytest.raises(ServableError, match=said):
        start(python=str(tmp_path / "other/bin/python"))


def test_variables_with_a_secrets_name_never_pass():
    given = {"PATH": "p", "CUDA_VISIBLE_DEVICES": "0", "VLLM_API_KEY": "k", "HF_TOKEN": "t", "RAY_ADDRESS": "a"}
    found = child_environment(given, 3)
    assert found["PATH"] == "p"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["OMP_NUM_THREADS"] == "3"
    assert not {"VLLM_API_KEY", "HF_TOKEN", "RAY_ADDRESS"} & set(found)
