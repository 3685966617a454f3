"""Documents packed into one row, in the three ways that collators mark them, are separate documents."""

import pytest
import torch
from model_cases import each_variant, tiny_model
from transformers import DataCollatorWithFlattening

LENGTHS = (3, 1, 7, 2)


def marks(lengths=LENGTHS):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "cu_seq_lens_q": ends.int(),
    }


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (1, sum(lengths)), generator=generator).split(lengths, dim=1)


def gradients(model, logits):
    return torch.autograd.grad(logits.square().sum(), [p for p in model.parameters() if p.requires_grad])


@each_variant
@pytest.mark.parametrize("name", marks())
def test_packed_documents_equal_separate_ones(variant, name):
    model = tiny_model(variant, torch.float64)
    packed = model(torch.cat(documents(), 1), **{name: marks()[name]}).logits
    separate = torch.cat([model(ids).logits for ids in documents()], 1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)
    pairs = zip(gradients(model, packed), gradients(model, separate), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["memora", "hawk", "mgrade"])
def test_float32_stays_within_the_promised_difference(variant):
    model = tiny_model(variant)
    packed = model(torch.cat(documents(), 1), position_ids=marks()["position_ids"]).logits
    separate = torch.cat([model(ids).logits for ids in documents()], 1)
    assert (packed - separate).abs().max() < 1e-5


@pytest.mark.parametrize("flash", [False, True])
def test_the_collator_of_transformers(flash):
    model = tiny_model("hawk", torch.float64)
    options = {"return_flash_attn_kwargs": True, "return_seq_idx": True} if flash else {}
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids[0].tolist()} for ids in documents((3, 5, 7))])
    output = model(**batch)
    separate = [model(ids, labels=ids) for ids in documents((3, 5, 7))]
    torch.testing.assert_close(output.logits, torch.cat([part.logits for part in separate], 1), rtol=0, atol=1e-12)
    losses = [part.loss * (length - 1) for part, length in zip(separate, (3, 5, 7), strict=True)]
    torch.testing.assert_close(output.loss, sum(losses) / (15 - 3))


def test_all_marks_together_and_the_masks_of_the_caller():
    model = tiny_model("memora", torch.float64)
    ids, resets = torch.cat(documents(), 1), marks()["position_ids"] == 0
    expected = model(ids, reset_mask=resets).logits
    assert torch.equal(model(ids, **marks(), max_length_q=7, max_length_k=7).logits, expected)
    assert torch.equal(model(ids, reset_mask=resets, **marks()).logits, expected)


def test_padding_does_not_count():
    model = tiny_model("memora", torch.float64)
    ids = torch.cat(documents(), 1)
    padded = torch.nn.functional.pad(ids, (2, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (2, 0))
    positions = torch.nn.functional.pad(marks()["position_ids"], (2, 0), value=1)
    logits = model(padded, attention_mask=mask, position_ids=positions).logits[:, 2:]
    torch.testing.assert_close(logits, model(ids, position_ids=marks()["position_ids"]).logits, rtol=0, atol=1e-12)


def test_a_row_that_continues_a_document_keeps_its_state():
    model = tiny_model("memora", torch.float64)
    ids = torch.cat(documents((6,)), 1)
    state = model(ids[:, :4]).state
    output = model(ids[:, 4:], state=state, position_ids=torch.tensor([[4, 5]]))
    torch.testing.assert_close(output.logits, model(ids).logits[:, 4:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"position_ids": torch.zeros(1, 2, dtype=torch.long)}, r"`position_ids` has shape \(1, 2\)"),
        ({"position_ids": torch.zeros(1, 3)}, r"`position_ids` is torch\.float32"),
        ({"seq_idx": torch.zeros(3, dtype=torch.long)}, r"must be integers, \(B, T\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 2])}, "must rise from 0 to 3"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 1, 3])}, "must rise from 0 to 3"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 1 << 40])}, "must rise from 0 to 3"),
        ({"cu_seq_lens_q": torch.tensor([[0, 3]])}, r"must be integers \(documents"),
    ],
)
def test_marks_that_are_not_valid(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model("memora")(torch.ones(1, 3, dtype=torch.long), **arguments)


def test_a_document_cannot_go_from_row_to_row():
    with pytest.raises(ValueError, match="have the start of every row"):
        tiny_model("memora")(torch.ones(2, 3, dtype=torch.long), cu_seq_lens_q=torch.tensor([0, 4, 6]))


@pytest.mark.parametrize("variant", ["memora", "mgrade", "smt-rnn"])
def test_unknown_arguments(variant):
    model, ids = tiny_model(variant), torch.ones(1, 2, dtype=torch.long)
    for arguments in ({"past_key_values": object()}, {"foo": 1}, {"token_type_ids": ids}, {"output_attentions": True}):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
            model(ids, **arguments)
    model(ids, past_key_values=None, output_attentions=False, cache_position=torch.arange(2))


@each_variant
def test_padding_anywhere_leaves_the_state_as_it_was(variant):
    model = tiny_model(variant, torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (3, 9), generator=generator)
    real = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0], [0] * 9]).bool()
    resets = torch.tensor([[0, 1, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0, 0], [0] * 9]).bool()
    output = model(ids, attention_mask=real.long(), reset_mask=resets)
    for row in range(2):
        keep = real[row]
        alone = model(ids[row : row + 1, keep], reset_mask=resets[row : row + 1, keep])
        torch.testing.assert_close(output.logits[row, keep], alone.logits[0], rtol=0, atol=1e-12)
        for name, part in alone.state.items():
            torch.testing.assert_close(output.state[name][row], part[0], rtol=0, atol=1e-12)
    zero = model.init_state(1)
    assert all(torch.equal(output.state[name][2], part[0]) for name, part in zero.items())
