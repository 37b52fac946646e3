"""From a prompt to the few hashes by which independent clients agree on where its prefix is cached.

A prompt arrives here as *canonical bytes* (`engines.prompts` makes them). They are cut into blocks of 1 KiB, and the
hash at depth d is that of the first d blocks::

    hash(d) = xxh3_64(canonical[: 1024 * d], seed=xxh3_64("gpuroute-prompt/<version>" NUL salt))

Two prompts that share their first d blocks share the hashes up to d, so one running digest yields them all. The seed
holds the pool's salt (tenants can be kept apart, and a hash tells nothing to those who lack the salt) and the version
of the canonicaliser, so that a change of its rules is visible. It is never random: clients in different processes,
or in other languages, must compute the same number.

A prompt shorter than one block has one hash, that of all of it: equal short prompts meet, others do not, which costs
nothing because the prefill of 256 tokens is negligible. Bytes after the last full block are not hashed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
"""Version of the canonical form; part of every seed."""

BLOCK_BYTES = 1024
BLOCK_TOKENS = BLOCK_BYTES // 4
"""Tokens in one block, at the usual four bytes of text for one token."""

DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Depths, in blocks, at which a prompt's homes are looked up."""

MAX_BYTES = BLOCK_BYTES * DEPTHS[-1]
"""Canonical bytes beyond this one change no hash."""


class Prompt(NamedTuple):
    """What a router wants to know of a request body. Its repr shows no text, key or salt.

    `tokens` estimates the whole prompt (four bytes of text, or one token id, for a token; 1,024 for an image),
    `canonical` ends at `MAX_BYTES`. `key` is the caller's own affinity key (`prompt_cache_key`), `max_tokens` the
    output limit; "" and 0 mean not given.
    """

    canonical: bytes
    tokens: int
    model: str = ""
    adapter: str = ""
    key: str = ""
    salt: str = ""
    user: str = ""
    stream: bool = False
    max_tokens: int = 0

    def __repr__(self) -> str:
        return f"<Prompt model={self.model!r} tokens={self.tokens}>"


def ladder(prompt: Prompt | bytes, salt: str = "") -> tuple[int, ...]:
    """Hashes at those of `DEPTHS` that the prompt reaches; () for an empty one. Never raises."""
    return _hashes(prompt, salt, DEPTHS)


def block_hashes(prompt: Prompt | bytes, salt: str = "", *, limit: int = DEPTHS[-1]) -> tuple[int, ...]:
    """Hashes at every depth 1, 2, 3, ... up to `limit`; those of `ladder` are among them."""
    return _hashes(prompt, salt, range(1, limit + 1))


def _hashes(prompt: Prompt | bytes, salt: str, depths: Iterable[int]) -> tuple[int, ...]:
    data = prompt.canonical if isinstance(prompt, Prompt) else prompt
    size = len(data)
    if size < BLOCK_BYTES:
        return (xxh3_64_intdigest(data, seed=seed(salt)),) if size else ()
    digest, view, done, hashes = xxh3_64(seed=seed(salt)), memoryview(data), 0, []
    for depth in depths:
        end = depth * BLOCK_BYTES
        if end > size:
            break
        digest.update(view[done:end])
        hashes.append(digest.intdigest())
        done = end
    return tuple(hashes)


@lru_cache(maxsize=1024)
def seed(salt: str) -> int:
    """The seed of a pool's hashes."""
    return xxh3_64_intdigest(f"gpuroute-prompt/{VERSION}\0{salt}".encode("utf-8", "surrogatepass"))
