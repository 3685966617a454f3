"""DNA tokenizer: seven symbols, one token per base."""

from .tokenization_byte import AlphabetTokenizer


class DNATokenizer(AlphabetTokenizer):
    """DNA: V = 7. Lower-case (soft-masked) bases are read as upper-case.

    | id | symbol | meaning |
    |---|---|---|
    | 0 | byte 0 | end of an episode; padding |
    | 1–4 | A C G T | bases |
    | 5 | N | unknown base |
    | 6 | ? | any other byte, such as U or the IUPAC codes of ambiguous bases |

    Line ends are other bytes too: remove them before encoding.

    >>> DNATokenizer()("ACGTNacgtnR")["input_ids"]
    [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    """

    symbols = b"\x00ACGTN?"
    aliases = {b"a": b"A", b"c": b"C", b"g": b"G", b"t": b"T", b"n": b"N"}  # noqa: RUF012
    other_symbol = b"?"


DNATokenizer.register_for_auto_class()
