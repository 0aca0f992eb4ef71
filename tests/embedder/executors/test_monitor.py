"""Monitor of a run: CPU seconds of all its processes."""

import subprocess
import sys
import time

import psutil
import pytest

from embedder.executors.monitor import CpuUse


def test_cpu_seconds_of_children_are_counted_also_after_their_end():
    use = CpuUse()
    use.look([psutil.Process()])
    started_s = time.time()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    use.look([psutil.Process(), psutil.Process(child.pid)])
    child.communicate("\n")
    use.look([psutil.Process()])
    found_s = use.between(started_s, time.time())
    assert 0.2 < found_s < 3


def test_cpu_seconds_between_looks_are_a_straight_line():
    use = CpuUse([(10.0, 1.0), (20.0, 3.0), (30.0, 3.0)])
    assert use.between(15.0, 25.0) == pytest.approx(1.0)
    assert use.between(0.0, 40.0) == pytest.approx(2.0)
    assert CpuUse().between(0.0, 1.0) == 0.0
