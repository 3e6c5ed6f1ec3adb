"""The demo's tokenizer: byte-level BPE learnt from the corpus, with the real model's special tokens at their ids.

Text is split before merging as the real tokenizer does it: letters by case, every digit alone. Owns the file
tokenizer.json; the other text files of a checkpoint are the demo's own.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

RESERVED = 32  # ids below are named, as in the real model's vocabulary
NAMED = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<tool_call>",
    15: "</tool_call>",
    16: "<tool_response>",
    17: "</tool_response>",
    18: "<image>",
    19: "<img>",
    20: "</img>",
}
SHOWN = range(12, 18)  # ordinary text to a decoder that skips special tokens
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """The same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(NAMED.get(i, f"<SPECIAL_{i}>"), special=i not in SHOWN, normalized=False) for i in range(RESERVED)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer makes every token that it is given a special one.
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["id"] not in SHOWN
    return Tokenizer.from_str(json.dumps(data))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
