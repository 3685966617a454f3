"""Continuations of one state are those that each seed gives alone, with the log-probabilities of the model."""

import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import each_family, relative_difference, tiny_model

from hf_recurrent import sample_continuations

PROMPT = torch.tensor([list(b"import ")])


@each_family
def test_each_row_is_what_its_seed_gives_alone(family):
    model = tiny_model(family, torch.float64)
    options = {"max_new_tokens": 12, "temperature": 0.5, "top_p": 0.95}
    together = sample_continuations(model, PROMPT, 7, seed=3, batch_size=4, **options)
    assert [found.seed for found in together] == list(range(3, 10))
    assert len({tuple(found.tokens.tolist()) for found in together}) > 1
    for found in together:
        (alone,) = sample_continuations(model, PROMPT, 1, seed=found.seed, **options)
        assert torch.equal(found.tokens, alone.tokens)
        assert found.log_probability == pytest.approx(alone.log_probability, abs=1e-9)


@each_family
def test_log_probabilities_and_states_are_those_of_the_whole_text(family):
    model = tiny_model(family, torch.float64)
    whole = sample_continuations(model, PROMPT, 6, max_new_tokens=9, temperature=0.7, eos_token_id=None)
    end = whole[2].tokens[4].item()
    found = sample_continuations(model, PROMPT, 6, max_new_tokens=9, temperature=0.7, eos_token_id=end)
    for one in found:
        text = torch.cat([PROMPT, one.tokens[None]], 1)
        with torch.no_grad():
            output = model(text[:, :-1])
        expected = output.logits[0, PROMPT.shape[1] - 1 :].log_softmax(-1).gather(1, one.tokens[:, None]).sum()
        assert one.log_probability == pytest.approx(expected.item(), abs=1e-5)  # float32 logits, as in generate()
        assert one.ended == (one.tokens[-1].item() == end) and end not in one.tokens[:-1]
        assert one.ended or len(one.tokens) == 9
        for actual, expected in ((one.pending_state, output.state), (one.state, model(text).state)):
            for name, tensor in expected.items():
                assert not tensor.numel() or relative_difference(actual[name], tensor) < 1e-9
    assert found[2].ended
    for one, free in zip(found, whole, strict=True):
        assert torch.equal(one.tokens, free.tokens[: len(one.tokens)])


def test_the_prompt_is_read_once(monkeypatch):
    model, shapes = tiny_model("memora"), []
    forward = type(model).forward

    def note(self, input_ids, **arguments):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, **arguments)

    monkeypatch.setattr(type(model), "forward", note)
    sample_continuations(model, PROMPT, 5, max_new_tokens=3, eos_token_id=None, batch_size=3)
    assert shapes == [(1, 7), *[(3, 1)] * 3, *[(2, 1)] * 3]  # the last of each batch for its states


def test_a_given_state_comes_first():
    model = tiny_model("hawk", torch.float64)
    with torch.no_grad():
        state = model(PROMPT[:, :4]).state
    whole = sample_continuations(model, PROMPT, 3, max_new_tokens=8)
    rest = sample_continuations(model, PROMPT[:, 4:], 3, max_new_tokens=8, state=state)
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(whole, rest, strict=True))
    assert all(len(tensor) == 1 for tensor in state.values())


def test_frequencies_are_those_of_the_model():
    model = tiny_model("memora", vocab_size=5)
    with torch.no_grad():
        expected = model(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    found = sample_continuations(model, torch.tensor([[1]]), 2000, max_new_tokens=1, batch_size=2000)
    frequencies = torch.bincount(torch.cat([one.tokens for one in found]), minlength=5) / 2000
    assert (frequencies - expected).abs().max() < 5 * 0.5 / 2000**0.5


def test_none_is_no_state():
    with pytest.raises(ValueError, match="`state` is None; to begin a new text, leave it out"):
        sample_continuations(tiny_model("memora"), PROMPT, 1, state=None)


@pytest.mark.parametrize("name", ["num_continuations", "max_new_tokens", "batch_size"])
def test_counts_are_checked(name):
    arguments = {"num_continuations": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"`{name}` is 0; it must be at least 1"):
        sample_continuations(tiny_model("memora"), PROMPT, **arguments)


def test_more_prompts_are_refused():
    with pytest.raises(ValueError, match="one prompt"):
        sample_continuations(tiny_model("memora"), PROMPT.repeat(2, 1), 2)


@torch.no_grad()
def test_counts_do_not_learn_continuations():
    corpus = word_corpus((1, 40, 90, 60))
    model = counted_model(corpus, documents=(2, 3)).double()  # blocks and single steps give the same logits in float32
    prompt = torch.tensor(corpus[2][:200]).long()[None]
    for found in sample_continuations(model, prompt, 3, max_new_tokens=30, eos_token_id=None):
        before = model(prompt).state
        expected = model(found.tokens[None], state=before, sampled=True)
        assert torch.equal(found.state["count_memory"], expected.state["count_memory"])
        learned = model(found.tokens[None], state=before)
        assert not torch.equal(found.state["count_memory"], learned.state["count_memory"])
