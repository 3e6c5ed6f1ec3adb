"""What this process has of the machine, from /proc. Owns the reading of it."""

import os
from pathlib import Path

SELF = Path("/proc/self")


def resident_bytes() -> int:
    """RAM that it has now, its share of what is mapped included."""
    return int((SELF / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def written_bytes() -> int:
    """That it caused to be written to disks since it started; 0 where the system does not say."""
    try:
        lines = (SELF / "io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)
