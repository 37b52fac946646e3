"""The ladder of hashes: what independent clients must agree on, to the bit."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from gpuroute.core.prefix import BLOCK_BYTES, DEPTHS, MAX_BYTES, VERSION, Prompt, block_hashes, ladder, seed

TEXT = bytes(range(256)) * (MAX_BYTES // 256 + 16)
GOLDEN_SHORT = 0x7A54D3E6054C4C54
GOLDEN_LONG = (0xBE03FF50D1E7EDE1, 0x9F880646A4280120)


def test_a_hash_is_that_of_the_first_blocks_with_the_salted_seed() -> None:
    salted = xxh3_64_intdigest(f"gpuroute-prompt/{VERSION}\0acme".encode())
    expected = tuple(xxh3_64_intdigest(TEXT[: d * BLOCK_BYTES], seed=salted) for d in DEPTHS)
    assert ladder(TEXT, "acme") == expected


def test_values_never_change_between_releases() -> None:
    assert VERSION == 1
    assert ladder(b"hello") == (GOLDEN_SHORT,)
    assert ladder(TEXT[:3000], "acme") == GOLDEN_LONG


def test_another_process_agrees() -> None:
    code = "from gpuroute.core.prefix import ladder; print(ladder(bytes(range(256)) * 40, 'pool'))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer == f"{ladder(bytes(range(256)) * 40, 'pool')}\n"


@given(st.integers(0, MAX_BYTES + 3000))
def test_depths_reached_and_blocks_agree(size: int) -> None:
    data = TEXT[:size]
    full, rungs = block_hashes(data, "s"), ladder(data, "s")
    if size < BLOCK_BYTES:
        assert full == rungs
        assert len(rungs) == (1 if size else 0)
    else:
        assert len(full) == min(size // BLOCK_BYTES, DEPTHS[-1])
        assert rungs == tuple(full[d - 1] for d in DEPTHS if d <= len(full))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_short_prompts_meet_only_when_equal(one: bytes, other: bytes) -> None:
    assert (ladder(one) == ladder(other)) == (one == other)


def test_prompts_share_hashes_up_to_where_they_differ() -> None:
    changed = bytearray(TEXT)
    changed[5 * BLOCK_BYTES] ^= 1
    assert [a == b for a, b in zip(ladder(TEXT), ladder(bytes(changed)), strict=True)] == [True] * 3 + [False] * 5


def test_a_tail_that_fills_no_block_changes_nothing() -> None:
    assert ladder(TEXT[:2048]) == ladder(TEXT[:2048] + b"one more question") == ladder(TEXT[:2048] + b"x" * 1023)


def test_salts_keep_tenants_apart() -> None:
    assert not set(ladder(TEXT, "a")) & set(ladder(TEXT, "b"))
    assert seed("\ud800") != seed("")


def test_a_prompt_is_read_through_its_canonical_bytes_and_hides_them() -> None:
    prompt = Prompt(b"secret text", 3, "m", key="k1", salt="s3")
    assert ladder(prompt) == ladder(b"secret text")
    assert repr(prompt) == "<Prompt model='m' tokens=3>"
