"""Anomalies of six kinds, injected into a log at known places, for `evaluate_watch.py`.

The first `QUIET` lines stay as they are, as nothing is known of the log before. After them, events of all kinds are
placed at random (seeded), at least `APART` lines from each other. A *message* is a line after its header (time, host,
component), a *template* a message whose words with digits are masked; both are known here only, not to the detectors.

| kind | what happens to the log | lines that count as anomalies |
|---|---|---|
| `template` | a line of another kind of system is added, behind the header of the line before | the line |
| `value` | in a message whose template occurs 5 times or more, one number gets random digits, 3 more than any \
number at this place has | the line |
| `burst` | a line is repeated 20 times more | the repetitions |
| `missing` | a line is removed; its template and the next one follow each other 5 times or more elsewhere, the new \
neighbours never | the line after the gap |
| `reordered` | such a line and its successor change places, where this order of templates never occurs | the line \
that comes too early (the other one counts as neither) |
| `garbled` | every byte of a line becomes a random printable one with probability 0.2, five bytes or more | the line |

A kind with fewer than `FEWEST` places in a log is left out there: a log whose lines follow each other at random has no
missing line.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("template", "value", "burst", "missing", "reordered", "garbled")
QUIET, APART, EVENTS, BURSTS, FEWEST = 400, 6, 10, 3, 8
REPETITIONS, FREQUENT, GARBLED_SHARE, MORE_DIGITS = 20, 5, 0.2, 3

# Words of the header of a line, per public log.
HEADER_WORDS = {"Apache": 6, "HPC": 6, "Linux": 5, "OpenSSH": 5, "Spark": 4, "Zookeeper": 6}

# Messages of systems that are in none of the logs.
MESSAGES = (
    b"EXT4-fs error (device sda1): ext4_lookup:1602: inode #131076: comm rsync: deleted inode referenced",
    b"Out of memory: Killed process 4182 (postgres) total-vm:8123412kB, anon-rss:7012244kB",
    b"FATAL: remaining connection slots are reserved for non-replication superuser connections",
    b"x509: certificate has expired or is not yet valid: current time is after 2031-02-11T00:00:00Z",
    b"panic: runtime error: invalid memory address or nil pointer dereference",
    b"Back-off restarting failed container sidecar in pod checkout-7d9f8c",
    b"GET /cgi-bin/../../../../etc/passwd HTTP/1.1 404 512",
    b"segfault at 7ffd2c1 ip 00005581 sp 00007ffc error 4 in libssl.so.3",
    b"deadlock detected: transaction 8812 waits for ShareLock on transaction 8809",
    b"nvme0: I/O 412 QID 3 timeout, aborting",
    b"SMART: Reallocated_Sector_Ct changed from 100 to 87",
    b"bgp: neighbor 192.0.2.17 Down - Hold Timer expired",
    b"Refusing to start: configuration schema version 12 is newer than 11",
    b"UPS on battery, 9 minutes remaining",
    b"link is down on port xe-0/0/12, LACP partner lost",
    b"watchdog: soft lockup - stuck for 23s! [kworker/3:1]",
    b"consumer lag 1204412 on topic payments, partition 7 exceeds limit",
    b"checksum mismatch in segment 000000010000000A, expected 9f31aa02",
    b"Unhandled rejection TypeError: Cannot read properties of undefined (reading 'total')",
    b"read-only file system: cannot create /var/spool/outbox/tmp.x81",
)


@dataclass(frozen=True)
class LabelledLine:
    """A line of a log, without its end."""

    text: bytes
    kind: str | None = None  # one of `KINDS`, None for a line of the log itself, "" for one that counts as neither


def read_log(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return [line for line in file.read().replace(b"\r\n", b"\n").split(b"\n") if line]


def inject(lines: Sequence[bytes], header_words: int, seed: int) -> list[LabelledLine]:
    """The lines of a log with anomalies of all kinds that it has places for; `header_words` precede each message."""
    rng = random.Random(seed)
    headers = [_header(line, header_words) for line in lines]
    messages = [line[len(header) :] for line, header in zip(lines, headers, strict=True)]
    templates = [_template(message) for message in messages]
    events = _place(_candidates(messages, templates), rng)
    foreign = rng.sample(MESSAGES, len(MESSAGES))
    result: list[LabelledLine] = []
    skip = 0
    for index, line in enumerate(lines):
        if skip:
            skip -= 1
            continue
        kind = events.get(index)
        if kind is None:
            result.append(LabelledLine(line))
        elif kind == "template":
            result += [LabelledLine(line), LabelledLine(headers[index] + foreign.pop(), kind)]
        elif kind == "value":
            alike = [message for message, other in zip(messages, templates, strict=True) if other == templates[index]]
            result.append(LabelledLine(headers[index] + _change_value(messages[index], alike, rng), kind))
        elif kind == "burst":
            result += [LabelledLine(line)] + [LabelledLine(line, kind)] * REPETITIONS
        elif kind == "missing":
            result.append(LabelledLine(lines[index + 1], kind))
            skip = 1
        elif kind == "reordered":
            result += [LabelledLine(lines[index + 1], kind), LabelledLine(line, "")]
            skip = 1
        else:
            result.append(LabelledLine(_garble(line, rng), kind))
    return result


def _header(line: bytes, words: int) -> bytes:
    match = re.match(rb"(?:\S+\s+){%d}" % words, line)
    return match.group() if match else b""


def _template(message: bytes) -> bytes:
    return re.sub(rb"\S*\d\S*", b"0", message)


def _candidates(messages: Sequence[bytes], templates: Sequence[bytes]) -> dict[str, list[int]]:
    counts, pairs = Counter(templates), Counter(pairwise(templates))
    inner = range(QUIET, len(templates) - 2)

    def is_order_broken_without(i: int) -> bool:
        return pairs[templates[i], templates[i + 1]] >= FREQUENT and not pairs[templates[i - 1], templates[i + 1]]

    missing = [i for i in inner if is_order_broken_without(i)]
    return {
        "template": list(inner),
        "value": [i for i in inner if counts[templates[i]] >= FREQUENT and re.search(rb"\d", messages[i])],
        "burst": list(inner),
        "missing": missing,
        "reordered": [i for i in missing if not pairs[templates[i + 1], templates[i]]],
        "garbled": list(inner),
    }


def _place(candidates: dict[str, list[int]], rng: random.Random) -> dict[int, str]:
    """Index of a line → kind of its event; kinds with the fewest places choose first."""
    events: dict[int, str] = {}
    for kind in sorted(candidates, key=lambda kind: len(candidates[kind])):
        wanted = BURSTS if kind == "burst" else EVENTS
        places = rng.sample(candidates[kind], len(candidates[kind]))
        chosen: list[int] = []
        for place in places:
            if len(chosen) < wanted and all(abs(place - other) >= APART for other in (*events, *chosen)):
                chosen.append(place)
        if kind == "burst" or len(chosen) >= FEWEST:
            events |= dict.fromkeys(chosen, kind)
    return events


def _change_value(message: bytes, alike: Sequence[bytes], rng: random.Random) -> bytes:
    numbers = list(re.finditer(rb"\d+", message))
    which = rng.randrange(len(numbers))
    others = [found[which] for other in alike if len(found := re.findall(rb"\d+", other)) > which]
    length = max(map(len, others)) + MORE_DIGITS
    digits = str(rng.randrange(10 ** (length - 1), 10**length)).encode()
    return message[: numbers[which].start()] + digits + message[numbers[which].end() :]


def _garble(line: bytes, rng: random.Random) -> bytes:
    places = {i for i in range(len(line)) if rng.random() < GARBLED_SHARE}
    places |= set(rng.sample(range(len(line)), min(5, len(line))))
    return bytes(rng.randrange(33, 127) if i in places else byte for i, byte in enumerate(line))
