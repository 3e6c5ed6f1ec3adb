"""A short run of the fuzzer, and that it would see what it looks for."""

from pathlib import Path

import fuzz_decoder
from fuzz_decoder import fuzz, seeds

from services.engine.vision import decode


def test_damaged_pictures_are_decoded_or_refused() -> None:
    report = fuzz(4, seed=1)
    assert not report.findings, report.findings
    assert report.cases == report.decoded + report.refused
    assert report.decoded > 10 < report.refused


def test_every_kind_is_among_the_seeds() -> None:
    assert {decode.sniff(data) for data in seeds()} == {"PNG", "JPEG", "WEBP", "GIF"}


def test_a_crash_and_a_hang_are_found(tmp_path: Path) -> None:
    """Decoders with a bug: one dies of certain bytes, one never ends."""
    body = Path(decode.__file__).read_text()
    for name, bug, found, most_s in (
        ("dies", "import os; os.abort()", "exit status -6", 20.0),
        ("hangs", "while True: pass", "hang", 2.0),
    ):
        program = tmp_path / f"{name}.py"
        program.write_text(
            body.replace(
                "def sniff(data: bytes) -> str:\n", f"def sniff(data):\n    if data[0] == 77:\n        {bug}\n"
            )
        )
        trouble, _, _ = fuzz_decoder.run([seeds()[0], b"MMMM"], program, most_s)
        assert found in trouble
        assert fuzz_decoder.run([seeds()[0]], program, 20.0)[0] == ""
