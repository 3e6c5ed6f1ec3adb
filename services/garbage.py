"""Python's collector of reference cycles, told what stays. Owns that and nothing else.

It goes through all objects only when a quarter as many as there were have come along since: with the modules of torch
and what was loaded that is once in minutes, until when each request's last cycles (grpc has some) are kept, and then a
tenth of a second in which nothing else is done. What was there when the service began is not looked at again; what
came since is small, and looked at often. While modules are imported nearly all that comes along stays, and looking for
what does not took a quarter of that time, and as much again at the process's end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_looked_for() -> Iterator[None]:
    """For imports: the collector waits for their end, and then leaves alone what they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_there() -> None:
    """To be called once, when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.collect()  # so that it counts from nothing
