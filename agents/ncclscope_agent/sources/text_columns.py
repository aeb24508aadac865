"""Columns of numbers out of texts, thousands at a time.

For numbers that NCCL printed with `%lx`, `%p` and `%ld`: digits in lower case, no sign, no blanks.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

HEX_BYTES: Final = b"0123456789abcdef"
"""Digits as NCCL prints them."""
_NIBBLES: Final = np.full(256, 16, dtype=np.uint8)
"""Value of each hexadecimal digit in lower case; 16 for any other byte."""
_NIBBLES[np.frombuffer(HEX_BYTES, dtype=np.uint8)] = np.arange(16)
HEX_DIGITS: Final = 16
"""Hexadecimal digits of 64 bits."""
_DECIMAL_DIGITS: Final = 19
"""As many nines fit in 64 bits without a sign."""
_PLACES: Final = np.arange(-_DECIMAL_DIGITS, 0)
"""Places of a number's digits, counted from its end."""
_POWERS: Final = 10 ** np.arange(_DECIMAL_DIGITS - 1, -1, -1, dtype=np.uint64)
_BLANK: Final = 32


def read_hexadecimals(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    """The values of hexadecimal texts, and which of them are hexadecimal numbers of 64 bits at all; None: all."""
    lengths = set(map(len, texts))
    if len(lengths) == 1:
        zeros = b"0" * (HEX_DIGITS - lengths.pop())
        padded = zeros + zeros.join(texts)
    else:
        padded = b"".join(map(bytes.rjust, texts, repeat(HEX_DIGITS), repeat(b"0")))
    if len(padded) == len(texts) * HEX_DIGITS and all(texts) and not padded.translate(None, HEX_BYTES):
        return np.frombuffer(unhexlify(padded), dtype=">u8"), None
    good = np.array([0 < len(text) <= HEX_DIGITS and not text.translate(None, HEX_BYTES) for text in texts])
    values = [int(text, 16) if is_number else 0 for text, is_number in zip(texts, good, strict=True)]
    return np.array(values, dtype=np.uint64), good


class WordTable:
    """Texts of equally many words, as a table: one row a text, one column a word.

    Words are parted by one blank each. That the words of a column are numbers of the kind that is asked for
    was seen to before.
    """

    def __init__(self, texts: Sequence[bytes], words: int) -> None:
        # In front stands as much as a number may be long, so that none begins before the first byte.
        self._bytes = np.frombuffer(b" " * _DECIMAL_DIGITS + b" ".join(texts) + b" ", dtype=np.uint8)
        blanks = np.flatnonzero(self._bytes == _BLANK)[_DECIMAL_DIGITS - 1 :]
        self._ends = blanks[1:].reshape(len(texts), words)
        self._lengths = np.diff(blanks).reshape(len(texts), words) - 1

    def pointers(self, word: int) -> NDArray[np.uint64]:
        """The values of a column of `0x7f2a40000000` with up to 16 digits, or `(nil)`, which is 0."""
        digits = _NIBBLES[self._digits(word, HEX_DIGITS)]
        digits[_PLACES[-HEX_DIGITS:] < 2 - self._lengths[:, word, np.newaxis]] = 0
        digits[self._bytes[self._ends[:, word] - 1] == ord(")")] = 0
        return _joined(digits)

    def decimals(self, word: int) -> NDArray[np.uint64]:
        """The values of a column of decimal numbers, of up to 19 digits."""
        lengths = self._lengths[:, word]
        longest = int(lengths.max(initial=1))
        digits = self._digits(word, longest) - np.uint8(ord("0"))
        digits[_PLACES[-longest:] < -lengths[:, np.newaxis]] = 0
        numbers: NDArray[np.uint64] = digits.astype(np.uint64) @ _POWERS[-longest:]
        return numbers

    def _digits(self, word: int, longest: int) -> NDArray[np.uint8]:
        """The last bytes of each word of a column; those of a shorter one have others in front."""
        digits: NDArray[np.uint8] = self._bytes[self._ends[:, word, np.newaxis] + _PLACES[-longest:]]
        return digits


def _joined(nibbles: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """One number of each row of 16 nibbles, the highest first."""
    big_endian = (nibbles[:, 0::2] << 4) | (nibbles[:, 1::2] & 15)
    return np.ascontiguousarray(big_endian).view(">u8")[:, 0].astype(np.uint64)
