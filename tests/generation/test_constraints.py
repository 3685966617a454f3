"""Constrained texts match, every match is possible, and what cannot be enforced is refused."""

import json
import re
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cases import tiny_model

from hf_recurrent import (
    JsonSchemaConstraint,
    RegexConstraint,
    generate_speculative,
    sample_continuations,
)

pytest.importorskip("xgrammar")

PROMPT = torch.tensor([list(b"x = ")])
some = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

_letters = ["a", "b", "7", "-", "é", "日", "😀", "/", '"', "#", " ", ".", r"\.", r"\n", r"\x41", r"\u00e9"]
_classes = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab]", "[^a]", "[à-ü]", r"[\d_-]", r"[^\w]", "[a-cx-z]"]
_atoms = st.sampled_from([*_letters, *_classes, "[.$^]", r"[\]\\]"])


def _larger(inner):
    repeats = st.sampled_from(["?", "{0,2}", "{2}", "{1,3}", "??", "{0}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


patterns = st.recursive(_atoms, _larger, max_leaves=6)


def random_model(seed: int):
    torch.manual_seed(seed)
    model = tiny_model("memora", hidden_size=8, state_size=8, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.randn_like(model.lm_head.weight))
    return model


def texts(constraint, seed: int, rows: int = 3, max_new_tokens: int = 400) -> list[bytes]:
    """Sampled texts, without the end byte."""
    found = sample_continuations(
        random_model(seed), PROMPT, rows, seed=seed, constraint=constraint, max_new_tokens=max_new_tokens
    )
    assert all(one.ended for one in found)
    return [bytes(one.tokens[:-1].tolist()) for one in found]


def ends_after(constraint, text: bytes) -> bool | None:
    """True where the text may end, False where it must go on, None where it is impossible."""
    position = constraint.begin()
    for byte in text:
        position = position and position.after(byte)
    return None if position is None else bool(position.allowed()[0])


@some
@given(patterns, st.integers(0, 999))
def test_every_text_matches(pattern, seed):
    for text in texts(RegexConstraint(pattern), seed):
        assert re.fullmatch(pattern, text.decode(), re.ASCII), text


@some
@given(st.data(), patterns)
def test_every_match_is_possible_and_ends_where_it_is_complete(data, pattern):
    constraint, compiled = RegexConstraint(pattern), re.compile(pattern, re.ASCII)
    alphabet = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    text = data.draw(st.from_regex(compiled, fullmatch=True, alphabet=alphabet))
    for length in range(len(text) + 1):
        complete = compiled.fullmatch(text[:length]) is not None
        assert ends_after(constraint, text[:length].encode()) == complete, text[:length]


@pytest.mark.parametrize("pattern", ["^a|b$", "a|ab", "(foo|bar){2}", "é+", "[^\\n]{3}", "x*y?", "."])
def test_all_short_texts(pattern):
    constraint = RegexConstraint(pattern)
    for text in ["", "a", "b", "ab", "foobar", "foo", "é", "éé", "abc", "a\nb", "xxy", "y", "\n", "\r", "日", "ba"]:
        allowed = ends_after(constraint, text.encode())
        assert bool(allowed) == bool(re.fullmatch(pattern, text, re.ASCII)), text


def test_texts_are_utf_8():
    constraint = RegexConstraint(r"[\s\S]{4}")
    for seed in range(5):
        for text in texts(constraint, seed):
            assert len(text.decode()) == 4
    assert ends_after(constraint, b"\xed\x9f") is False and ends_after(constraint, b"\xed\xa0") is None
    assert ends_after(constraint, b"\xc0") is None and ends_after(constraint, b"\xf4\x90") is None


_INVALID = ["(", "a{2,1}", "[b-a]", "*a", r"\p{L}", r"\N{DASH}"]
_UNSUPPORTED = ["a(?=b)", "(?!a)b", r"\bfoo\b", "(?i)a", r"(a)\1", "(?P<n>a)", "a++"]
_ANCHORS_AND_ZEROS = ["a^b", "a$b", "(^a)", r"\Aa", r"a\Z", r"\0a", r"\x00", "a\0", r"\07", r"[\0]", r"\u0000"]


@pytest.mark.parametrize("pattern", [*_INVALID, *_UNSUPPORTED, *_ANCHORS_AND_ZEROS])
def test_patterns_that_would_be_read_in_another_way_are_refused(pattern):
    with pytest.raises(ValueError, match="`pattern` is"):
        RegexConstraint(pattern)


def test_what_nothing_matches_is_refused():
    with pytest.raises(ValueError, match="has no match"):
        RegexConstraint(r"[^\s\S]")
    with pytest.raises(ValueError, match="has no match after b'a'"):
        texts(RegexConstraint(r"a[^\s\S]"), 0)


_scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-300, 300),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9}, st.integers(-20, 20)
    ),
    st.builds(lambda low: {"type": "number", "minimum": low, "maximum": low + 2.5}, st.integers(-20, 20)),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.sampled_from(["[a-z]{1,3}", "^é\\d$", "a|bc"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.just({"type": "string", "format": "date"}),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), min_size=1, max_size=3).map(
        lambda v: {"enum": v}
    ),
    st.sampled_from([{"const": [1, {"a": 'é"\\'}]}, {"type": ["null", "boolean"]}, {"$ref": "#/$defs/node"}]),
)
_names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=3)


def _composed(inner):
    properties = st.dictionaries(_names, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda item, low, size: {"type": "array", "items": item, "minItems": low, "maxItems": low + size},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "items": False},
            st.lists(inner, min_size=1, max_size=2),
        ),
        st.builds(
            lambda p, n: {"type": "object", "properties": p, "required": list(p)[:n], "additionalProperties": False},
            properties,
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
    )


_node = {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["v"]}


@some
@given(st.recursive(_scalars, _composed, max_leaves=5), st.integers(0, 999))
def test_every_value_is_valid(schema, seed):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**schema, "$defs": {"node": _node}, "title": "a test"}
    for text in texts(JsonSchemaConstraint(schema), seed, max_new_tokens=4000):
        jsonschema.validate(json.loads(text), schema)
        assert "\n" not in text.decode()


def test_schemas_of_any_value_and_recursive_schemas_begin_every_text():
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    recursive = JsonSchemaConstraint(json.dumps({"$ref": "#/$defs/tree", "$defs": {"tree": tree}}))
    assert ends_after(recursive, b'{"next": {"next": {}}}') and ends_after(recursive, b'{"next": 1') is None
    anything = JsonSchemaConstraint({})
    for value in (None, 12, -1.5, "é", [1, [True]], {"a": {"b": []}}):
        assert ends_after(anything, json.dumps(value, ensure_ascii=False).encode())
    assert ends_after(anything, b"nul") is False and ends_after(anything, b"x") is None


@pytest.mark.parametrize(
    "schema, message",
    [
        ("{", "`schema` is not JSON"),
        ([1], r"`schema` is \[1\]; it must be an object or a boolean"),
        (False, "cannot accept any value"),
        ({"type": "array", "uniqueItems": True}, "has 'uniqueItems', which cannot be enforced there"),
        ({"type": "integer", "multipleOf": 3}, "has 'multipleOf'"),
        ({"not": {"type": "string"}}, r"`schema.type` is None"),
        ({"oneOf": [{}]}, r"`schema.type` is None"),
        ({"minimum": 3}, "`schema.type` is None; it must be one or several of string, integer"),
        ({"type": "nonsense"}, "`schema.type` is 'nonsense'"),
        ({"type": "string", "minimum": 3}, "`schema` has 'minimum'"),
        ({"type": "object", "properties": {"a": {"type": "x"}}}, "`schema.properties.a.type` is 'x'"),
        ({"type": "object", "required": ["a"]}, "`schema.required` has 'a', which is not one of the properties"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "has 'maxLength' and 'pattern'; only one"),
        ({"type": "string", "pattern": "[^a]"}, r"'\[\^a\]' may be a quote"),
        ({"type": "string", "pattern": ".*"}, "'.' may be a quote"),
        ({"type": "string", "pattern": r"\s"}, "may be a quote, a backslash or a control character"),
        ({"type": "string", "pattern": "("}, "`schema.pattern` is '\\('"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum greater than maximum"),
        ({"type": "string", "maxLength": -1}, "`schema.maxLength` is -1"),
        ({"type": "integer", "minimum": "a"}, "`schema.minimum` is 'a'; it must be a number"),
        ({"enum": []}, r"`schema.enum` is \[\]"),
        ({"enum": ["a", 1], "type": "string"}, "has the value 1, which is not of type 'string'"),
        ({"anyOf": []}, r"`schema.anyOf` is \[\]"),
        ({"anyOf": [{"type": "null"}], "minimum": 2}, "has 'minimum'"),
        ({"$ref": "http://x/y"}, "that begins with '#/'"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "object", "properties": 3}, "`schema.properties` is 3"),
        ({"type": "array", "prefixItems": 3}, "`schema.prefixItems` is 3"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "`schema` .*(no match|Circular)"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchemaConstraint(schema)


@pytest.mark.parametrize("sampling", [{"do_sample": True}, {"num_beams": 3}, {"do_sample": False}])
def test_generate_in_batches(sampling):
    """Rows of different lengths, again and again with the same processor."""
    constraint, model = RegexConstraint("(yes|no, é{1,3})!"), random_model(1)
    for prompt in (PROMPT.repeat(3, 1), PROMPT[:, :2].repeat(2, 1), torch.tensor([[7]])):
        torch.manual_seed(0)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            logits_processor=[constraint],
            max_new_tokens=20,
            eos_token_id=0,
            pad_token_id=0,
            **sampling,
        )
        for row in output[:, prompt.shape[1] :]:
            text = bytes(row.tolist()).rstrip(b"\0").decode()
            assert re.fullmatch("(yes|no, é{1,3})!", text), text


def test_a_text_that_was_cut_off_continues():
    constraint, model = RegexConstraint("(abc)+;"), random_model(1)
    options = {"logits_processor": [constraint], "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    part = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=2, **options)
    rest = model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=1, **options)
    assert bytes(rest[0, 4:].tolist()) == b"abc"


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "generator": torch.Generator().manual_seed(0)}])
def test_speculative_decoding(sampling):
    constraint = JsonSchemaConstraint({"type": "array", "items": {"enum": ["é", 12]}, "minItems": 2, "maxItems": 3})
    model = random_model(1)
    for draft in (random_model(1), random_model(2), "prompt-lookup"):
        output = generate_speculative(model, PROMPT, draft=draft, constraint=constraint, **sampling)
        value = json.loads(bytes(output.sequences[0, 4:-1].tolist()))
        assert 2 <= len(value) <= 3 and set(value) <= {"é", 12} and output.sequences[0, -1] == 0
    if not sampling:
        plain = model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            logits_processor=[constraint],
            do_sample=False,
            max_length=99,
        )
        assert torch.equal(plain, output.sequences)


def test_the_end_token_has_to_end_texts():
    constraint = RegexConstraint("a")
    for generate in (lambda **k: sample_continuations(random_model(1), PROMPT, 1, **k),):
        with pytest.raises(ValueError, match=r"`eos_token_id` is \[\]; it must have 0"):
            generate(constraint=constraint, eos_token_id=None)


def test_another_end_token():
    constraint = RegexConstraint("a{2}", end_token_id=10)
    (found,) = sample_continuations(random_model(1), PROMPT, 1, constraint=constraint, eos_token_id=10)
    assert found.tokens.tolist() == [97, 97, 10]


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-recurrent\[constraints\]'"):
        RegexConstraint("a")
