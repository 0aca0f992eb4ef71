"""A stage keeps the memory that its batches free."""

import os
import subprocess
import sys

import pytest

# By itself glibc gives whatever is larger than 32 MiB back to the system as soon as it is free, without exception. What
# it keeps it may have to lay out again for some batches before each finds a place: so there are many.
PROGRAM = """
import resource, torch
from embedder.compat.malloc import keep_freed_memory
if {keeps}: keep_freed_memory()
def batch(): [torch.ones(10 << 20) for _ in range(3)]  # 40 MiB each
for _ in range(5): batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keeps):
    program = PROGRAM.format(keeps=keeps)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"EMBEDDER_FAST_START": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.slow
def test_batches_after_the_first_find_their_memory_again():
    assert 2 * page_faults(keeps=True) < page_faults(keeps=False)
