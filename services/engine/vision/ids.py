"""The ids of a picture's places in a prompt: what a state has consumed must tell two pictures apart.

A tokenizer has one id for every place of every picture. Inside the engine each place gets an id of its own that no
vocabulary has, worked out from what the picture's embeddings are. So the name of a state, which is a hash of its ids,
names its pictures too, and nothing that compares or stores ids has to know of pictures.
"""

import hashlib
from array import array

FIRST = 1 << 31  # ids from here on stand for rows of pictures


def picture_ids(handle: bytes, tokens: int) -> list[int]:
    """Ids of all places of the picture with this handle: the same for the same embeddings only."""
    found = array("I", hashlib.shake_256(handle).digest(4 * tokens))
    return [FIRST | id_ for id_ in found]
