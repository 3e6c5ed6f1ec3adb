"""`thimble top` against the running product: what it prints is what was just done."""

import re
import threading

import httpx
import pytest
from running import Reply, Running, user

from services.tools.cli import main


def top(stack: Running, capsys: pytest.CaptureFixture[str], every_s: float, api: str = "") -> str:
    words = ["top", "--once", "--every", str(every_s), "--engine", stack.engine_metrics_url, "--api", api or stack.url]
    assert main(words) == 0
    return capsys.readouterr().out


def engine_ram_gb(stack: Running) -> float:
    text = httpx.get(stack.engine_metrics_url).text
    found = re.search(r'^thimble_memory_used_bytes\{.*kind="ram".*\} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1]) / 1e9


def test_it_shows_what_is_going_on(stack: Running, capsys: pytest.CaptureFixture[str]) -> None:
    model = stack.client.models.list().data[0].id
    done = threading.Event()

    def talk() -> None:
        while not done.is_set():
            Reply(stack.client, model, [user("Tell me a short story about a fox.")], max_tokens=64)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        said = top(stack, capsys, 3.0)
        for _ in range(3):  # on a busy machine the first prompt may take so long
            said = said if "the last" in said.splitlines()[0] and "no token" not in said else top(stack, capsys, 3.0)
    finally:
        done.set()
        talking.join()
    assert re.search(r"on cpu, the last [\d.]+ s$", said.splitlines()[0]), said
    parts = {name: float(share) for name, share in re.findall(r"^(\w+) +#* +[\d.]+ ms +([\d.]+)%$", said, re.MULTILINE)}
    assert {"dense", "experts", "sampling"} <= set(parts), said
    assert sum(parts.values()) == pytest.approx(100, abs=1)
    speed = re.search(r"^answers +([\d.]+) tok/s, [\d.]+ ms a step; \d running, 0 waiting$", said, re.MULTILINE)
    assert speed, said
    assert float(speed[1]) > 1
    tiers = re.search(
        r"^experts +decode: 0\.0% vram, ([\d.]+)% ram, ([\d.]+)% nvme; computed by 100% cpu, 0% gpu$",
        said,
        re.MULTILINE,
    )
    assert tiers, said
    assert float(tiers[1]) + float(tiers[2]) == pytest.approx(100, abs=0.2)
    assert float(tiers[1]) > 50, "every expert has a slot"
    ram = re.search(r"^RAM +(\d\.\d+) GB used; planned: .*dense weights 0\.\d+, others 0\.\d+$", said, re.MULTILINE)
    assert ram, said
    assert float(ram[1]) == pytest.approx(engine_ram_gb(stack), abs=0.1), "as much as the engine itself says"
    assert re.search(r"^snapshots +[\d.]+ of [\d.]+ GB in the store", said, re.MULTILINE), said
    assert "PCIe" not in said
    assert "\033" not in said


def test_without_an_api_or_a_token_it_says_so(stack: Running, capsys: pytest.CaptureFixture[str]) -> None:
    said = top(stack, capsys, 0.05, api="http://127.0.0.1:9")
    assert "no token in the last" in said.splitlines()[0]
    assert re.search(r"^api +does not answer$", said, re.MULTILINE)


def test_without_an_engine_it_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--engine", "http://127.0.0.1:9"]) == 1
    assert "cannot read http://127.0.0.1:9: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", "--every", "0"])
    assert ended.value.code == 2
    assert "argument --every: '0': expected more than 0" in capsys.readouterr().err
