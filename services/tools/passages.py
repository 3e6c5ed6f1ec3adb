"""Texts that ship with `thimble verify`: written for this project, one of each kind of use. Owns no measure.

`chat` is in the form that the model's template renders; what it says is nothing special.
"""

PROSE = """\
The old lighthouse stood at the end of a long stone pier, and nobody had climbed its stairs since the autumn storms.
Mara kept the key on a nail beside the kitchen door. Every evening she looked out at the dark lamp and thought of her
grandfather, who had wound the great clockwork by hand and had never once let the light go out. "It is only a lamp,"
her brother used to say, "and the ships have better eyes now." But on the night when the fog came in from the sea, and
the fishing boats had not come home, Mara took the key from its nail, put on her grandfather's coat, and walked out
along the pier with the waves breaking white on both sides. The door was stiff. The stairs went round and round. At the
top she found the matches where they had always been, dry in their tin, and beside them a note in a hand she knew: turn
the wheel twelve times, and do not hurry."""

CHAT = """\
<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user
What is the capital of Italy, and how many people live there?<|im_end|>
<|im_start|>assistant
<think></think>The capital of Italy is Rome. About two million eight hundred thousand people live in the city.<|im_end|>
<|im_start|>user
Thank you. Tom has 14 apples and gives 5 of them to Anna. How many does he have left?<|im_end|>
<|im_start|>assistant
<think></think>Tom has 14 - 5 = 9 apples left.<|im_end|>
<|im_start|>user
And what is the capital of France?<|im_end|>
<|im_start|>assistant
<think></think>The capital of France is Paris. It lies on the river Seine.<|im_end|>
<|im_start|>user
My name is Clara and I live in Oslo. I have a red bicycle and a grey cat. What colour is my cat?<|im_end|>
<|im_start|>assistant
<think></think>Your cat is grey.<|im_end|>
<|im_start|>user
Anna reads 12 pages on Monday and 9 pages on Tuesday. How many pages does she read in all?<|im_end|>
<|im_start|>assistant
<think></think>Anna reads 12 + 9 = 21 pages in all.<|im_end|>
<|im_start|>user
Please tell me a short story about a boy who finds a small dog in the snow.<|im_end|>
<|im_start|>assistant
<think></think>"""

CODE = '''\
import json
from pathlib import Path


def word_counts(path: Path) -> dict[str, int]:
    """How often each word of a text file occurs, lower case, without marks at its ends."""
    counts: dict[str, int] = {}
    for line in path.read_text().splitlines():
        for word in line.lower().split():
            word = word.strip(".,;:!?()")
            if word:
                counts[word] = counts.get(word, 0) + 1
    return counts


def main() -> None:
    result = word_counts(Path("story.txt"))
    most = sorted(result.items(), key=lambda item: (-item[1], item[0]))[:10]
    print(json.dumps(dict(most), indent=2))


if __name__ == "__main__":
    main()
'''

CHINESE = """\
从前，山脚下有一个小村庄，村里住着一位老木匠和他的孙女。每天清晨，老人打开窗户，先看看远处的山，再看看桌上的木头。
孙女问他：“爷爷，你今天要做什么？”老人笑着说：“今天我要做一只小船，让它顺着河水，一直走到大海。”
孙女又问：“它会回来吗？”老人想了想，说：“好的东西走得再远，也总会有人记得它。”"""

PASSAGES = {"prose": PROSE, "chat": CHAT, "code": CODE, "chinese": CHINESE}
