"""Templates of log lines, found while reading: lines that differ in their variables only have one template.

Words are grouped as in Drain (He et al. 2017, *Drain: An Online Log Parsing Approach with Fixed Depth Tree*): equal
number of words, equal first word, and a share of equal words. What is new here is the layout: lines that are equal
once every digit is 0 have all their parts at equal offsets, so that one look-up in a dictionary replaces masking,
splitting and matching for nearly all lines.
"""

import re
from collections.abc import Iterable
from itertools import accumulate

from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.severity import severity_of
from hf_recurrent.watch.slots import FREQUENT, MOST_DIGITS, NEAR, Order, Shape, Slot
from hf_recurrent.watch.variables import ADDRESS, FIRST, HEX, NUMBER, RUN, TIME, UUID, Masked

_MOST = 8
_FEWEST_BYTES = 2
_VARIABLES = ADDRESS + HEX + NUMBER + UUID
# A variable with the letters, signs and variables that it hangs together with.
_PIECE = re.compile(rb"(?<![\w.-])[\w.-]*[\x02-\x05][\w\x02-\x05.-]*")
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
        kind = RUN.sub(FIRST, piece)
        if not _LETTERS.search(kind):
            before = _BEFORE.search(filled, max(begin - 26, 0), begin)
            kind = (before.group() if before else b"#%d" % sum(first <= begin for first, _ in masked.spans)) + kind
        found.append((begin, end, kind))
        if len(found) == _MOST:
            break
    return found


WILDCARD = b"<*>"
# Sizes that bound the memory under a hostile log; what came least often is forgotten first.
MOST_LAYOUTS, MOST_VARIANTS, MOST_TEMPLATES, MOST_WORDS = 1 << 16, 1 << 14, 1 << 12, 1 << 17
# Bytes of all layouts' lines, and words of all templates and variants.
MOST_LAYOUT_BYTES, MOST_TEMPLATE_WORDS, MOST_VARIANT_WORDS = 1 << 26, 1 << 17, 1 << 20
_MOST_CANDIDATES = 64
# Share of equal words by which a line belongs to a template.
_SIMILARITY = 0.6

_WORD = re.compile(rb"[A-Za-z]+|[^\sA-Za-z0-9\x01-\x05]")
_DIGITS = re.compile(rb"\d+")
_FRACTION = re.compile(rb"[.,]\d+")
_NAMES = {TIME: b"<time>", UUID: b"<uuid>", HEX: b"<hex>", ADDRESS: b"<address>", NUMBER: b"<number>"}
_MASKS = re.compile(b"[\x01-\x05]")


def mask_names(masked: bytes) -> str:
    """Masked bytes as text, in which variables are `<time>`, `<number>` and so on."""
    return _MASKS.sub(lambda match: _NAMES[match.group()], masked).decode("utf-8", "replace")


def _longest_digits(filled: bytes, value: bytes, numbers: int) -> int:
    """Digits of the longest run in a value; 0 for a single number, of which the shape tells it, and hexadecimals."""
    if HEX in filled or (numbers < 2 and ADDRESS not in filled):
        return 0
    return min(max(map(len, _DIGITS.findall(value)), default=0), MOST_DIGITS)


def _within(limit: int, sizes: Iterable[int]) -> int:
    """Number of the first sizes whose sum is at most `limit`."""
    return sum(total <= limit for total in accumulate(sizes))


class Template(Saved):
    """Lines that differ in variables only.

    Attributes:
        tokens: its words, where those that differ are `WILDCARD`.
        count: lines so far.
        slots: index of a word → its values.
        order: by numbers of templates.
        near: how often there were 0 to 16 of it among the last 16 lines.
        example: its last line, without what exceeds 512 bytes, or None.
    """

    __slots__ = ("count", "example", "near", "number", "order", "severity", "slots", "tokens")

    def __init__(self, number: int, tokens: list[bytes], severity: int):
        self.number, self.tokens, self.severity = number, tokens, severity
        self.count = 0
        self.slots: dict[int, Slot] = {}
        self.order = Order()
        self.near = [0] * (NEAR + 1)
        self.example: bytes | None = None

    def text(self) -> str:
        return mask_names(b" ".join(self.tokens))


class Variant(Saved):
    """Lines of a template that have the same words; its order is by numbers of variants."""

    __slots__ = ("count", "number", "order", "template")

    def __init__(self, number: int, template: Template):
        self.number, self.template = number, template
        self.count = 0
        self.order = Order()


class Layout:
    """Positions of the parts of a line, for all lines that are equal once every digit is 0.

    Attributes:
        checks: begin, end and slot of each value that is compared.
        shapes: begin, end, slot, shape and `_longest_digits` of each value whose shape is not frequent yet.
        prefix, suffix: where the text before the first time ends, and the text after it begins.
        clock: begin and end of that time without its fraction of a second, or None.
        identifiers: begin, end and kind of each part that may name a session.
        sessions: begin and end of those that do; None until they are looked up.
    """

    __slots__ = ("checks", "clock", "identifiers", "prefix", "sessions", "shapes", "suffix", "template", "variant")

    def __init__(self, variant: Variant, masked: Masked, line: bytes):
        self.variant, self.template = variant, variant.template
        self.checks: list[tuple[int, int, Slot]] = []
        self.shapes: list[tuple[int, int, Slot, Shape, int]] = []
        self.prefix, self.suffix = masked.time or (0, 0)
        self.clock: tuple[int, int] | None = None
        if masked.time is not None:
            begin, end = masked.time
            fraction = _FRACTION.search(line, begin + 8, end)
            self.clock = (begin, fraction.start() if fraction else end)
        self.identifiers = identifiers_of(line, masked)
        self.sessions: list[tuple[int, int]] | None = None


class TemplateMiner(Saved):
    """Finds the template of each line.

    Attributes:
        templates: number → template.
        variants: words → variant.
        layouts: line with all digits 0 → layout.
        words: all words and signs so far.
    """

    not_saved = frozenset({"layouts", "_layout_bytes"})  # they are found again

    def __init__(self) -> None:
        self.templates: dict[int, Template] = {}
        self.variants: dict[tuple[bytes, ...], Variant] = {}
        self.layouts: dict[bytes, Layout] = {}
        self.words: set[bytes] = set()
        self._groups: dict[tuple[int, bytes], list[Template]] = {}
        self._next_number = 0
        self._layout_bytes = self._template_words = self._variant_words = 0

    def new_layout(self, line: bytes, key: bytes) -> tuple[Layout, int]:
        """The layout of a line that has none for its `key`, the line with all digits 0; and how many words are new."""
        if len(self.layouts) >= MOST_LAYOUTS or self._layout_bytes >= MOST_LAYOUT_BYTES:
            self._clear_layouts()
        masked = Masked(line)
        variant = self.variants.get(tuple(masked.tokens)) or self._new_variant(masked, line)
        layout, template = Layout(variant, masked, line), variant.template
        for index, (token, (begin, end)) in enumerate(zip(masked.tokens, masked.spans, strict=True)):
            is_wildcard = template.tokens[index] == WILDCARD
            if not is_wildcard and len(token.translate(None, _VARIABLES)) == len(token):
                continue
            slot = template.slots.get(index)
            if slot is None:
                slot = template.slots[index] = Slot(template.count)
            if slot.values is not None:
                layout.checks.append((begin, end, slot))
            shape = slot.shape_of(masked.filled[begin:end], is_wildcard=is_wildcard)
            if shape is not None and shape.count < FREQUENT:
                longest = _longest_digits(masked.filled[begin:end], line[begin:end], len(shape.sizes))
                layout.shapes.append((begin, end, slot, shape, longest))
        self.layouts[key] = layout
        self._layout_bytes += len(key)
        return layout, self._new_words(masked)

    def _clear_layouts(self) -> None:
        self.layouts.clear()
        self._layout_bytes = 0

    def _new_words(self, masked: Masked) -> int:
        new = {*_WORD.findall(masked.filled)} - self.words
        if new and len(self.words) < MOST_WORDS:
            self.words |= new
        return len(new)

    def _new_variant(self, masked: Masked, line: bytes) -> Variant:
        if (
            len(self.variants) >= MOST_VARIANTS
            or self._variant_words >= MOST_VARIANT_WORDS
            or self._template_words >= MOST_TEMPLATE_WORDS
        ):
            self._forget()
        variant = Variant(self._number(), self._template(masked.tokens, line))
        self._variant_words += len(masked.tokens)
        self.variants[tuple(masked.tokens)] = variant
        return variant

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _template(self, tokens: list[bytes], line: bytes) -> Template:
        """The most similar template of the group; a new one if none is similar enough."""
        first = next((token for token in tokens if token[:1].isalpha() and not _MASKS.search(token)), b"")
        group = self._groups.setdefault((len(tokens), first), [])
        best, most = None, _SIMILARITY * len(tokens)
        for template in group[-_MOST_CANDIDATES:]:
            same = sum(map(bytes.__eq__, template.tokens, tokens))
            if same >= most and (best is None or same > most):
                best, most = template, same
        if best is not None and tokens:
            self._generalize(best, tokens)
            return best
        template = Template(self._number(), list(tokens), severity_of(line))
        self.templates[template.number] = template
        self._template_words += len(tokens)
        group.append(template)
        return template

    def _generalize(self, template: Template, tokens: list[bytes]) -> None:
        """Make words that differ wildcards, whose values so far are the old word."""
        changed = [
            i for i, (old, new) in enumerate(zip(template.tokens, tokens, strict=True)) if old not in (new, WILDCARD)
        ]
        for index in changed:
            slot = template.slots.setdefault(index, Slot(0))
            if slot.values == {} and template.count:
                slot.values, slot.low[0] = {template.tokens[index]: template.count}, 1
            template.tokens[index] = WILDCARD
        if changed:
            for key in [key for key, layout in self.layouts.items() if layout.template is template]:
                del self.layouts[key]
                self._layout_bytes -= len(key)

    def _forget(self) -> None:
        """Drop the rarer half of the variants, or of their words, and templates without one."""
        self._clear_layouts()
        by_count = sorted(self.variants.items(), key=lambda item: -item[1].count)[: MOST_VARIANTS // 2]
        number = _within(MOST_VARIANT_WORDS // 2, (len(words) for words, _ in by_count))
        self.variants = dict(by_count[:number])
        self.templates = {variant.template.number: variant.template for variant in self.variants.values()}
        words = sum(len(template.tokens) for template in self.templates.values())
        if len(self.templates) > MOST_TEMPLATES or words > MOST_TEMPLATE_WORDS * 3 // 4:
            common = sorted(self.templates.values(), key=lambda template: -template.count)[: MOST_TEMPLATES // 2]
            number = _within(MOST_TEMPLATE_WORDS // 2, (len(template.tokens) for template in common))
            self.templates = {template.number: template for template in common[:number]}
            self.variants = {key: v for key, v in self.variants.items() if v.template.number in self.templates}
        self._variant_words = sum(map(len, self.variants))
        self._template_words = sum(len(template.tokens) for template in self.templates.values())
        groups = self._groups.items()
        kept_groups = {key: [t for t in group if t.number in self.templates] for key, group in groups}
        self._groups = {key: group for key, group in kept_groups.items() if group}
