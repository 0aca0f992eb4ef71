"""Entry point of the sandbox process: tie its life to the parent's, limit its memory, then serve.

Run as a script by `embedder.media.sandbox_process`, isolated and without `site`, so only the standard library can be
imported until the parent's module search path is taken over.
"""

import faulthandler
import fcntl
import json
import os
import resource
import select
import signal
import sys

LIFELINE = 0  # standard input: a pipe without any writes; the parent's end of it closes when the parent dies


def main() -> None:
    """Read the start message from the command line and serve until the parent closes the socket."""
    start = json.loads(sys.argv[1])
    die_with_parent()
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent ends what is in flight first, then its children
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound_memory(start["memory_bytes"])
    faulthandler.enable()  # prints in which decoder a crash was
    sys.path[:] = start["sys_path"]
    os.environ["OMP_NUM_THREADS"] = "1"  # for NumPy, where a resize needs it: several decoders share the machine

    from embedder.media.sandbox_server import Server

    Server(**start["server"]).run()


def bound_memory(num_bytes: int) -> None:
    """Limit the address space, so that an image too large for it is an error and not the end of the machine.

    macOS refuses any limit; `embedder.placement.hardware.FEATURES` says what is lost.
    """
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if allowed == resource.RLIM_INFINITY else min(num_bytes, allowed)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except ValueError:
        if sys.platform == "linux":
            raise


def die_with_parent() -> None:
    """Have the kernel end this process, whatever C code it hangs in, as soon as the parent is gone.

    The end of the lifeline pipe sends a signal. PR_SET_PDEATHSIG would not do: it fires when the *thread* that
    started the child ends, and decoders may be used by threads that come and go.
    """
    fcntl.fcntl(LIFELINE, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere it is SIGIO, which ends a process that isn't stopped
        fcntl.fcntl(LIFELINE, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(LIFELINE, fcntl.F_SETFL, fcntl.fcntl(LIFELINE, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(LIFELINE, 0)
    if poll.poll(0):  # it died before this was set up
        os._exit(1)


if __name__ == "__main__":
    main()
