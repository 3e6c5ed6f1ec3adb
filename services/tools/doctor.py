"""`thimble doctor`: what is wrong with a machine for this product, and what to do about each thing. Changes nothing.

Owns the checks. Each reads what the system says of itself under one root, so that a test can show it another machine.
Text of a finding names no path, host or user: `thimble report` gives it away.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.build import BuildError, compiler

GB = 1_000_000_000
NEEDED_GB = {"store": 76.0, "ram": 28.0}  # 3.5-Super: 63.4 GB of experts, 7 of dense weights, snapshots; 32 GB as sold


@dataclass(frozen=True)
class Finding:
    """`level`: ok, note (slower than need be, or not known) or bad (will not work as it should)."""

    level: str
    name: str
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n             {self.advice}" if self.advice else ""
        return f"  {self.level:<5}{self.name}: {self.seen}{advice}"


@dataclass(frozen=True)
class Machine:
    """Where to look. `root` stands before /proc and /sys; `folder` is on the disk of the store."""

    root: Path = Path("/")
    folder: Path = Path()
    nvidia_smi: str = "nvidia-smi"

    def text(self, path: str) -> str:
        """Empty if there is no such file."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except OSError:
            return ""


Check = Callable[[Machine], Iterator[Finding]]


def memory(machine: Machine) -> Iterator[Finding]:
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("/proc/meminfo"), re.MULTILINE))
    total_gb, swap_gb = (int(info.get(name, 0)) * 1024 / GB for name in ("MemTotal", "SwapTotal"))
    small = total_gb < NEEDED_GB["ram"]
    yield Finding(
        "note" if small else "ok",
        "RAM",
        f"{total_gb:.1f} GB, swap {swap_gb:.1f} GB",
        "fewer experts fit than on a 32 GB PC: thimble plan says what that costs" if small else "",
    )
    huge = re.search(r"\[(\w+)\]", machine.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if huge and huge[1] in ("always", "madvise"):
        yield Finding("ok", "huge pages", huge[1])
    else:
        how = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(
            "note", "huge pages", huge[1] if huge else "not in this kernel", f"experts are read faster: {how}"
        )


def locking(machine: Machine) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or hard > 16 * GB:
        seen = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard / GB:.0f} GB"
        yield Finding("ok", "memory lock limit", seen)
    else:
        yield Finding(
            "note",
            "memory lock limit",
            f"{hard / 1e6:.1f} MB",
            "the expert cache may be swapped out, and a GPU gets less of it: set memlock to unlimited in "
            "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, ulimits: {memlock: -1} in a container",
        )


def wsl2(machine: Machine) -> Iterator[Finding]:
    if "microsoft" in machine.text("/proc/sys/kernel/osrelease").lower():
        yield Finding(
            "note",
            "WSL2",
            "at most about half of its RAM can be page-locked",
            "raise memory= in .wslconfig, keep the store inside WSL2's own disk, not under /mnt; or use Linux itself",
        )


def disk(machine: Machine) -> Iterator[Finding]:
    free_gb = shutil.disk_usage(machine.folder).free / GB
    few = free_gb < NEEDED_GB["store"]
    yield Finding(
        "note" if few else "ok",
        "free space",
        f"{free_gb:.0f} GB",
        f"a store of the whole model takes {NEEDED_GB['store']:.0f} GB, its checkpoint as much again" if few else "",
    )
    device = os.stat(machine.folder).st_dev
    block = (machine.root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}").resolve()
    queue = next((at / "queue" for at in (block, block.parent) if (at / "queue").exists()), None)
    model = machine.text(str((queue.parent / "device/model").relative_to(machine.root))) if queue else ""
    if queue is None:
        yield Finding("note", "disk type", "not known", "the store should be on a local NVMe drive")
    elif queue.parent.name.startswith(("vd", "xvd")) or "virtual" in model.lower():  # these call themselves rotational
        yield Finding(
            "note", "disk type", "a virtual disk", "what it is made of does not show: thimble bench disk tells"
        )
    elif (queue / "rotational").read_text().strip() == "1":
        yield Finding(
            "bad", "disk type", "a hard disk", "every missing expert would wait: put the store on an NVMe drive"
        )
    else:
        nvme = block.name.startswith("nvme")
        yield Finding(
            "ok" if nvme else "note",
            "disk type",
            "NVMe" if nvme else "solid state or virtual, not NVMe",
            "" if nvme else "SATA gives a tenth of what an NVMe drive does: thimble bench disk tells",
        )
    yield from direct(machine)


def direct(machine: Machine) -> Iterator[Finding]:
    path = machine.folder / f".thimble-doctor-{os.getpid()}"
    try:
        path.write_bytes(bytes(4096))
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except PermissionError:
        yield Finding("note", "O_DIRECT", "not tried: the folder cannot be written")
    except OSError:
        yield Finding(
            "note",
            "O_DIRECT",
            "not on this filesystem",
            "blocks take RAM twice: use ext4, xfs or btrfs on a local disk",
        )
    else:
        yield Finding("ok", "O_DIRECT", "yes")
    finally:
        path.unlink(missing_ok=True)


def links(machine: Machine) -> Iterator[Finding]:
    """Drives on PCIe that run narrower or slower than they can."""
    for device in sorted((machine.root / "sys/class/nvme").glob("nvme*/device")):
        yield from _link(device, "NVMe drive")


def graphics(machine: Machine) -> Iterator[Finding]:
    query = "name,driver_version,memory.total,pcie.link.width.current,pcie.link.width.max,pcie.link.gen.max"
    try:
        said = subprocess.run(
            [machine.nvidia_smi, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        has = "nvidia" in machine.text("/proc/modules")
        advice = "its driver does not answer: reinstall it" if has else "the engine computes on the processor"
        yield Finding("bad" if has else "note", "graphics card", "no NVIDIA card answers", advice)
        return
    for line in said.splitlines():
        name, driver, mib, width, widest, generation = (part.strip() for part in line.split(","))
        yield Finding("ok", "graphics card", f"{name}, {mib} MiB, driver {driver}, PCIe {generation} x{width}")
        if width.isdigit() and widest.isdigit() and int(width) < int(widest):
            yield Finding(
                "bad",
                "PCIe lanes of the card",
                f"{width} of {widest}",
                "experts computed on the card come over them: use the slot nearest to the processor, and see in the "
                "board's manual which M.2 slots take its lanes",
            )
        major = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else 0
        if major < 570:
            yield Finding("bad", "driver", driver, "too old for CUDA 12.8 and RTX 50 cards: install 570 or newer")


def building(machine: Machine) -> Iterator[Finding]:
    try:
        _, version = compiler()
        yield Finding("ok", "compiler", version.splitlines()[0])
    except BuildError as error:
        yield Finding("bad", "compiler", "none", str(error))
    flags = set(machine.text("/proc/cpuinfo").partition("flags")[2].partition("\n")[0].split())
    known = [name for name in ("avx2", "avx_vnni", "avx512_vnni") if name in flags]
    if known or platform.machine() != "x86_64":
        yield Finding("ok", "processor", f"{os.cpu_count()} threads, {', '.join(known) or platform.machine()}")
    else:
        yield Finding("bad", "processor", "no AVX2", "experts are computed many times slower on it")


def io_uring(machine: Machine) -> Iterator[Finding]:
    """Only told: measured against threads it gained nothing (tests/bench/results/LOG.md), so nothing here uses it."""
    said = {"0": "allowed", "1": "for some users only", "2": "forbidden"}
    yield Finding(
        "ok", "io_uring", f"{said.get(machine.text('/proc/sys/kernel/io_uring_disabled'), 'unknown')}; not used"
    )


CHECKS: tuple[Check, ...] = (memory, locking, wsl2, disk, links, graphics, building, io_uring)


def findings(machine: Machine) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(machine)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="on the disk of the store (default: here)")


def run(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise SystemExit(f"thimble doctor: {args.folder}: there is no such folder; give one on the disk of the store")
    found = findings(Machine(folder=args.folder))
    for finding in found:
        print(finding)
    bad = sum(finding.level == "bad" for finding in found)
    print("nothing is wrong" if not bad else f"{bad} to mend")
    return 1 if bad else 0


def _link(device: Path, what: str) -> Iterator[Finding]:
    try:
        width, widest = (int((device / f"{which}_link_width").read_text()) for which in ("current", "max"))
        speed, fastest = ((device / f"{which}_link_speed").read_text().strip() for which in ("current", "max"))
    except (OSError, ValueError):
        return
    slow = width < widest or speed != fastest
    seen = f"PCIe x{width} at {speed}"
    yield Finding(
        "bad" if width < widest else "note" if slow else "ok",
        what,
        f"{seen}, of x{widest} at {fastest}" if slow else seen,
        "missing experts come over it: use the M.2 slot nearest to the processor" if slow else "",
    )
