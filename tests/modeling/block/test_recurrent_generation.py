"""generate(): greedy, sampling, beams, guidance, padded batches, empty prompts, states, streamers, constant memory."""

import threading

import pytest
import torch
from breadth import some_of
from model_cases import FAMILIES, each_family, tiny_model
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, GenerationConfig, TextIteratorStreamer

from hf_recurrent import ByteIteratorStreamer, ByteTokenizer, config_from_preset

PROMPTS = [b"def", b"import os\n", b"class Stream:"]


def greedy(model, **kwargs):
    return model.generate(**({"do_sample": False, "eos_token_id": None, "max_new_tokens": 20} | kwargs))


def ids(data: bytes) -> torch.Tensor:
    return torch.tensor([list(data)])


def left_padded(prompts):
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return rows, mask


@each_family
def test_greedy_is_the_argmax_of_the_whole_forward(family):
    model = tiny_model(family, torch.float64)
    prompt = ids(PROMPTS[1])
    expected = prompt
    for _ in range(20):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy(model, inputs=prompt), expected)
    assert torch.equal(greedy(model, inputs=prompt, use_cache=False), expected)


@each_family
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_batch_equals_each_alone(family, beams):
    model = tiny_model(family, torch.float64)
    rows, mask = left_padded(PROMPTS)
    together = greedy(model, inputs=rows, attention_mask=mask, num_beams=beams)
    for row, prompt in enumerate(PROMPTS):
        alone = greedy(model, inputs=ids(prompt), num_beams=beams)
        assert torch.equal(together[row, rows.shape[1] :], alone[0, len(prompt) :])


@each_family
def test_beams_do_not_depend_on_the_state(family):
    model = tiny_model(family, torch.float64)
    rows, mask = left_padded(PROMPTS)
    with_state = greedy(model, inputs=rows, attention_mask=mask, num_beams=4)
    assert torch.equal(greedy(model, inputs=rows, attention_mask=mask, num_beams=4, use_cache=False), with_state)


@each_family
@pytest.mark.parametrize("beams", [1, 3])
def test_a_given_state_continues_the_text(family, beams):
    model = tiny_model(family, torch.float64)
    text = b"for stream in streams:\n    "
    whole = greedy(model, inputs=ids(text), num_beams=beams)
    state = model(ids(text[:10])).state
    continued = greedy(model, inputs=ids(text[10:]), state=state, num_beams=beams)
    assert torch.equal(continued[0, len(text) - 10 :], whole[0, len(text) :])


@each_family
def test_the_returned_state_has_read_all_but_the_last_byte(family):
    model = tiny_model(family, torch.float64)
    result = greedy(model, inputs=ids(PROMPTS[0]), return_dict_in_generate=True)
    expected = model(result.sequences[:, :-1]).state
    for name, tensor in expected.items():
        torch.testing.assert_close(result.pending_state[name], tensor, rtol=1e-10, atol=1e-10)


@each_family
def test_sampling_is_reproducible_and_stops_at_the_end_byte(family):
    model = tiny_model(family, vocab_size=8)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(model.generate(ids(PROMPTS[0]) % 8, do_sample=True, max_new_tokens=3000))
    assert torch.equal(*runs)
    new = runs[0][0, len(PROMPTS[0]) :]
    assert len(new) < 3000, "an untrained model of 8 tokens ends within 3,000 of them all but surely"
    assert new[-1] == 0
    assert (new[:-1] != 0).all()


@each_family
def test_the_mask_does_not_grow_while_generating(family):
    model = tiny_model(family)
    seen = []

    def note(_, args, kwargs):
        seen.append((kwargs["input_ids"].shape[1], kwargs.get("attention_mask")))

    model.register_forward_pre_hook(note, with_kwargs=True)
    rows, mask = left_padded(PROMPTS)
    model.generate(rows, attention_mask=mask, do_sample=False, eos_token_id=None, max_new_tokens=5)
    assert [steps for steps, _ in seen] == [rows.shape[1], 1, 1, 1, 1]
    assert all(mask is None for _, mask in seen[1:])


@each_family
def test_logits_to_keep(family):
    model = tiny_model(family)
    full = model(ids(PROMPTS[2])).logits
    torch.testing.assert_close(model(ids(PROMPTS[2]), logits_to_keep=2).logits, full[:, -2:])
    index = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids(PROMPTS[2]), logits_to_keep=index).logits, full[:, index])


@pytest.mark.parametrize("family", some_of(FAMILIES, ("memora",)))
def test_one_compiled_step_reads_all_bytes(family):
    """`model.forward = torch.compile(model.forward)`: one graph for the prompt, one for every byte after it."""
    torch._dynamo.reset()
    model = tiny_model(family)
    expected = greedy(model, inputs=ids(PROMPTS[1]))
    counter = CompileCounter()
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    for _ in range(2):
        assert torch.equal(greedy(model, inputs=ids(PROMPTS[1])), expected)
    assert counter.frame_count == 2


@each_family
def test_an_empty_prompt_is_a_new_episode(family):
    model = tiny_model(family, torch.float64)
    expected = greedy(model, inputs=ids(b"\0"), attention_mask=torch.ones(1, 1))
    for empty in ({}, {"inputs": torch.empty(1, 0, dtype=torch.long)}):
        assert torch.equal(greedy(model, **empty), expected)
    rows, mask = left_padded([b"", *PROMPTS])
    together = greedy(model, inputs=rows, attention_mask=mask)
    assert torch.equal(together[0, rows.shape[1] :], expected[0, 1:])
    assert torch.equal(together[1:], greedy(model, inputs=rows[1:], attention_mask=mask[1:]))
    with pytest.raises(ValueError, match="after a `state` it must have the byte to read next"):
        greedy(model, state=model.init_state(1))
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="this model has no end byte"):
        greedy(model)


@each_family
@pytest.mark.parametrize("negative", [None, b"import "])
def test_guidance_equals_reading_everything_again(family, negative):
    model = tiny_model(family, torch.float64)
    prompt, scale = ids(PROMPTS[1]), 1.7
    text, other = prompt, prompt[:, -1:] if negative is None else ids(negative)
    for _ in range(12):
        with_text, without = (model(x).logits[:, -1].log_softmax(-1) for x in (text, other))
        new = (scale * (with_text - without) + without).argmax(-1, keepdim=True)
        text, other = torch.cat([text, new], 1), torch.cat([other, new], 1)
    options = {} if negative is None else {"negative_prompt_ids": ids(negative)}
    guided = greedy(model, inputs=prompt, guidance_scale=scale, max_new_tokens=12, **options)
    assert torch.equal(guided, text)
    assert not torch.equal(guided, greedy(model, inputs=prompt, max_new_tokens=12))


def test_a_saved_generation_config_is_used(tmp_path):
    model = tiny_model("memora")
    model.generation_config.update(max_new_tokens=7, do_sample=False, eos_token_id=None)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generate(ids(b"def")).shape == (1, 10)
    assert loaded.generate(ids(b"def"), generation_config=GenerationConfig(max_new_tokens=2)).shape[1] <= 5


@pytest.mark.parametrize("streamer_class", [TextIteratorStreamer, ByteIteratorStreamer])
def test_streamers_give_the_decoded_text(streamer_class):
    tokenizer, model = ByteTokenizer(), tiny_model("memora")
    streamer = streamer_class(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=greedy, args=(model,), kwargs={"inputs": ids(PROMPTS[0]), "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(greedy(model, inputs=ids(PROMPTS[0]))[0, len(PROMPTS[0]) :])


@pytest.mark.parametrize("given", ["assistant", "lookup", "lookup in the configuration", "assistant of another model"])
def test_drafts_are_refused_with_the_way_that_works(given):
    model, prompt = tiny_model("memora"), torch.tensor([[65, 66]])
    options = {
        "assistant": {"assistant_model": tiny_model("hawk")},
        "lookup": {"prompt_lookup_num_tokens": 2},
        "lookup in the configuration": {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)},
        "assistant of another model": {"assistant_model": model, "max_new_tokens": 3},
    }[given]
    if given == "assistant of another model":
        model = AutoModelForCausalLM.from_config(
            config_from_preset("llama-s0", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        )
    with pytest.raises(ValueError, match=r"use `hf_recurrent\.generate_speculative\(model, input_ids, draft="):
        model.generate(prompt, **options)
