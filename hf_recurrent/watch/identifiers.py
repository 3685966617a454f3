"""Parts of a line that may name a session: a request, a block, a process, a container."""

import re
from operator import itemgetter

from hf_recurrent.watch.variables import ADDRESS, HEX, NUMBER, UUID, Masked

_MOST = 8
_FEWEST_BYTES = 2
_VARIABLES = ADDRESS + HEX + NUMBER + UUID
# A variable with the letters, signs and variables that it hangs together with.
_PIECE = re.compile(rb"(?<![\w.-])[\w.-]*[\x02-\x05][\w\x02-\x05.-]*")
_RUN = re.compile(rb"([\x02-\x05])\1*")
_FIRST = itemgetter(1)  # of a match; a template such as \1 is expanded in Python
# The word and the sign before a piece, which tell `pid=` from `uid=`.
_BEFORE = re.compile(rb"[A-Za-z_]{0,24}[=\[(#:@]\Z")
_LETTERS = re.compile(rb"[A-Za-z]")


def identifiers_of(line: bytes, masked: Masked) -> list[tuple[int, int, bytes]]:
    """Begin, end and kind of the parts of a line that may be identifiers, at most 8.

    Parts of a kind have the same letters and signs in the same order, and the same word before them.
    """
    filled = masked.filled
    found = []
    for match in _PIECE.finditer(filled):
        piece = match.group().rstrip(b".-")
        end = match.start() + len(piece)
        piece = piece.lstrip(b".-")
        begin = end - len(piece)
        if piece[:1] == ADDRESS and (port := line.find(b":", begin, end)) > 0:
            end = port
        if end - begin - len(piece.translate(None, _VARIABLES)) < _FEWEST_BYTES:
            continue
        kind = _RUN.sub(_FIRST, piece)
        if not _LETTERS.search(kind):
            before = _BEFORE.search(filled, max(begin - 26, 0), begin)
            kind = (before.group() if before else b"#%d" % sum(first <= begin for first, _ in masked.spans)) + kind
        found.append((begin, end, kind))
        if len(found) == _MOST:
            break
    return found
