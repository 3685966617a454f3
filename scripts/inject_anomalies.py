"""Anomalies of seven kinds, and one harmless change, injected into a log at known places, for `evaluate_watch.py`.

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

Two more kinds are injected on request, as they change a log at many places. A gap is the number of lines from one
occurrence of a template to the next.

| kind | what happens to the log | lines that count as anomalies |
|---|---|---|
| `silence` | a template that has occurred 10 times or more, with a longest gap of 4 to 100 lines, stops: its lines \
are removed until 8 times its longest gap has passed | the first line after 3 times its longest gap |
| `drift` | from some line on, a template has another word in place of one of its constant words, for good | none |

While a template is silent, lines from its longest gap on until the anomaly count as neither, and so do lines that
follow a removed one. The first 5 lines of a drift count as neither; the others are normal, with the kind `drift`, so
that the share of them among the highest scores can be measured.

A kind with fewer than `FEWEST` places in a log is left out there: a log whose lines follow each other at random has no
missing line.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("template", "value", "burst", "missing", "reordered", "garbled")
QUIET, APART, EVENTS, BURSTS, FEWEST = 400, 6, 10, 3, 8
REPETITIONS, FREQUENT, GARBLED_SHARE, MORE_DIGITS = 20, 5, 0.2, 3
# Kinds on request. Gaps are in lines, from an occurrence of a template to the next one.
MORE_KINDS = ("silence", "drift")
SILENCES, SHORTEST_GAP, LONGEST_GAP, EXPECTED_GAPS, SILENT_GAPS = 3, 4, 100, 3, 8
DRIFTS, DRIFT_LEARNED, SEEN_BEFORE, SEEN_AFTER = 3, 5, 10, 25

# Words of the header of a line, per public log.
HEADER_WORDS = {"Apache": 6, "HPC": 6, "Linux": 5, "OpenSSH": 5, "Spark": 4, "Zookeeper": 6}

# Words that a drift puts into a template; those that occur in the log are not used.
NEW_WORDS = (b"upstream", b"elapsed", b"principal", b"dispatched", b"gateway", b"replica", b"envelope", b"quorate")

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
    """A line of a log, without its end.

    Args:
        text: its bytes.
        kind: one of `KINDS` or `MORE_KINDS`, None for a line of the log itself, "" for a line that counts as neither.
    """

    text: bytes
    kind: str | None = None

    @property
    def is_normal(self) -> bool:
        """True for a line of the log itself, and for one that has drifted."""
        return self.kind in (None, "drift")


def read_log(path: str) -> list[bytes]:
    """The lines of a log that are not empty."""
    with open(path, "rb") as file:
        return [line for line in file.read().replace(b"\r\n", b"\n").split(b"\n") if line]


def inject(lines: Sequence[bytes], header_words: int, seed: int, kinds: Collection[str] = KINDS) -> list[LabelledLine]:
    """The lines of a log with anomalies of all kinds that it has places for.

    Args:
        lines: of the log.
        header_words: words of a line before its message.
        seed: of places and contents.
        kinds: of `KINDS` and `MORE_KINDS`. The places of one of `KINDS` do not depend on which others are asked for.
    """
    labelled = _inject_at_places(lines, header_words, seed, kinds)
    if "drift" in kinds:
        labelled = _inject_drifts(labelled, header_words, random.Random(f"drift {seed}"))
    if "silence" in kinds:
        labelled = _inject_silences(labelled, header_words, random.Random(f"silence {seed}"))
    return labelled


def _inject_at_places(
    lines: Sequence[bytes], header_words: int, seed: int, kinds: Collection[str]
) -> list[LabelledLine]:
    rng = random.Random(seed)
    headers = [_header(line, header_words) for line in lines]
    messages = [line[len(header) :] for line, header in zip(lines, headers, strict=True)]
    templates = [_template(message) for message in messages]
    events = _place(_candidates(messages, templates), rng)
    events = {index: kind for index, kind in events.items() if kind in kinds}
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
    """The places of each kind."""
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


def _occurrences(labelled: Sequence[LabelledLine], header_words: int) -> dict[bytes, list[int]]:
    """Template → its places, of the lines of the log itself."""
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, line in enumerate(labelled):
        if line.kind is None:
            places[_template(line.text[len(_header(line.text, header_words)) :])].append(index)
    return places


def _inject_silences(labelled: Sequence[LabelledLine], header_words: int, rng: random.Random) -> list[LabelledLine]:
    """Remove the lines of up to `SILENCES` regular templates, each for a while, where no other is silent."""
    candidates = []
    for places in _occurrences(labelled, header_words).values():
        gaps = [after - before for before, after in pairwise(places)]
        for number in range(SEEN_BEFORE, len(places) - FREQUENT):
            longest = max(gaps[: number - 1], default=0)
            if places[number] >= QUIET and SHORTEST_GAP <= longest <= LONGEST_GAP:
                candidates.append((places, number, longest))
    result = list(labelled)
    removed: set[int] = set()
    taken: list[range] = []
    silenced: list[list[int]] = []
    for places, number, longest in rng.sample(candidates, len(candidates)) if len(candidates) >= FEWEST else []:
        silent = set(places[number:])
        kept = [index for index in range(places[number - 1] + 1, len(labelled)) if index not in silent]
        if len(silenced) == SILENCES or len(kept) <= SILENT_GAPS * longest or places in silenced:
            continue
        stretch = range(places[number - 1], kept[SILENT_GAPS * longest])
        gone = silent.intersection(stretch)
        noticed = kept[EXPECTED_GAPS * longest]
        is_free = not any(stretch.start < other.stop and other.start < stretch.stop for other in taken)
        if len(gone) < FREQUENT or labelled[noticed].kind is not None or not is_free:
            continue
        neither = {index + 1 for index in gone} - gone | set(kept[longest : EXPECTED_GAPS * longest])
        for index in neither - {noticed}:
            if result[index].kind is None:
                result[index] = LabelledLine(result[index].text, "")
        result[noticed] = LabelledLine(result[noticed].text, "silence")
        removed |= gone
        taken.append(stretch)
        silenced.append(places)
    return [line for index, line in enumerate(result) if index not in removed]


def _inject_drifts(labelled: Sequence[LabelledLine], header_words: int, rng: random.Random) -> list[LabelledLine]:
    """Change one constant word of up to `DRIFTS` templates for good, each from a place of its own on."""
    text = b"\n".join(line.text for line in labelled)
    words = [word for word in NEW_WORDS if word not in text]
    rng.shuffle(words)
    candidates = []
    for template, places in _occurrences(labelled, header_words).items():
        numbers = range(SEEN_BEFORE, len(places) - DRIFT_LEARNED - SEEN_AFTER + 1)
        starts = [number for number in numbers if places[number] >= QUIET]
        constant = [i for i, word in enumerate(template.split()) if re.fullmatch(rb"[A-Za-z]{4,}", word)]
        if starts and constant:
            candidates.append((places[rng.choice(starts) :], rng.choice(constant)))
    result = list(labelled)
    chosen = rng.sample(candidates, min(DRIFTS, len(candidates), len(words)))
    for (places, which), word in zip(chosen, words, strict=False):
        for number, index in enumerate(places):
            line = result[index].text
            header = _header(line, header_words)
            found = list(re.finditer(rb"\S+", line[len(header) :]))[which]
            begin, end = (len(header) + place for place in found.span())
            kind = "" if number < DRIFT_LEARNED else "drift"
            result[index] = LabelledLine(line[:begin] + word + line[end:], kind)
    return result
