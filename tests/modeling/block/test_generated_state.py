"""The state of `generate()`: going on with new text equals one forward pass over everything."""

import pytest
import torch
from model_cases import each_family, relative_difference, tiny_model
from transformers import StoppingCriteria

from hf_recurrent.modeling.block.recurrent_generation import RecurrentGenerateBeamOutput, RecurrentGenerateOutput
from hf_recurrent.modeling.block.recurrent_state import select_state

PROMPTS = [b"def", b"import os\n", b"class Stream:"]
MORE = torch.tensor([list(b"\nand so on")])


def generate(model, **options):
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0} | options
    return model.generate(return_dict_in_generate=True, **options)


def ids(data: bytes) -> torch.Tensor:
    return torch.tensor([list(data)])


def left_padded(prompts=PROMPTS):
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    return rows, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape
        assert not tensor.numel() or relative_difference(actual[name], tensor) < 1e-9, name


def assert_reads_everything(model, output, texts):
    """Row by row, the states equal one forward pass, and so are the logits of more text."""
    assert len(texts) == len(output.sequences)
    for row, text in enumerate(texts):
        index = torch.tensor([row])
        whole = model(torch.cat([text, MORE], 1)).logits[:, -MORE.shape[1] :]
        continued = model(MORE, state=select_state(output.state, index)).logits
        torch.testing.assert_close(continued, whole, rtol=1e-9, atol=1e-9)
        assert_same_state(select_state(output.state, index), model(text).state)
        assert_same_state(select_state(output.pending_state, index), model(text[:, :-1]).state)


@each_family
def test_one_row(family):
    model = tiny_model(family, torch.float64)
    output = generate(model, inputs=ids(PROMPTS[0]), eos_token_id=None)
    assert isinstance(output, RecurrentGenerateOutput)
    assert_reads_everything(model, output, [output.sequences])
    # Without new text: the last byte is read next.
    rest = generate(model, inputs=output.sequences[:, -1:], state=output.pending_state, eos_token_id=None)
    whole = generate(model, inputs=ids(PROMPTS[0]), eos_token_id=None, max_new_tokens=24)
    assert torch.equal(torch.cat([output.sequences[:, :-1], rest.sequences], 1), whole.sequences)
    assert_same_state(rest.state, whole.state)


@each_family
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_that_end_before_others(family, beams):
    model = tiny_model(family, torch.float64)
    rows, mask = left_padded()
    width = rows.shape[1]
    free = generate(model, inputs=rows, attention_mask=mask, eos_token_id=None, num_beams=beams)
    end = free.sequences[0, width + 3].item()
    output = generate(model, inputs=rows, attention_mask=mask, eos_token_id=end, num_beams=beams)
    texts = []
    for row, prompt in enumerate(PROMPTS):
        new = output.sequences[row, width:].tolist()
        new = new[: new.index(end) + 1] if end in new else new
        texts.append(torch.cat([ids(prompt), torch.tensor([new], dtype=torch.long)], 1))
    assert beams > 1 or texts[0].shape[1] <= len(PROMPTS[0]) + 4  # this row ends early
    assert_reads_everything(model, output, texts)


class EndsAtLength(StoppingCriteria):
    """Ends row k after k + 2 new bytes."""

    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **options):
        return torch.arange(len(input_ids)) + 2 <= input_ids.shape[1] - self.width


def test_other_ends_than_the_end_byte():
    """Padding has the id of the end byte, and nothing in `sequences` tells them apart."""
    model = tiny_model("memora", torch.float64)
    rows, mask = left_padded()
    width = rows.shape[1]
    output = generate(model, inputs=rows, attention_mask=mask, eos_token_id=0, stopping_criteria=[EndsAtLength(width)])
    assert (output.sequences[0, width + 2 :] == 0).all() and output.sequences.shape[1] == width + 4
    ends = [output.sequences[row, width : width + row + 2] for row in range(3)]
    texts = [torch.cat([ids(prompt), end[None]], 1) for prompt, end in zip(PROMPTS, ends, strict=True)]
    assert_reads_everything(model, output, texts)


@each_family
@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 4}])
def test_several_sequences(family, options):
    model = tiny_model(family, torch.float64)
    rows, mask = left_padded(PROMPTS[:2])
    torch.manual_seed(1)
    output = generate(
        model, inputs=rows, attention_mask=mask, eos_token_id=None, num_return_sequences=2, max_new_tokens=5, **options
    )
    texts = [torch.cat([ids(PROMPTS[row // 2]), output.sequences[row, rows.shape[1] :][None]], 1) for row in range(4)]
    assert isinstance(output, RecurrentGenerateBeamOutput if "num_beams" in options else RecurrentGenerateOutput)
    assert_reads_everything(model, output, texts)


@each_family
def test_a_conversation_of_generate_calls(family):
    """New text after new text: the state alone carries the past."""
    model = tiny_model(family, torch.float64)
    state, text = model.init_state(1), torch.empty(1, 0, dtype=torch.long)
    for turn in PROMPTS:
        output = generate(model, inputs=ids(turn), state=state, eos_token_id=None, max_new_tokens=4)
        whole = generate(model, inputs=torch.cat([text, ids(turn)], 1), eos_token_id=None, max_new_tokens=4)
        text, state = whole.sequences, output.state
        assert torch.equal(output.sequences[0, -4:], text[0, -4:])
        assert_same_state(state, whole.state)


@pytest.mark.parametrize("beams", [1, 2])
def test_one_new_byte(beams):
    model = tiny_model("hawk", torch.float64)
    output = generate(model, inputs=ids(b"abc"), eos_token_id=None, max_new_tokens=1, num_beams=beams)
    assert_reads_everything(model, output, [output.sequences])


def test_from_embeddings():
    model = tiny_model("memora", torch.float64)
    embeddings = model.get_input_embeddings()(ids(PROMPTS[1]))
    for beams in (1, 2):
        output = generate(model, inputs_embeds=embeddings, eos_token_id=None, num_beams=beams)
        assert_reads_everything(model, output, [torch.cat([ids(PROMPTS[1]), output.sequences], 1)])


def test_without_a_dictionary_nothing_more_is_read():
    model, steps = tiny_model("memora"), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: steps.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 4}
    plain = model.generate(ids(PROMPTS[0]), **options)
    assert steps == [3, 1, 1, 1]
    output = model.generate(ids(PROMPTS[0]), return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, plain) and steps[4:] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("beams", [1, 2])
def test_without_a_cache_there_is_no_state(beams):
    output = generate(tiny_model("memora"), inputs=ids(b"abc"), use_cache=False, num_beams=beams)
    assert output.state is None and output.pending_state is None


@each_family
def test_none_is_no_state(family):
    model = tiny_model(family)
    with pytest.raises(
        ValueError, match=r"`state` is None; to begin a new text, leave it out or pass `model.init_state"
    ):
        generate(model, inputs=ids(b"abc"), state=None)
    assert model(ids(b"abc"), state=None).state is not None
