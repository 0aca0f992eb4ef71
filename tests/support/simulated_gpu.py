"""A device whose streams are threads: what is put on one is done later, as on a GPU, in its order and in no other.

A copy reads memory of the device that nobody holds any more as NaN: an allocator would have given it to the next batch.
"""

import contextlib
import queue
import threading
import time
import weakref

import torch

from embedder.steps.host_copies import OverlappedCopies

DELAY_S = 0.005  # of each operation: whoever reads a result without waiting for it finds the old one
SLOW_S = 0.03  # of one stream's, so that nothing comes in time by chance


class Event:
    """A place in a stream's work."""

    def __init__(self, enable_timing=False, blocking=False):
        self._done, self.at_s = threading.Event(), None

    def record(self, stream):
        stream.put(self._mark)

    def _mark(self):
        self.at_s = time.perf_counter()
        self._done.set()

    def synchronize(self):
        assert self._done.wait(30), "a stream waits for itself"

    def elapsed_time(self, later):
        """Milliseconds, as torch has it; of two events that have come."""
        assert self._done.is_set()
        assert later._done.is_set()
        return 1000 * (later.at_s - self.at_s)


class Stream:
    """A thread that does what it is given, in order."""

    def __init__(self, name, log, delay_s):
        self.name, self._log, self._delay_s, self._work = name, log, delay_s, queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with torch.inference_mode():  # which is a thread's own
            while True:
                work = self._work.get()
                time.sleep(self._delay_s)
                work()

    def put(self, work, name=None):
        """Do this later."""
        self._work.put(work if name is None else lambda: (self._log.append((self.name, name)), work()))

    def wait_event(self, event):
        self.put(event.synchronize)

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class SimulatedGpu:
    """What `OverlappedCopies` takes of `torch.cuda`."""

    Event = Event

    def __init__(self, slow):
        self.log = []
        names = ("compute", "inward", "outward")
        self._streams = iter([Stream(name, self.log, SLOW_S if name == slow else DELAY_S) for name in names])
        self._default = next(self._streams)
        self._current = threading.local()

    def Stream(self, device):
        return next(self._streams)

    def current_stream(self, device=None):
        return getattr(self._current, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before


class SimulatedCopies(OverlappedCopies):
    """Copies on such streams; tensors stay on the CPU."""

    def __init__(self, slow=""):
        super().__init__("cpu", SimulatedGpu(slow))
        self.log = self._gpu.log

    def put(self, work, name):
        """Do this on the stream that computes."""
        self._gpu.current_stream().put(work, name)

    def _pin(self, like):
        return self._held(torch.full(like.shape, 99, dtype=like.dtype))

    def _keep_for(self, stream, values):
        assert stream is self._gpu.current_stream()
        self._held(values)

    def _held(self, values):
        """Memory that isn't given out again before the stream is done with it."""
        values.is_held = True
        return values

    def _copy(self, target, source):
        target.fill_(77)
        held, found = source if getattr(source, "is_held", False) else None, weakref.ref(source)

        def copy():
            there = held if held is not None else found()
            target.copy_(there) if there is not None else target.fill_(float("nan"))

        self._gpu.current_stream().put(copy, "copy")
        return target
