"""What a command that cannot go on says: a sentence that tells what is wrong and what to do.

Owns the words for what the operating system refused, and the error for a command that was given wrongly. What else
goes wrong is told by the error of its own part.
"""

import errno

_TO_DO = {
    errno.ENOENT: "make it first, or give another",
    errno.ENOTDIR: "a part of it is a file: give a folder",
    errno.EEXIST: "a file is in the way: give a folder, or another name",
    errno.EISDIR: "a folder is there: give a file",
    errno.EACCES: "give another place, or ask its owner for the right to it",
    errno.EPERM: "give another place, or ask its owner for the right to it",
    errno.EROFS: "give a place that can be written to",
    errno.ENOSPC: "free space there, or give another place",
    errno.EDQUOT: "free space there, or give another place",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "the disk does not do it: look at it (dmesg)",
    errno.ECONNREFUSED: "start what should listen there, or give its address",
}


class UsageError(Exception):
    """The command cannot be run as it was given. The message says what to give; the exit status is 2."""

    code = "usage"


def refused(error: OSError, where: object = None) -> str:
    """A sentence about `error`: the place (`where`, else what the error names), why, and what to do about it."""
    place = error.filename if where is None else where
    why = error.strerror or str(error) or type(error).__name__
    what = f"{_shown(place)}: {why}" if place not in (None, "") else why
    to_do = _TO_DO.get(error.errno or 0)
    return f"{what}; {to_do}" if to_do else what


def _shown(place: object) -> str:
    return place.decode(errors="replace") if isinstance(place, bytes) else str(place)
