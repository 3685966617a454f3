"""The range coder of `kernels/count_memory_coder.h` in plain Python."""

_WORD, _LEAST_RANGE = 1 << 32, 1 << 24


class ReferenceEncoder:
    """Encodes bits with given probabilities of a one, from 1 to 65535 of 65536."""

    def __init__(self):
        self.low, self.range, self.code = 0, _WORD - 1, bytearray()

    def encode(self, bit: int, one: int) -> None:
        bound = self.range * one >> 16
        if bit:
            self.range = bound
        else:
            self._add(bound)
            self.range -= bound
        while self.range < _LEAST_RANGE:
            self.code.append(self.low >> 24)
            self.low = self.low << 8 & (_WORD - 1)
            self.range <<= 8

    def _add(self, amount: int) -> None:
        self.low += amount
        if self.low >= _WORD:
            self.low -= _WORD
            place = len(self.code) - 1
            while self.code[place] == 255:
                self.code[place] = 0
                place -= 1
            self.code[place] += 1

    def finish(self) -> bytes:
        """The code, without zeros at its end."""
        self._add(-self.low % _LEAST_RANGE)
        self.code.append(self.low >> 24)
        return bytes(self.code).rstrip(b"\0")


class ReferenceDecoder:
    """Decodes the bits of a code, given the same probabilities."""

    def __init__(self, code: bytes):
        self.code = iter(code)
        self.range, self.low = _WORD - 1, 0
        for _ in range(4):
            self.low = self.low << 8 | next(self.code, 0)

    def decode(self, one: int) -> int:
        bound = self.range * one >> 16
        bit = int(self.low < bound)
        if bit:
            self.range = bound
        else:
            self.low -= bound
            self.range -= bound
        while self.range < _LEAST_RANGE:
            self.low = (self.low << 8 | next(self.code, 0)) & (_WORD - 1)
            self.range <<= 8
        return bit
