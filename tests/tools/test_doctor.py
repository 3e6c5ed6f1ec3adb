"""The doctor looks at other machines than this one: what is wrong there is found, and what is right is not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.tools import doctor
from services.tools.cli import main
from services.tools.doctor import Check, Finding, Machine

MEMINFO = "MemTotal:       32768000 kB\nMemFree: 1 kB\nSwapTotal:      2097148 kB\n"
THP = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Machine]:
    def write(**files: str) -> Machine:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path, tmp_path, str(tmp_path / "nvidia-smi"))

    return write


def levels(check: Check, machine: Machine) -> dict[str, str]:
    found = list(check(machine))
    for finding in found:
        assert finding.advice or finding.level == "ok" or "not tried" in finding.seen, finding
    return {finding.name: finding.level for finding in found}


def test_memory(written: Callable[..., Machine]) -> None:
    good = written(**{"proc/meminfo": MEMINFO, THP: "always [madvise] never"})
    assert levels(doctor.memory, good) == {"RAM": "ok", "huge pages": "ok"}
    small = written(**{"proc/meminfo": MEMINFO.replace("32768", "16384"), THP: "always madvise [never]"})
    assert levels(doctor.memory, small) == {"RAM": "note", "huge pages": "note"}


def test_wsl2(written: Callable[..., Machine]) -> None:
    assert levels(doctor.wsl2, written(**{"proc/sys/kernel/osrelease": "6.8.0-generic"})) == {}
    assert levels(doctor.wsl2, written(**{"proc/sys/kernel/osrelease": "5.15-microsoft-WSL2"})) == {"WSL2": "note"}


@pytest.mark.parametrize(
    ("name", "rotational", "model", "level"),
    [
        ("nvme0n1", "0", "fast", "ok"),
        ("sda", "0", "SATA", "note"),
        ("sdb", "1", "spins", "bad"),
        ("vda", "1", "", "note"),
        ("sdc", "1", "Virtual Disk", "note"),
    ],
)
def test_disk_type(
    written: Callable[..., Machine], tmp_path: Path, name: str, rotational: str, model: str, level: str
) -> None:
    """A partition's queue is its disk's."""
    device = os.stat(tmp_path).st_dev
    disk = f"sys/devices/{name}"
    machine = written(
        **{f"{disk}/queue/rotational": rotational, f"{disk}/{name}p1/size": "1", f"{disk}/device/model": model}
    )
    numbers = tmp_path / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    numbers.parent.mkdir(parents=True)
    numbers.symlink_to(tmp_path / disk / f"{name}p1")
    assert levels(doctor.disk, machine)["disk type"] == level


def test_a_disk_of_which_nothing_is_known(written: Callable[..., Machine]) -> None:
    assert levels(doctor.disk, written())["disk type"] == "note"


def test_direct_reads() -> None:
    assert levels(doctor.direct, Machine(folder=Path("/proc")))["O_DIRECT"] == "note"


@pytest.mark.parametrize(
    ("current", "most", "speed", "level"),
    [("4", "4", "32.0 GT/s", "ok"), ("2", "4", "32.0 GT/s", "bad"), ("4", "4", "16.0 GT/s", "note")],
)
def test_links(written: Callable[..., Machine], current: str, most: str, speed: str, level: str) -> None:
    at = "sys/class/nvme/nvme0/device"
    files = {"current_link_width": current, "max_link_width": most}
    files |= {"current_link_speed": speed, "max_link_speed": "32.0 GT/s"}
    machine = written(**{f"{at}/{name}": text for name, text in files.items()})
    assert levels(doctor.links, machine) == {"NVMe drive": level}


def card(written: Callable[..., Machine], line: str) -> Machine:
    machine = written(**{"nvidia-smi": f"#!/bin/sh\necho '{line}'\n"})
    os.chmod(machine.nvidia_smi, 0o755)
    return machine


def test_graphics(written: Callable[..., Machine]) -> None:
    fine = card(written, "NVIDIA GeForce RTX 5060, 580.95.05, 8151, 8, 8, 5")
    assert levels(doctor.graphics, fine) == {"graphics card": "ok"}
    narrow = card(written, "NVIDIA GeForce RTX 3060, 535.54, 12288, 4, 16, 4")
    assert levels(doctor.graphics, narrow) == {
        "graphics card": "ok",
        "PCIe lanes of the card": "bad",
        "driver": "bad",
    }


def test_no_graphics(written: Callable[..., Machine]) -> None:
    assert levels(doctor.graphics, written()) == {"graphics card": "note"}
    broken = written(**{"proc/modules": "nvidia 1 0 - Live 0x0\n"})
    assert levels(doctor.graphics, broken) == {"graphics card": "bad"}


def test_processor(written: Callable[..., Machine]) -> None:
    found = levels(doctor.building, written(**{"proc/cpuinfo": "flags\t: fpu avx2 avx_vnni\n"}))
    assert found == {"compiler": "ok", "processor": "ok"}
    assert levels(doctor.building, written(**{"proc/cpuinfo": "flags\t: fpu\n"}))["processor"] == "bad"


def test_no_compiler(written: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert levels(doctor.building, written())["compiler"] == "bad"


def test_lock_limit(written: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, level in ((-1, "ok"), (64 * 10**9, "ok"), (8 << 20, "note")):
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        assert levels(doctor.locking, written()) == {"memory lock limit": level}


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command's status is what it found; it leaves nothing behind and names no place."""
    status = main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    for check in ("RAM", "free space", "compiler", "memory lock limit", "io_uring"):
        assert check in out
    assert status == int("  bad " in out)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in out


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("x")
    for name in ("none", "a file"):
        with pytest.raises(SystemExit, match="there is no such folder"):
            main(["doctor", str(tmp_path / name)])


def test_a_finding_reads_well() -> None:
    assert str(Finding("bad", "x", "y", "z")).split() == ["bad", "x:", "y", "z"]
