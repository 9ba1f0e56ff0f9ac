"""The ChaCha20 generator of gaussian and sample, against the vectors of RFC 8439."""

from __future__ import annotations

import pytest

from adapmixed_ext import _C

KEY = bytes(range(32))


def keystream(key: bytes, nonce: bytes, block: int, size: int) -> bytes:
    """Return `size` bytes of keystream, in the terms of the RFC.

    The nonce is a 64-bit counter followed by a 32-bit lane.
    """
    counter, lane = int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little")
    return _C.keystream(key, counter, lane << 32 | block, -(-size // 64))[:size]


# (key, nonce, block counter, keystream): section 2.3.2, then appendix A.1, vectors 1 to 5.
BLOCKS = [
    (
        KEY.hex(), "000000090000004a00000000", 1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32, "00" * 12, 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32, "00" * 12, 1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (  # a nonce and a counter with their highest bits
        KEY.hex(), "efcdab8967452301fdffffff", 0xFFFFFFFE,
        "94a6058e3bc6b61ba7d735c9963980cc9d25a3deaccd0767369609be3510055b"
        "7a0aa85c57e9b9b361771dbdb372e4194c50944c187f463c5202995fb52710d3",
    ),
    (
        "00" * 31 + "01", "00" * 12, 1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30, "00" * 12, 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32, "00" * 11 + "02", 0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]  # fmt: skip


@pytest.mark.parametrize("key,nonce,block,expected", BLOCKS)
def test_rfc_8439_blocks(key: str, nonce: str, block: int, expected: str, isa: str) -> None:
    assert keystream(bytes.fromhex(key), bytes.fromhex(nonce), block, 64).hex() == expected


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 17, 33, 100])
def test_many_blocks_are_single_blocks(count: int, isa: str) -> None:
    """Block k of a call is block k mod 2^32 of lane k / 2^32.

    A group of blocks may cross the end of a lane, and neither part may wrap around.
    """
    counter = 0x0123456789ABCDEF
    lanes = [
        (lane << 32) - before for lane in (1, 2**31, 2**32 - 1) for before in (1, 4, 8, 15, 16)
    ]
    for first in (0, 5, 2**31 - 3, *lanes):
        got = _C.keystream(KEY, counter, first, count)
        blocks = [_C.keystream(KEY, counter, k, 1) for k in range(first, first + count)]
        assert got == b"".join(blocks), first
        assert len(set(blocks)) == count


def test_what_is_no_key_or_count_is_refused() -> None:
    for key, count in ((bytes(31), 1), (bytes(33), 1), (bytes(32), -1)):
        with pytest.raises(ValueError):
            _C.keystream(key, 0, 0, count)
