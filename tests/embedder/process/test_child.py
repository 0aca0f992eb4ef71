"""Child process: messages, deadlines, limits, and what is reported of its death."""

import sys
import time

import pytest

from embedder.process.child import ChildDiedError, ChildHungError, ChildProcess
from embedder.process.child_main import FAILED

SERVED = r"""
import ctypes, os, resource, signal, sys, time

def serve(channel, greeting):
    channel.send(b"G", {"greeting": greeting})
    while (payload := channel.receive()) is not None:
        word, _, rest = payload.partition(b" ")
        if word == b"exit":
            print("first\n\nlast words of it", flush=True)
            os._exit(int(rest))
        if word == b"fork" and os.fork() == 0:
            time.sleep(60)
        if word == b"fork":
            os._exit(3)
        if word == b"crash":
            ctypes.string_at(0)
        if word == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == b"sleep":
            time.sleep(60)
        if word == b"print":
            for _ in range(int(rest)):
                os.write(1, b"x" * 1000)
        if word == b"half":
            os.write(channel._replies.fileno(), b"E\0\0")
            os._exit(0)
        if word == b"allocate":
            try:
                bytearray(1 << 30)
            except MemoryError:
                payload = b"no memory"
        channel.send(b"E", payload)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a child that sends back what it is sent, or does what the word says."""
    served, started = tmp_path / "served.py", []
    served.write_text(SERVED)

    def starts(**options):
        child = ChildProcess([sys.executable, "-I"], served, {"greeting": "good day"}, **options)
        started.append(child)
        assert child.receive(20) == (b"G", b'{"greeting": "good day"}')
        return child

    yield starts
    for child in started:
        child.kill()


def ask(child, text, limit_s=20.0):
    child.send(b"Q", text, limit_s)
    return child.receive(limit_s)


@pytest.mark.parametrize("limit_s", [3e6, 1e15, float("inf")])
def test_a_limit_of_months_or_without_end_is_one(start, limit_s):
    assert ask(start(), b"hello", limit_s) == (b"E", b"hello")


def test_messages_of_any_size_come_back_whole(start):
    child = start()
    for size in (0, 1, 9, 70_000, 5_000_001):
        assert ask(child, b"a" * size) == (b"E", b"a" * size)


@pytest.mark.parametrize(
    ("text", "said", "was_killed"),
    [
        (b"exit 7", "its process ended with exit code 7: first | last words of it$", False),
        (b"kill", "its process was ended by SIGKILL$", True),
        (b"crash", r"was ended by SIGSEGV: in File .*ctypes.*, line \d+ in string_at$", False),
        (b"half", "ended with exit code 0$", False),
        (b"fork", "ended with exit code 3$", False),  # its own child still holds the channel
    ],
)
def test_a_death_is_told_with_its_code_or_signal_and_the_last_words(start, text, said, was_killed):
    with pytest.raises(ChildDiedError, match=said) as caught:
        ask(start(), text)
    assert caught.value.was_killed == was_killed
    assert not isinstance(caught.value, ChildHungError)


def test_a_call_ends_at_its_deadline(start):
    child = start()
    began = time.monotonic()
    with pytest.raises(ChildHungError, match="took longer than 0.2 s"):
        ask(child, b"sleep", 0.2)
    with pytest.raises(ChildHungError, match="took longer than 0.2 s"):  # which it takes no more
        child.send(b"Q", bytes(10_000_000), 0.2)
    assert time.monotonic() - began < 5


def test_a_child_that_prints_without_end_is_read_and_ends_at_its_deadline_all_the_same(start):
    child = start()
    assert ask(child, b"print 3000") == (b"E", b"print 3000")
    with pytest.raises(ChildHungError):
        ask(child, b"print 1000000000", 0.5)


def test_a_message_larger_than_allowed_is_refused_before_it_is_read(start):
    child = start()
    child.send(b"Q", b"a" * 1001, 20)
    with pytest.raises(ChildDiedError, match="sent 1001 bytes, and 1000 are the most"):
        child.receive(20, max_bytes=1000)


@pytest.mark.medium
def test_memory_is_bounded(start):
    assert ask(start(), b"allocate")[1] == b"allocate"
    assert ask(start(memory_bytes=512 << 20), b"allocate")[1] == b"no memory"


def test_what_cannot_be_imported_is_an_error_of_the_first_message(tmp_path):
    served = tmp_path / "served.py"
    served.write_text("import a_package_of_nobody\n")
    child = ChildProcess([sys.executable, "-I"], served, {})
    kind, payload = child.receive(20)
    assert (kind, b"a_package_of_nobody" in payload) == (FAILED, True)
    child.close()
    child.close()
