"""A tokenizer.json may be anything: whoever reads it refuses it in words, and is still there afterwards."""

import copy
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services import vocabulary
from services.api.errors import ModelFolderError
from services.api.tokens import load_tokenizer
from services.engine.errors import UnsupportedError
from services.engine.grammar import Grammars
from services.engine.request import Form, Grammar
from services.tools import oracle
from services.tools.texts import TextError, Texts
from services.vocabulary import VocabularyError, read_vocabulary, try_out

Content = dict[str, Any]
ROOT = Path(__file__).parents[2]
FILE = "tokenizer.json"
WORDS = Grammar(Form.REGEX, "[a-z]+")
IDS = 300
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# What the library of the api, of tools and of grammars reads -> the part that is put in a sound file's place.
DAMAGES: dict[str, Content] = {
    "a prefix that cuts letters in two": {"model": {"continuing_subword_prefix": "1"}},
    "a long prefix": {"model": {"continuing_subword_prefix": "../../etc/passwd"}},
    "a suffix": {"model": {"end_of_word_suffix": "</w>"}},
    "an id of 2**31": {"model": {"vocab": {"!": 2**31}}},
    "an id of 2**32 - 1": {"model": {"vocab": {"!": 2**32 - 1}}},
    "an id beyond 64 bits": {"model": {"vocab": {"!": 2**64}}},
    "a negative id": {"model": {"vocab": {"!": -1}}},
    "an id that is text": {"model": {"vocab": {"!": "0"}}},
    "merges of nothing": {"model": {"merges": [["", ""]]}},
    "merges of words that are none": {"model": {"merges": [["x" * 5000, "y"]]}},
    "merges of three": {"model": {"merges": [["a", "b", "c"]]}},
    "merges deep": {"model": {"merges": [[[[[["a"]]]]]]}},
    "no model": {"model": None},
    "a model of another kind": {"model": {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 7}},
    "a model unheard of": {"model": {"type": "x"}},
    "a dropout": {"model": {"dropout": 2.0}},
    "an expression that is none": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(("}}},
    "an expression that takes for ever": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a|a|ab|a)*(a*)*c"}}},
    "letters doubled over and over": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 18}},
    "a letter made a hundred thousand": {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "x" * 100_000}
    },
    "a normal form of rubbish": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////AAAA"}},
    "an added token without letters": {"added_tokens": [{"id": 0, "content": "", **ADDED}]},
    "an added token of 2**31": {"added_tokens": [{"id": 2**31, "content": "<x>", **ADDED}]},
    "added tokens of another type": {"added_tokens": {"id": 1}},
    "padding beyond all memory": {
        "padding": {"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "x"}
    },
}  # fmt: skip
HARMLESS = {"an id of 2**31", "an id of 2**32 - 1", "an added token of 2**31", "an expression that takes for ever"}


def sound() -> Content:
    """Small: bytes, and one merge."""
    letters = [chr(n) for n in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    vocab = {letter: number for number, letter in enumerate(letters)} | {"ab": 256, "aĊ": 257}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 258 + n, "content": name, **ADDED} for n, name in enumerate(("<s>", "<|im_end|>"))],
        "pre_tokenizer": BYTES,
        "decoder": BYTES,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["a", "Ċ"]]},
    }  # fmt: skip


def damaged(name: str) -> str:
    content = copy.deepcopy(sound())
    for key, value in DAMAGES[name].items():
        if isinstance(value, dict) and isinstance(content[key], dict) and key == "model":
            parts = {part: content[key][part] | new if part == "vocab" and isinstance(new, dict) else new
                     for part, new in value.items()}  # fmt: skip
            content[key] |= parts
        else:
            content[key] = value
    return json.dumps(content)


def by_api(folder: Path) -> object:
    return load_tokenizer(folder / FILE).encode("ab a\nab")


def by_grammars(folder: Path) -> object:
    grammars = Grammars(folder / FILE, IDS, 1000, 20.0)
    try:
        return grammars.matcher(WORDS, {259}).allowed(may_stop=False)
    finally:
        grammars.close()


def by_texts(folder: Path) -> object:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "text.txt").write_text("ab a\nab")
    return list(Texts(folder, 8).windows(folder / "text.txt"))


def by_reference(folder: Path) -> object:
    return oracle.tokenizer(folder)("ab a\nab")


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "api": (by_api, ModelFolderError),
    "grammars": (by_grammars, UnsupportedError),
    "texts": (by_texts, TextError),
    "reference": (by_reference, oracle.OracleError),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tokenizer_is_refused_by_all_that_read_it(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE).write_text(damaged(name))
    refused = []
    for read, refusal in READERS.values():
        try:
            read(tmp_path)
        except refusal as error:
            refused.append(str(error))
    assert refused or name in HARMLESS
    assert all(FILE in message for message in refused)


def test_a_sound_one_is_read_by_all(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(sound()))
    ids = [256, sound()["model"]["vocab"]["Ġ"], 64, sound()["model"]["vocab"]["Ċ"], 256]
    assert by_api(tmp_path) == by_reference(tmp_path) == ids
    assert by_texts(tmp_path)
    assert by_grammars(tmp_path) is not None


def test_what_a_file_cuts_off_or_fills_up_is_left_out(tmp_path: Path) -> None:
    """As checkpoints have it that were saved after training."""
    content = sound() | {"truncation": {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert len(by_api(tmp_path)) == len(by_reference(tmp_path)) == 5  # type: ignore[arg-type]


def test_the_one_that_was_found_ends_a_process_that_does_not_try_it_first(tmp_path: Path) -> None:
    """The control: without the trial nothing is left to refuse anything. With it the same bytes are one line."""
    text = damaged("a prefix that cuts letters in two")
    code = "import sys; from tokenizers import Tokenizer; Tokenizer.from_str(sys.stdin.read())"
    careless = subprocess.run([sys.executable, "-c", code], input=text.encode(), capture_output=True)
    assert careless.returncode != 0
    with pytest.raises(VocabularyError, match=r"library (ends its process|says).*fetch the checkpoint again"):
        try_out(text, "tokenizers")


@pytest.mark.parametrize("library", ["tokenizers", "llguidance"])
def test_a_trial_finds_what_pythonpath_names_and_nothing_of_the_working_directory(tmp_path: Path, library: str) -> None:
    """In an environment that has no packages of its own, beside files that call themselves by the libraries' names."""
    venv.create(tmp_path / "bare", with_pip=False)
    python, here, text = str(tmp_path / "bare/bin/python"), tmp_path / "here", json.dumps(sound())
    here.mkdir()
    (here / f"{library}.py").write_text("raise RuntimeError('of the working directory')")
    packages = sysconfig.get_paths()["platlib"]
    trial = f"import sys; from services.vocabulary import try_out; try_out(sys.stdin.read(), {library!r}, {IDS})"

    def tried(*folders: str | Path) -> "subprocess.CompletedProcess[str]":
        environ = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        return subprocess.run([python, "-c", trial], input=text, capture_output=True, text=True, cwd=here, env=environ)

    assert tried(ROOT, packages).returncode == 0
    assert tried(ROOT, here, packages).returncode == 0, "by its name it is still the working directory"
    assert "No module named" in tried(ROOT).stderr, "the control: nothing else has the library"
    elsewhere = here.rename(tmp_path / "elsewhere")
    here.mkdir()
    assert "of the working directory" in tried(ROOT, elsewhere, packages).stderr, "the control: it would be seen"


def test_a_trial_has_limits_and_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(sound() | {"version": "1.0", "limits": 1})
    with pytest.raises(VocabularyError, match=r"could not be tried|ends its process|says"):
        try_out(text, "tokenizers", memory_bytes=30 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("tried again"))
        for _ in range(20):
            with pytest.raises(VocabularyError):
                try_out(text, "tokenizers")
    monkeypatch.setattr(vocabulary, "MOST_BYTES", 10)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(VocabularyError, match="is no tokenizer's"):
        read_vocabulary(tmp_path / FILE, "tokenizers")
