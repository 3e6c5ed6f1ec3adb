"""Texts: windows, and which tokens of a chat count."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.tools.texts import TextError, Texts

VECTORS = Path(__file__).parent.parent / "vectors"


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))


def test_a_document_is_cut_into_windows_that_lose_nothing(demo_checkpoint: Path, tokenizer: Tokenizer) -> None:
    text = (VECTORS / "passage.txt").read_text()
    windows = list(Texts(demo_checkpoint, window=50).windows(VECTORS / "passage.txt"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [i for window in windows for i in window.ids] == ids
    assert all(len(window.ids) == 50 for window in windows[:-1])
    for window in windows:
        assert window.scored == [False] + [True] * (len(window.ids) - 1)
        counted = [i for i, scored in zip(window.ids, window.scored, strict=True) if scored]
        assert window.scored_bytes == len(tokenizer.decode(counted).encode())


def test_only_the_assistants_tokens_count_in_a_chat(demo_checkpoint: Path, tokenizer: Tokenizer) -> None:
    one, two = Texts(demo_checkpoint, window=1024).windows(VECTORS / "chats.jsonl")

    def counted(window: object) -> str:
        ids, scored = window.ids, window.scored  # type: ignore[attr-defined]
        return tokenizer.decode([i for i, s in zip(ids, scored, strict=True) if s], skip_special_tokens=False)

    assert counted(one) == "I am fine, thank you.<|im_end|>"
    assert counted(two) == "7 + 5 = 12<|im_end|>Grass is green.<|im_end|>"
    assert two.scored_bytes == len(counted(two))


def test_a_long_chat_is_cut_at_the_window(demo_checkpoint: Path) -> None:
    whole = list(Texts(demo_checkpoint, window=1024).windows(VECTORS / "chats.jsonl"))[1]
    cut = list(Texts(demo_checkpoint, window=len(whole.ids) - 5).windows(VECTORS / "chats.jsonl"))[1]
    assert cut.ids == whole.ids[:-5]
    assert 0 < cut.scored_bytes < whole.scored_bytes


def test_compressed_lines_are_read(demo_checkpoint: Path, tmp_path: Path) -> None:
    texts = Texts(demo_checkpoint, window=1024)
    packed = tmp_path / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress((VECTORS / "chats.jsonl").read_bytes()))
    assert list(texts.windows(packed)) == list(texts.windows(VECTORS / "chats.jsonl"))


def test_a_text_of_one_token_counts_nothing(demo_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": ""}) + "\n")
    assert list(Texts(demo_checkpoint, window=8).windows(tmp_path / "t.jsonl")) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b"{", "cannot be read"),
        ("t.jsonl", b'{"text": 1}', "record 1: has neither"),
        ("t.jsonl", b"[]", "record 1: has neither"),
        ("t.jsonl.gz", b"not gzip", "cannot be read"),
        ("t.txt", b"\xff", "cannot be read"),
        ("t.jsonl", b'{"messages": [{"content": "x"}]}', "record 1"),
        ("t.jsonl", b'{"messages": ["x"]}', "record 1"),
    ],
)
def test_files_that_are_no_texts_are_refused(
    demo_checkpoint: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message):
        list(Texts(demo_checkpoint, window=8).windows(tmp_path / name))


def test_missing_files_are_named(demo_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="absent"):
        list(Texts(demo_checkpoint, window=8).windows(tmp_path / "absent.txt"))
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        Texts(tmp_path, window=8)


def test_a_checkpoint_s_template_cannot_reach_python(demo_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((demo_checkpoint / name).read_bytes())
    assert list(Texts(tmp_path, window=1024).windows(VECTORS / "chats.jsonl"))
    for bad in ("{{ cycler.__init__.__globals__.os.getpid() }}", "{% for %}", "{{ 'x' * 10 ** 10 }}"):
        (tmp_path / "chat_template.jinja").write_text(bad)
        with pytest.raises(TextError, match="does not render"):
            list(Texts(tmp_path, window=1024).windows(VECTORS / "chats.jsonl"))
