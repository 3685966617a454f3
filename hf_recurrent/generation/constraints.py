"""Regular expressions, JSON schemas and calls of tools that generated text has to match.

A token is allowed if the text with its bytes is the beginning of a match. The grammars are compiled and followed by
xgrammar, an optional dependency. The vocabulary is the 256 bytes unless another one is given.

Shape letters: B batch, T steps, V vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_recurrent.argument_checks import import_optional
from hf_recurrent.generation.constraint_checks import check_schema, checked_pattern

_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")  # not UTF-8, but xgrammar allows it
_SECOND_OF_SURROGATE = re.compile(rb"[\xa0-\xbf]")
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


class Vocabulary:
    """The bytes of every token id, as grammars see them; a token without bytes is never a part of a text."""

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = list(tokens)
        self.end = len(self.tokens)  # of the grammar; a token of the model may be text there
        self._seconds = self._mask(_SECOND_OF_SURROGATE.match)
        self._texts: dict[int, torch.Tensor] = {}

    @cached_property
    def info(self) -> Any:
        """The vocabulary of xgrammar."""
        library, size = _xgrammar(), self.end + 1
        names = [*self.tokens, b"<end>"]
        return library.TokenizerInfo(names, library.VocabType.RAW, vocab_size=size, stop_token_ids=[self.end])

    def texts(self, smallest_byte: int, after: bytes) -> torch.Tensor:
        """(V,) bool, tokens that are not empty, have no smaller byte but a line end, and make no surrogate."""
        if smallest_byte not in self._texts:
            wrong = re.compile(b"[" + re.escape(bytes({*range(smallest_byte)} - {ord("\n")})) + b"]")
            self._texts[smallest_byte] = self._mask(lambda t: t and not wrong.search(t) and not _SURROGATE.search(t))
        found = self._texts[smallest_byte]
        return found & ~self._seconds if after[-1:] == b"\xed" else found

    def _mask(self, is_allowed: Any) -> torch.Tensor:
        return torch.tensor([bool(is_allowed(token)) for token in self.tokens])


BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


class Constraint(LogitsProcessor):
    """A form that new text has to match: a logits processor, and an argument of the functions of this package.

    The end token is allowed exactly where the text is complete, and nothing else where it cannot continue. A text that
    is cut off by `max_new_tokens` is the beginning of a match. Texts are valid UTF-8 without byte 0.

    As a logits processor, the constraint begins after the prompt of a call of `generate()`. A call that continues
    a text of the last one continues there.

    Args:
        grammar: a grammar of xgrammar.
        description: of the constraint, for errors.
        smallest_byte: bytes below it are not in a text, except line ends where the grammar has them.
        is_whole: the whole text is in the form; otherwise, calls of tools within a free text are.

    Raises:
        ValueError: nothing matches.
    """

    def __init__(
        self,
        grammar: Any,
        description: str,
        end_token_id: int = 0,
        smallest_byte: int = 1,
        vocabulary: Vocabulary = BYTES,
        is_whole: bool = True,
    ):
        self.description, self.end_token_id, self.smallest_byte = description, end_token_id, smallest_byte
        self.vocabulary, self.is_whole, self._grammar = vocabulary, is_whole, grammar
        self._start = ConstraintPosition(self, _xgrammar().GrammarMatcher(grammar), b"")
        self._positions: dict[bytes, ConstraintPosition | None] = {}  # by the rows of the last call
        self._start.allowed()

    def begin(self) -> "ConstraintPosition":
        """The position before the first new token."""
        return self._start

    def follow(self) -> "Follower":
        """A follower of one text, before its first new token."""
        return Follower(self, _xgrammar().GrammarMatcher(self._grammar))

    def mask(self, matcher: Any, text: bytes, is_inside: bool = True) -> torch.Tensor:
        """(V,) bool, the tokens that may follow the end of a text, which the matcher has read."""
        vocabulary = self.vocabulary
        bits = _xgrammar().allocate_token_bitmask(1, vocabulary.end + 1)
        matcher.fill_next_token_bitmask(bits)
        found = (bits[0].view(-1, 1) >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten()
        allowed = found[: vocabulary.end].clone()
        if self.is_whole or is_inside:
            allowed &= vocabulary.texts(self.smallest_byte, text)
        allowed[self.end_token_id] = found[vocabulary.end]
        return allowed

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Set the scores (B, V) of the tokens that may not follow `input_ids` (B, T) to -inf."""
        rows = input_ids.cpu().contiguous()
        keys = [row.numpy().tobytes() for row in rows]
        before = [row[:-1].numpy().tobytes() for row in rows]
        if all(key in self._positions for key in before) and any(self._positions[key] for key in before):
            positions = [self._positions[key] for key in before]
            last = rows[:, -1].tolist()
            found = [position and position.after(token) for position, token in zip(positions, last, strict=True)]
        else:
            found = [self._start] * len(rows)
        self._positions = dict(zip(keys, found, strict=True))
        # A row that has ended is padded: nothing restricts it.
        free = torch.ones(scores.shape[-1], dtype=torch.bool)
        masks = torch.stack([free if position is None else position.allowed() for position in found])
        return scores.masked_fill(~masks.to(scores.device), -torch.inf)


class ConstraintPosition:
    """A text that may still become a match; positions are shared between texts and never change."""

    def __init__(self, constraint: Constraint, matcher: Any, text: bytes):
        self._constraint, self._matcher, self._text = constraint, matcher, text
        self._allowed: torch.Tensor | None = None
        self._after: dict[int, ConstraintPosition] = {}

    def allowed(self) -> torch.Tensor:
        """(V,) bool, the tokens that may follow; raises a ValueError if there is none."""
        if self._allowed is None:
            allowed = self._constraint.mask(self._matcher, self._text)
            if not allowed.any():
                where = f" after {self._text[-40:]!r}" if self._text else ""
                raise ValueError(f"{self._constraint.description} has no match{where}.")
            self._allowed = allowed
        return self._allowed

    def after(self, token: int) -> "ConstraintPosition | None":
        """The position after one more token; None after the end, and after a token that is not allowed."""
        if token == self._constraint.end_token_id or not self.allowed()[token]:
            return None
        if token not in self._after:
            matcher = self._matcher.fork()
            matcher.accept_token(token)
            text = (self._text + self._constraint.vocabulary.tokens[token])[-40:]
            self._after[token] = ConstraintPosition(self._constraint, matcher, text)
        return self._after[token]


class Follower:
    """One text that grows: its matcher advances in place; a position forks it, which takes ten times as long.

    It `has_ended` when the end token was added.
    """

    def __init__(self, constraint: Constraint, matcher: Any):
        self._constraint, self._matcher, self._text = constraint, matcher, b""
        self._is_inside = self.has_ended = False

    def allowed(self) -> torch.Tensor:
        """(V,) bool, the tokens that may follow; none where the constraint has no match after this text."""
        return self._constraint.mask(self._matcher, self._text, self._is_inside)

    def add(self, token: int) -> None:
        """Add a token that is allowed."""
        if token == self._constraint.end_token_id:
            self.has_ended = True
            return
        self._matcher.accept_token(token)
        self._text = (self._text + self._constraint.vocabulary.tokens[token])[-40:]
        begin, end = self._text.rfind(CALL_BEGIN.encode()), self._text.rfind(CALL_END.encode())
        if begin != end:
            self._is_inside = begin > end


class RegexConstraint(Constraint):
    """New bytes match a regular expression as a whole, as `re.fullmatch(pattern, text, re.ASCII)` does.

    Args:
        pattern: without lookaround, backreferences, flags and word boundaries.
        end_token_id: the end byte.

    Raises:
        ImportError: xgrammar is not installed.
        ValueError: the expression is invalid or not supported, or nothing matches it.
    """

    def __init__(self, pattern: str, end_token_id: int = 0):
        grammar = _compile(f"`pattern` is {pattern!r}", "compile_regex", checked_pattern(pattern))
        super().__init__(grammar, f"`pattern` {pattern!r}", end_token_id)


class JsonSchemaConstraint(Constraint):
    """New text is one JSON value that is valid against a schema, on one line, with spaces as `json.dumps` has them.

    Objects have the properties of the schema in its order, and no others unless `additionalProperties` allows them.
    `pattern` describes a whole string.

    Args:
        schema: as a dictionary or a string. Keywords that cannot be enforced are refused.
        end_token_id: the end token.
        vocabulary: of the model.

    Raises:
        ImportError: xgrammar is not installed.
        ValueError: the schema is invalid, has a keyword that cannot be enforced, or nothing is valid against it.
    """

    def __init__(self, schema: dict[str, Any] | str, end_token_id: int = 0, vocabulary: Vocabulary = BYTES):
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"`schema` is not JSON: {error}.") from error
        check_schema(schema)
        problem, options = "`schema` cannot be compiled", {"any_whitespace": False}
        grammar = _compile(problem, "compile_json_schema", json.dumps(schema), vocabulary, **options)
        # xgrammar allows control characters in strings of limited length.
        super().__init__(grammar, "`schema`", end_token_id, ord(" "), vocabulary)


class ToolCallConstraint(Constraint):
    """New text may call tools, with arguments that are valid against their schemas.

    A call is `<tool_call>`, a line with `{"name": NAME, "arguments": OBJECT}`, and `</tool_call>`, as in many chat
    templates. Raises as [`JsonSchemaConstraint`].

    Args:
        tools: the schema of the arguments of each tool, by name.
        is_required: the text is one call and nothing else; otherwise, calls may be anywhere in a free text.
        is_single: the text ends after its first call.
        end_token_id: the end token.
        vocabulary: of the model.
    """

    def __init__(
        self,
        tools: Mapping[str, dict[str, Any]],
        is_required: bool = False,
        is_single: bool = False,
        end_token_id: int = 0,
        vocabulary: Vocabulary = BYTES,
    ):
        tags = []
        for name, schema in tools.items():
            check_schema(schema, f"{name}.parameters")
            with _sentences(f"`{name}.parameters` cannot be compiled"):
                grammar = _xgrammar().Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
            content = {"type": "grammar", "grammar": str(grammar)}
            begin = f'{CALL_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": '
            tags.append({"type": "tag", "begin": begin, "content": content, "end": f"}}\n{CALL_END}"})
        rule = {"type": "triggered_tags", "triggers": [CALL_BEGIN], "tags": tags}
        rule |= {"at_least_one": is_required, "stop_after_first": is_required or is_single}
        text = json.dumps({"type": "structural_tag", "format": rule})
        grammar = _compile("the tools cannot be compiled", "compile_structural_tag", text, vocabulary)
        super().__init__(grammar, "the tools", end_token_id, ord(" "), vocabulary, is_whole=is_required)


def _compile(problem: str, method: str, text: str, vocabulary: Vocabulary = BYTES, **options: Any) -> Any:
    """A grammar, by a method of xgrammar's compiler."""
    compiler = _xgrammar().GrammarCompiler(vocabulary.info, cache_enabled=False)
    with _sentences(problem):
        return getattr(compiler, method)(text, **options)


@contextmanager
def _sentences(problem: str) -> Iterator[None]:
    """Errors of xgrammar as ValueErrors of one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().rpartition(".cc:")[2].partition(": ")[2] or str(error)
        raise ValueError(f"{problem}: {reason.strip().rstrip('.')}.") from error


def _xgrammar() -> ModuleType:
    message = "A regular expression or a JSON schema needs xgrammar: pip install 'hf-recurrent[constraints]'."
    return import_optional("xgrammar", message)
