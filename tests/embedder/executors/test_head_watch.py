import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from embedder.errors import HeadLostError
from embedder.executors import head_watch
from embedder.executors.head_watch import HeadWatch

SETTINGS_FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Head:
    """Server of gRPC's first frame, which can be stopped and started at one port."""

    def __init__(self):
        self.server = None
        self.start()
        self.port = self.server.getsockname()[1]

    def start(self):
        self.server = socket.create_server(("127.0.0.1", self.port if self.server else 0))
        threading.Thread(target=self._serve, args=(self.server,), daemon=True).start()

    @staticmethod
    def _serve(server):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(SETTINGS_FRAME)

    def stop(self):
        self.server.shutdown(socket.SHUT_RDWR)  # which ends its thread
        self.server.close()


@contextmanager
def watched(head):
    watch = HeadWatch(f"127.0.0.1:{head.port}")
    with watch.watching():
        yield watch


@pytest.fixture
def head(monkeypatch):
    for name, seconds in (("INTERVAL_S", 0.05), ("REPORTED_AFTER_S", 0.2), ("LOST_AFTER_S", 0.6), ("AGAIN_S", 0.2)):
        monkeypatch.setattr(head_watch, name, seconds)
    head = Head()
    yield head
    head.stop()


def wait_until(is_so):
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_head_that_goes_away_is_told_and_then_ends_the_block(head, said):
    before = head_watch.signal.getsignal(head_watch.SIGNAL)
    lost = pytest.raises(HeadLostError, match="start the head again, then the same command")
    with lost as caught, watched(head) as watch:
        head.stop()
        threading.Event().wait(20)
    assert watch.is_lost
    assert "\n" not in str(caught.value)
    assert len(said) == 1 and "has not answered for" in said[0] and "nothing listens there" in said[0]
    assert head_watch.signal.getsignal(head_watch.SIGNAL) == before
    head.start()


def test_a_library_that_catches_the_error_is_interrupted_again(head):
    num_caught = 0
    with pytest.raises(HeadLostError), watched(head):
        head.stop()
        try:
            threading.Event().wait(20)
        except HeadLostError:
            num_caught += 1
        threading.Event().wait(20)
    assert num_caught == 1
    head.start()


def test_a_head_that_comes_back_in_time_ends_nothing(head, said, monkeypatch):
    monkeypatch.setattr(head_watch, "LOST_AFTER_S", 60)
    with watched(head) as watch:
        head.stop()
        wait_until(lambda: len(said) == 1)
        head.start()
        wait_until(lambda: len(said) == 2)
    assert not watch.is_lost and "answers again" in said[1]


def test_a_block_that_fails_on_a_silent_head_ends_with_its_loss(head):
    """Ray may fail before the head is given up; ending Ray would then wait for the head."""
    with pytest.raises(HeadLostError), watched(head) as watch:
        head.stop()
        try:
            raise RuntimeError("no answer")
        finally:
            watch.answers()
    head.start()


def test_a_head_that_is_silent_for_a_moment_is_waited_for(head, monkeypatch):
    monkeypatch.setattr(head_watch, "LOST_AFTER_S", 60)
    with watched(head) as watch:
        assert watch.answers()
        head.stop()
        threading.Timer(0.3, head.start).start()
        assert watch.answers()


STUCK = """
import signal, sys, threading
from embedder.executors import head_watch
for name, seconds in (("INTERVAL_S", 0.05), ("LOST_AFTER_S", 0.3), ("AGAIN_S", 0.1), ("END_S", 0.3)):
    setattr(head_watch, name, seconds)
with head_watch.HeadWatch("127.0.0.1:9", print).watching():
    signal.pthread_sigmask(signal.SIG_BLOCK, {head_watch.SIGNAL})  # as if native code never returned
    threading.Event().wait(100)
"""


def test_a_process_that_no_signal_interrupts_is_ended_with_the_reason():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("embedder: the head of the cluster, 127.0.0.1:9, has not answered")
    assert f"embedder: {done.stdout}" == done.stderr, "the caller was informed before the end"


def test_in_another_thread_the_loss_is_told(head, said):
    """Python takes signals only in the main thread."""
    ended = []

    def run():
        with watched(head) as watch:
            head.stop()
            wait_until(lambda: watch.is_lost)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    head.start()
    assert ended == [True]
    assert any("can't work without it" in line for line in said)
