"""Why a device had no input: the step before, Ray's driver, its object store, or the process of the stage itself."""

import time
from typing import NamedTuple

import pyarrow as pa


class InputWaits(NamedTuple):
    """Seconds in which a device had no input, by cause.

    `step_s`: the step before had not made it yet. `driver_s`: it was made, and Ray's driver had not sent it to this
    process. `store_s`: it was sent, and came from the object store, or another call was before it. `unpack_s`: it was
    here, and being unpacked and grouped.
    """

    step_s: float = 0.0
    driver_s: float = 0.0
    store_s: float = 0.0
    unpack_s: float = 0.0


class Arrival(NamedTuple):
    """Unix times of a block's way to a stage; one after the other, if the clocks of the nodes agree.

    The step before ended with it at `made_s`, the driver sent it at `sent_s`, and the call began at `came_s`.
    """

    made_s: float
    sent_s: float
    came_s: float

    @classmethod
    def of(cls, trace: pa.ChunkedArray, sent_s: float | None) -> "Arrival":
        """Return that of a block that came now; without `sent_s`, as outside of Ray, what was made was not sent."""
        came_s = time.time()
        ends = [step["started_s"] + step["wall_s"] for steps in trace.drop_null().to_pylist() for step in steps]
        return cls(max(ends, default=came_s), came_s if sent_s is None else sent_s, came_s)

    def split(self, waited_s: float, given_s: float) -> InputWaits:
        """Split a device's wait of so many seconds until its input was given to it, at a Unix time."""
        places = [given_s - waited_s]
        for time_s in self:
            places.append(min(max(time_s, places[-1]), given_s))
        return InputWaits(*(later - earlier for earlier, later in zip(places, [*places[1:], given_s], strict=True)))
