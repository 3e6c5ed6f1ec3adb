"""Python's collector of reference cycles, told what stays. Owns that and nothing else.

It goes through all objects only when a quarter as many as there were have come along since: with the modules of torch
and what was loaded that is once in minutes, until when each request's last cycles (grpc has some) are kept, and then a
tenth of a second in which nothing else is done. What was there when the service began is not looked at again; what
came since is small, and looked at often.
"""

import gc


def keep_what_is_there() -> None:
    """To be called once, when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.collect()  # so that it counts from nothing
