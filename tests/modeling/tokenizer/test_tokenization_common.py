"""The properties that transformers' common tokenizer tests check, checked for every tokenizer of ours."""

import copy
import inspect
import json
import os

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AddedToken,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer
from hf_recurrent.modeling.tokenizer.tokenization_dna import DNATokenizer

# Two texts of different length that each alphabet can hold.
TEXTS = {
    ByteTokenizer: ["def naïve(x):\n    return x  # 中文 😀", "Short. \x00\x7f  text !"],
    DNATokenizer: ["ACGTNNACGTACCCGT?GGATTACA", "GATTACA\x00N"],
}


@pytest.fixture(params=list(TEXTS), ids=lambda cls: cls.__name__)
def tokenizer_class(request):
    return request.param


@pytest.fixture
def tokenizer(tokenizer_class):
    return tokenizer_class()


@pytest.fixture
def texts(tokenizer_class):
    return TEXTS[tokenizer_class]


# Vocabulary


def test_vocabulary_is_a_bijection_of_ids_and_tokens(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == len(tokenizer) == tokenizer.vocab_size
    assert sorted(vocabulary.values()) == list(range(tokenizer.vocab_size))
    tokens = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(tokenizer.vocab_size))
    assert all(tokenizer.convert_tokens_to_ids(token) == index for token, index in vocabulary.items())
    assert tokenizer.convert_ids_to_tokens(3) == tokens[3]


def test_special_tokens(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.eos_token == tokenizer.pad_token == "\x00"
    assert tokenizer.bos_token is None and tokenizer.unk_token is None
    assert tokenizer.all_special_ids == [0] and tokenizer.all_special_tokens == ["\x00"]
    assert tokenizer.num_special_tokens_to_add() == tokenizer.num_special_tokens_to_add(pair=True) == 0


def test_encoding_adds_nothing(tokenizer, texts):
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.build_inputs_with_special_tokens(ids) == ids
    first, second = texts
    assert tokenizer.encode(first, second) == tokenizer.encode(first) + tokenizer.encode(second)
    assert set(tokenizer(first, return_special_tokens_mask=True)["special_tokens_mask"]) == {0}


def test_pattern_of_special_tokens_is_refused(tokenizer_class):
    with pytest.raises(ValueError, match="`special_tokens_pattern` is 'eos'; it must be None or 'none'"):
        tokenizer_class(special_tokens_pattern="eos")


def test_mask_of_special_tokens_in_ready_ids(tokenizer):
    assert tokenizer.get_special_tokens_mask([0, 1, 2, 0], already_has_special_tokens=True) == [1, 0, 0, 1]


def test_tokenize_agrees_with_encode(tokenizer, texts):
    for text in texts:
        tokens = tokenizer.tokenize(text)
        ids = tokenizer.encode(text)
        assert tokenizer.convert_tokens_to_ids(tokens) == ids
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.convert_tokens_to_string(tokens) == text


def test_no_special_tokens_for_binary_data(tokenizer_class, texts, tmp_path):
    tokenizer = tokenizer_class(eos_token=None, pad_token=None)
    tokenizer.save_pretrained(tmp_path)
    for binary in (tokenizer, tokenizer_class.from_pretrained(tmp_path)):
        assert binary.eos_token_id is None and binary.pad_token_id is None and len(binary) == binary.vocab_size
        ids = binary.encode(texts[1])
        assert binary.decode(ids, skip_special_tokens=True) == texts[1]
        with pytest.raises(ValueError, match="padding token"):
            binary(texts, padding=True)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(texts[1]).ids == ids


# Decoding


def test_decode(tokenizer, texts):
    for text in texts:
        ids = tokenizer.encode(text)
        for form in (ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint8), torch.tensor(ids)):
            assert tokenizer.decode(form) == text
    assert tokenizer.decode([]) == "" and tokenizer.decode(torch.zeros(0, dtype=torch.int64)) == ""
    assert tokenizer.decode(ids[0]) == texts[1][0]
    assert tokenizer.decode(torch.tensor(ids[0])) == texts[1][0]


def test_decode_batches(tokenizer, texts):
    rows = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(rows) == tokenizer.decode(rows) == texts
    padded = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    plain = [text.replace("\x00", "") for text in texts]
    assert tokenizer.batch_decode(padded, skip_special_tokens=True) == plain
    assert tokenizer.batch_decode(padded.numpy(), skip_special_tokens=True) == plain
    assert tokenizer.batch_decode([torch.tensor(row) for row in rows]) == texts


def test_decode_skips_the_end_byte_only_when_asked(tokenizer, texts):
    ids = tokenizer.encode(texts[1])
    assert 0 in ids
    assert tokenizer.decode(ids) == texts[1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == texts[1].replace("\x00", "")
    assert "\x00" not in tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True)


def test_decode_never_cleans_up_spaces():
    text = "a , b . do n't !"
    tokenizer = ByteTokenizer(clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=True) == text


@pytest.mark.parametrize("bad", [-1, 256, 70_000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    match = f"token id {bad} .* it must be from 0 to {tokenizer.vocab_size - 1}"
    for call in (tokenizer.decode, tokenizer.decode_bytes, tokenizer.encode, tokenizer.convert_ids_to_tokens):
        with pytest.raises(ValueError, match=match):
            call([1, bad, 2])
    with pytest.raises(ValueError, match=match):
        tokenizer.decode(torch.tensor([[1, bad]]))


def test_ids_that_are_not_integers_are_refused(tokenizer):
    with pytest.raises(ValueError, match="must be integers"):
        tokenizer.decode_bytes([1.5])
    with pytest.raises(ValueError, match="must be integers"):
        tokenizer.decode(torch.tensor([1.0, 2.0]))


# Calls


def test_call_signature_is_the_library_s(tokenizer):
    assert set(tokenizer("A")) == {"input_ids", "attention_mask"}
    assert isinstance(tokenizer("A"), BatchEncoding)
    base = inspect.signature(PreTrainedTokenizerFast.__call__).parameters
    assert set(base) <= set(inspect.signature(type(tokenizer).__call__).parameters)


def test_batches_equal_singles(tokenizer, texts):
    asked = {
        "return_token_type_ids": True,
        "return_special_tokens_mask": True,
        "return_length": True,
        "truncation": True,
        "max_length": 12,
    }
    batch = tokenizer(texts, **asked)
    singles = [tokenizer(text, **asked) for text in texts]
    assert batch == {name: [single[name] for single in singles] for name in singles[0]}
    pairs = list(zip(texts, texts[::-1], strict=True))
    batch = tokenizer(texts, texts[::-1], **asked)
    assert batch == tokenizer(pairs, **asked)
    singles = [tokenizer(*pair, **asked) for pair in pairs]
    assert batch == {name: [single[name] for single in singles] for name in singles[0]}


def test_bytes_are_taken_like_text(tokenizer, texts):
    raw = [text.encode() for text in texts]
    assert tokenizer(raw, padding=True) == tokenizer(texts, padding=True)
    assert tokenizer(raw[0])["input_ids"] == tokenizer.encode(texts[0]) == tokenizer.encode(bytearray(raw[0]))
    assert tokenizer.encode_bytes(raw[0]).tolist() == tokenizer.encode(texts[0])
    assert tokenizer.encode_bytes(raw[0]).dtype == np.uint8
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(raw[0])) == raw[0]


def test_ids_and_words_are_taken(tokenizer, texts):
    ids = tokenizer.encode(texts[0])
    assert tokenizer(ids)["input_ids"] == ids
    assert tokenizer([ids, ids[:2]])["input_ids"] == [ids, ids[:2]]
    assert tokenizer(["A", "CG"], is_split_into_words=True)["input_ids"] == tokenizer.encode("ACG")
    batch = tokenizer([["A", "CG"], ["T"]], is_split_into_words=True)["input_ids"]
    assert batch == [tokenizer.encode("ACG"), tokenizer.encode("T")]
    spans = tokenizer(["A", "CG"], is_split_into_words=True, return_offsets_mapping=True)["offset_mapping"]
    assert spans == [(0, 1), (0, 1), (1, 2)]


@pytest.mark.parametrize("bad", [3, 2.5, {"a": 1}, [1.5], ["A", 3], [None]])
def test_other_inputs_are_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=r"`text` is of type \w+; it must be a str"):
        tokenizer(bad)


def test_unequal_pairs_are_refused(tokenizer):
    with pytest.raises(ValueError, match="must also be a batch of the same length"):
        tokenizer(["A", "C"], ["G"])
    with pytest.raises(ValueError, match="a pair of sequences, got 3"):
        tokenizer([("A", "C", "G")])


def test_empty_inputs(tokenizer):
    assert tokenizer("") == {"input_ids": [], "attention_mask": []}
    assert tokenizer([]) == {"input_ids": [], "attention_mask": []}
    assert tokenizer(["", "A"], padding=True)["attention_mask"] == [[0], [1]]
    assert tokenizer("", return_tensors="pt")["input_ids"].shape == (1, 0)
    assert tokenizer("", return_tensors="pt")["input_ids"].dtype == torch.int64
    assert tokenizer.encode_bytes(b"").shape == (0,) and tokenizer.decode_bytes([]) == b""


def test_text_target_gives_labels(tokenizer, texts):
    both = tokenizer(texts[0], text_target=texts[1])
    assert both["labels"] == tokenizer.encode(texts[1]) and both["input_ids"] == tokenizer.encode(texts[0])


# Padding


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_sides(tokenizer, texts, side):
    rows = tokenizer(texts)["input_ids"]
    longest = max(map(len, rows))
    set_up = type(tokenizer)(padding_side=side)
    for batch in (tokenizer(texts, padding=True, padding_side=side), set_up(texts, padding="longest")):
        for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], rows, strict=True):
            pad, real = [0] * (longest - len(row)), [1] * len(row)
            assert ids == (pad + row if side == "left" else row + pad)
            assert mask == (pad + real if side == "left" else real + pad)
    with pytest.raises(ValueError, match="`padding_side` is 'middle'; it must be"):
        tokenizer(texts, padding=True, padding_side="middle")


def test_left_is_the_default_side(tokenizer):
    assert tokenizer.padding_side == "left"


def test_padding_to_max_length_and_multiples(tokenizer, texts):
    length = len(tokenizer.encode(texts[0]))
    assert len(tokenizer.encode(texts[0], padding="max_length", max_length=length + 7)) == length + 7
    assert len(tokenizer.encode(texts[0], padding="max_length", max_length=5)) == length  # padding never cuts
    batch = tokenizer(texts, padding=True, pad_to_multiple_of=8)
    assert {len(row) for row in batch["input_ids"]} == {-(-length // 8) * 8}
    assert len(tokenizer.encode(texts[0], padding="max_length")) == length  # no max_length is known
    limited = type(tokenizer)(model_max_length=length + 3)
    assert len(limited.encode(texts[0], padding="max_length")) == length + 3
    assert tokenizer("A", pad_to_multiple_of=8)["input_ids"] == tokenizer.encode("A")  # not asked to pad


def test_padding_covers_every_column(tokenizer):
    asked = {"padding": "max_length", "max_length": 4, "return_token_type_ids": True}
    row = tokenizer("AC", **asked, return_special_tokens_mask=True, return_length=True)
    assert row["special_tokens_mask"] == [1, 1, 0, 0]
    assert row["token_type_ids"] == [0, 0, 0, 0]
    assert row["length"] == 4
    offsets = tokenizer("AC", **asked, return_offsets_mapping=True)["offset_mapping"]
    assert offsets == [(0, 0), (0, 0), (0, 1), (1, 2)]


def test_pad_and_data_collators(tokenizer, texts):
    features = [tokenizer(text) for text in texts]
    assert tokenizer.pad(features) == tokenizer(texts, padding=True)
    batch = DataCollatorWithPadding(tokenizer)([tokenizer(text) for text in texts])
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    labelled = DataCollatorForLanguageModeling(tokenizer, mlm=False)([tokenizer(text) for text in texts])
    assert (labelled["labels"][labelled["attention_mask"] == 0] == -100).all()


def test_mask_can_be_left_out(tokenizer, texts):
    assert set(tokenizer(texts, padding=True, return_attention_mask=False)) == {"input_ids"}


# Truncation


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(tokenizer_class, texts, side):
    tokenizer = tokenizer_class(truncation_side=side)
    ids = tokenizer.encode(texts[0])
    for length in (0, 1, 5, len(ids), len(ids) + 9):
        kept = ids[:length] if side == "right" else ids[max(0, len(ids) - length) :]
        assert tokenizer.encode(texts[0], truncation=True, max_length=length) == kept
        assert tokenizer.encode(texts[0], max_length=length) == kept
    limited = tokenizer_class(truncation_side=side, model_max_length=4)
    assert limited.encode(texts[0], truncation=True) == (ids[:4] if side == "right" else ids[-4:])
    assert tokenizer.encode(texts[0], truncation=True) == ids  # no max_length is known
    with pytest.raises(ValueError, match="`max_length` is -1; it must be at least 0"):
        tokenizer.encode(texts[0], truncation=True, max_length=-1)


def test_truncated_spans_follow_their_ids(tokenizer, texts):
    whole = tokenizer(texts[0], return_offsets_mapping=True)
    cut = tokenizer(texts[0], return_offsets_mapping=True, truncation=True, max_length=9)
    assert cut["offset_mapping"] == whole["offset_mapping"][:9]
    assert len(cut["input_ids"]) == len(cut["attention_mask"]) == 9


def test_overflowing_tokens(tokenizer, texts):
    ids = tokenizer.encode(texts[0])
    out = tokenizer(texts[0], truncation=True, max_length=6, stride=2, return_overflowing_tokens=True)
    assert out["input_ids"] == ids[:6]
    assert out["overflowing_tokens"] == ids[4:]
    assert out["num_truncated_tokens"] == len(ids) - 6


def test_truncation_of_pairs(tokenizer, texts):
    first, second = (tokenizer.encode(text) for text in texts)
    total = len(first) + len(second)
    asked = {"truncation": "only_first", "max_length": total - 3, "return_overflowing_tokens": True}
    out = tokenizer(*texts, **asked)
    assert out["input_ids"] == first[:-3] + second and out["overflowing_tokens"] == first[-3:]
    out = tokenizer(*texts, **{**asked, "truncation": "only_second"})
    assert out["input_ids"] == first + second[:-3] and out["overflowing_tokens"] == second[-3:]
    assert tokenizer.encode(*texts, truncation="longest_first", max_length=total - 3) == first[:-3] + second
    types = tokenizer(*texts, return_token_type_ids=True)["token_type_ids"]
    assert types == [0] * len(first) + [1] * len(second)


def test_warning_for_texts_longer_than_the_model(tokenizer_class, caplog):
    import transformers.utils.logging as transformers_logging

    transformers_logging.enable_propagation()
    try:
        tokenizer_class(model_max_length=2)("ACGT")
    finally:
        transformers_logging.disable_propagation()
    assert "longer than the specified maximum sequence length" in caplog.text


# Tensors


@pytest.mark.parametrize("kind, array", [("pt", torch.Tensor), ("np", np.ndarray)])
def test_tensors(tokenizer, texts, kind, array):
    asked = {"padding": True, "return_offsets_mapping": True, "return_token_type_ids": True, "return_length": True}
    lists = tokenizer(texts, **asked)
    tensors = tokenizer(texts, **asked, return_tensors=kind)
    assert set(lists) == set(tensors)
    for name, values in tensors.items():
        assert isinstance(values, array) and str(values.dtype).endswith("int64")
        assert values.tolist() == (
            [[list(span) for span in row] for row in lists[name]] if name == "offset_mapping" else lists[name]
        )
    single = tokenizer(texts[0], return_tensors=kind)
    assert single["input_ids"].shape == (1, len(tokenizer.encode(texts[0])))
    assert tokenizer.encode(texts[0], return_tensors=kind).tolist() == single["input_ids"].tolist()
    single["input_ids"] += 1  # writable


def test_ragged_tensors_are_refused(tokenizer, texts):
    with pytest.raises(ValueError, match=r"`return_tensors` is 'pt', but .* equally long: pass `padding=True`"):
        tokenizer(texts, return_tensors="pt")
    with pytest.raises(ValueError):
        tokenizer(texts, padding=True, return_tensors="parchment")


# Added tokens


def test_added_tokens(tokenizer, texts, tmp_path):
    size = tokenizer.vocab_size
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>"]}) == 1
    assert tokenizer.add_tokens(["<|user", AddedToken("[X]", lstrip=True, rstrip=True)]) == 2
    assert len(tokenizer) == size + 3 and tokenizer.vocab_size == size
    text = f"<|user|>{texts[0]}<|user{texts[1]}  [X]  A"
    ids = [size, *tokenizer.encode_bytes(texts[0].encode()), size + 1, *tokenizer.encode_bytes(texts[1].encode())]
    ids += [size + 2, *tokenizer.encode("A")]
    tokenizer.save_pretrained(tmp_path)
    for reloaded in (tokenizer, type(tokenizer).from_pretrained(tmp_path)):
        out = reloaded(text, return_offsets_mapping=True)
        assert reloaded(text)["input_ids"] == out["input_ids"] == ids
        assert reloaded.convert_tokens_to_ids(reloaded.tokenize(text)) == ids
        assert out["offset_mapping"][0] == (0, 8)
        assert [text[slice(*span)] for i, span in zip(ids, out["offset_mapping"], strict=True) if i > size] == [
            "<|user",
            "  [X]  ",
        ]
        assert reloaded.decode(ids) == text.replace("  [X]  ", "[X]")
        assert reloaded.decode(ids, skip_special_tokens=True) == text.replace("  [X]  ", "[X]").replace(
            "<|user|>", ""
        ).replace("\x00", "")
        plain = reloaded.encode_bytes(b"<|user|>").tolist()
        assert reloaded.encode("<|user|>", split_special_tokens=True) == plain
        assert reloaded.encode(b"<|user|>") == plain  # raw data is never searched for tokens
        padded = reloaded(["<|user|>", "AC"], padding=True, return_tensors="np")["input_ids"]
        assert padded[0].tolist() == [0, size]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == ids


def test_single_word_tokens_need_spaces_around_them(tokenizer):
    tokenizer.add_tokens([AddedToken("WORD", single_word=True)])
    added = tokenizer.vocab_size
    assert added in tokenizer.encode("WORD") and added in tokenizer.encode("A WORD A")
    assert added not in tokenizer.encode("AWORD A")


def test_other_pad_and_end_tokens(tokenizer_class, tmp_path):
    tokenizer = tokenizer_class(eos_token="<|end|>", pad_token="<|pad|>")
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == {tokenizer.vocab_size, tokenizer.vocab_size + 1}
    tokenizer.save_pretrained(tmp_path)
    reloaded = tokenizer_class.from_pretrained(tmp_path)
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded(["A", ""], padding=True)["input_ids"][1] == [tokenizer.pad_token_id]
    assert reloaded.decode([reloaded.pad_token_id, 1], skip_special_tokens=True) == tokenizer.decode([1])


def test_a_letter_added_as_token_leaves_encoding_exact(tokenizer, texts):
    ids = tokenizer.encode(texts[0])
    tokenizer.add_tokens(["A", "Ã", "Ġ"])
    if tokenizer.vocab_size == 256:
        assert len(tokenizer) == 256
        assert tokenizer.encode("Ã Ġ") == list("Ã Ġ".encode())
    assert tokenizer.encode(texts[0]) == ids


def test_chat_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>"]})
    chat = [{"role": "user", "content": "AC"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids == [tokenizer.vocab_size, *tokenizer.encode("AC")]
    chat[0]["content"] = "A<|user|>"
    ids = tokenizer.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
    assert ids.count(tokenizer.vocab_size) == 1 and tokenizer.decode(ids[1:2]) == "A"


# Saving and loading


def test_save_and_load(tokenizer_class, texts, tmp_path):
    tokenizer = tokenizer_class(model_max_length=77, padding_side="right", truncation_side="left", errors="ignore")
    files = tokenizer.save_pretrained(tmp_path / "first")
    assert str(tmp_path / "first" / "tokenizer.json") in files
    tokenizer_class.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    reloaded = tokenizer_class.from_pretrained(tmp_path / "second")
    assert type(reloaded) is tokenizer_class
    assert (reloaded.model_max_length, reloaded.padding_side, reloaded.truncation_side) == (77, "right", "left")
    assert reloaded.errors == "ignore"
    assert reloaded.special_tokens_map == tokenizer.special_tokens_map
    assert reloaded.get_vocab() == tokenizer.get_vocab() and len(reloaded) == len(tokenizer)
    assert reloaded(texts, padding=True) == tokenizer(texts, padding=True)
    first, second = (json.loads((tmp_path / step / "tokenizer.json").read_text()) for step in ("first", "second"))
    assert first == second
    first, second = (json.loads((tmp_path / at / "tokenizer_config.json").read_text()) for at in ("first", "second"))
    assert {name: second[name] for name in first} == first
    changed = tokenizer_class.from_pretrained(tmp_path / "first", padding_side="left", model_max_length=5)
    assert changed.padding_side == "left" and changed.model_max_length == 5


def test_copies_are_equal(tokenizer, texts):
    tokenizer.add_tokens(["<new>"])
    twin = copy.deepcopy(tokenizer)
    twin.add_tokens(["<newer>"])
    assert len(twin) == len(tokenizer) + 1
    assert twin.encode(texts[0] + "<new>") == tokenizer.encode(texts[0] + "<new>")


def test_save_vocabulary(tokenizer, tmp_path):
    (path,) = tokenizer.save_vocabulary(str(tmp_path), filename_prefix="mine")
    assert os.path.basename(path) == "mine-tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"`save_directory` is '.*absent'; directory not found"):
        tokenizer.save_vocabulary(str(tmp_path / "absent"))


def test_tokenizer_json_gives_the_same_ids(tokenizer, texts, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # Every character up to U+07FF covers all one- and two-byte characters; then the borders of the longer ones.
    points = [*range(0x800), 0x800, 0x4E2D, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600, 0x10FFFF]
    everything = "".join(map(chr, points))
    for text in [*texts, everything, "", "\x00\x00", "Ā", "  \n ", "e\u0301"]:
        assert other.encode(text).ids == tokenizer.encode(text)
        ids = tokenizer.encode(text)
        assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
    ids = list(range(tokenizer.vocab_size))  # for bytes: not UTF-8
    assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.get_vocab_size() == tokenizer.vocab_size
    stock = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert stock.eos_token_id == stock.pad_token_id == 0
    assert stock(everything)["input_ids"] == tokenizer.encode(everything)
