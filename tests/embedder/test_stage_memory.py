"""A stage keeps the memory that its batches free."""

import subprocess
import sys

# A batch holds more at once than glibc keeps by itself, however often it has seen it freed (64 MiB).
PROGRAM = """
import resource, torch
from embedder.steps.memory import keep_freed_memory
if {keeps}: keep_freed_memory()
def batch(): [torch.ones(6 << 20) for _ in range(4)]  # 24 MiB each
for _ in range(3): batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keeps):
    program = PROGRAM.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_batches_after_the_first_find_their_memory_again():
    assert 10 * page_faults(keeps=True) < page_faults(keeps=False)
