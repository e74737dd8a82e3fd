"""Named random streams: one per purpose, so that switching one consumer on or off never moves another.

Not for: any global random state. Nothing in Equipoise seeds or reads NumPy's or torch's global generators.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

PURPOSES: Final = ("init", "data", "sample", "bootstrap", "grammar", "eval", "router")


def stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """A NumPy generator that is a pure function of (seed, purpose, keys).

    `purpose` is one of PURPOSES; `keys` (tensor name, epoch number, …) split it further. The Philox key is the first
    128 bits of SHA-256 over the unambiguous text of the arguments, so it is the same in every process and on every
    platform. Raises ValueError for an unknown purpose.

    >>> int(stream(0, "data", 3).integers(1000)) == int(stream(0, "data", 3).integers(1000))
    True
    """
    if purpose not in PURPOSES:
        raise ValueError(f"random stream {purpose!r}: expected one of {', '.join(PURPOSES)}")
    plain = (key if isinstance(key, str) else int(key) for key in keys)  # a NumPy integer is the same key
    text = repr((int(seed), purpose, *plain)).encode()
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
