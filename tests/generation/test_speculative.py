"""Speculative decoding gives the text and the state of `generate()`, and samples from the model's own distribution."""

import itertools
import math

import pytest
import torch
from counted_model import counted_model, word_corpus
from model_cases import each_dtype, each_variant, relative_difference, tiny_model
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset, generate_speculative
from hf_recurrent.generation import state_reader
from hf_recurrent.generation.drafts import GreedyChoice, PromptLookup, SampledChoice
from hf_recurrent.generation.sampling import Sampling, draw
from hf_recurrent.modeling.step import compiled_step

PROMPT = torch.tensor([list(b"def main(")])


def similar_model(model, scale: float = 0.02):
    """A draft that often agrees with the model."""
    torch.manual_seed(3)
    draft = AutoModelForCausalLM.from_config(model.config).to(model.dtype).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * torch.randn_like(parameter)
    return draft


def plain(model, prompt=PROMPT, **options):
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, **options)


def assert_same_state(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape
        assert not tensor.numel() or relative_difference(actual[name], tensor) <= tolerance


@pytest.mark.sampled(4)
@each_variant
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_greedy_text_and_state_are_those_of_generate(variant, draft_tokens):
    model = tiny_model(variant, torch.float64)
    expected = plain(model)
    for draft in (similar_model(model), tiny_model("hawk", torch.float64), "prompt-lookup"):
        output = generate_speculative(
            model, PROMPT, draft=draft, draft_tokens=draft_tokens, max_new_tokens=30, eos_token_id=None
        )
        assert torch.equal(output.sequences, expected.sequences)
        assert_same_state(output.state, expected.state, 1e-10)
        assert_same_state(output.pending_state, expected.pending_state, 1e-10)
        if isinstance(draft, str):
            assert output.draft_state is None and output.pending_draft_state is None
        else:
            assert_same_state(output.draft_state, draft(output.sequences).state, 1e-10)
            assert_same_state(output.pending_draft_state, draft(output.sequences[:, :-1]).state, 1e-10)


@pytest.mark.skipif(compiled_step._kernel() is None, reason="the kernel was not built")
@pytest.mark.parametrize("family", ["memora", "hawk"])
def test_the_kernel_has_the_bits_of_generate(family):
    model = tiny_model(family)
    expected = plain(model, max_new_tokens=100)
    output = generate_speculative(
        model, PROMPT, draft=similar_model(model), draft_tokens=3, max_new_tokens=100, eos_token_id=None
    )
    assert torch.equal(output.sequences, expected.sequences)
    assert_same_state(output.state, expected.state, 0)


@each_dtype
def test_a_perfect_draft_is_accepted(dtype):
    model = tiny_model("memora", dtype)
    output = generate_speculative(model, PROMPT, draft=model, draft_tokens=4, max_new_tokens=21, eos_token_id=None)
    # The first byte comes from the prompt, and each round adds five.
    assert (output.proposed, output.accepted, output.acceptance_rate) == (16, 16, 1.0)
    assert output.forwards == 1 + 4
    assert output.sequences.shape == (1, 9 + 21)


def test_a_state_continues_the_text():
    model = tiny_model("hawk", torch.float64)
    draft = similar_model(model)
    whole = generate_speculative(model, PROMPT, draft=draft, max_new_tokens=30, eos_token_id=None)
    part = generate_speculative(model, PROMPT, draft=draft, max_new_tokens=13, eos_token_id=None)
    rest = generate_speculative(
        model,
        part.sequences[:, -1:],
        state=part.pending_state,
        draft=draft,
        draft_state=part.pending_draft_state,
        max_new_tokens=17,
        eos_token_id=None,
    )
    assert torch.equal(torch.cat([part.sequences[:, :-1], rest.sequences], 1), whole.sequences)
    assert_same_state(rest.state, whole.state, 1e-10)
    options = {"draft": draft, "max_new_tokens": 9, "eos_token_id": None}
    text = torch.cat([part.sequences, PROMPT], 1)
    new = generate_speculative(model, PROMPT, state=part.state, draft_state=part.draft_state, **options)
    again = generate_speculative(model, text, **options)
    assert torch.equal(new.sequences[0, -9:], again.sequences[0, -9:])
    assert_same_state(new.state, again.state, 1e-10)


@pytest.mark.parametrize("name", ["state", "draft_state"])
def test_none_is_no_state(name):
    model = tiny_model("memora")
    with pytest.raises(ValueError, match=f"`{name}` is None; to begin a new text, leave it out"):
        generate_speculative(model, PROMPT, draft=model, **{name: None})


@pytest.mark.parametrize("kernel", [True, False])
def test_the_end_byte_ends(kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(compiled_step, "_kernel", lambda: None)
    model = tiny_model("memora", torch.float64)
    free = plain(model).sequences[0, PROMPT.shape[1] :].tolist()
    for end in dict.fromkeys(free):
        expected = plain(model, eos_token_id=end)
        output = generate_speculative(
            model, PROMPT, draft=similar_model(model), draft_tokens=4, max_new_tokens=30, eos_token_id=[end, 999]
        )
        assert torch.equal(output.sequences, expected.sequences)
        assert_same_state(output.state, expected.state, 1e-10)


def test_the_end_byte_of_the_model_is_the_default():
    model = tiny_model("memora", torch.float64)
    model.generation_config.eos_token_id = plain(model).sequences[0, -3].item()
    output = generate_speculative(model, PROMPT, draft=similar_model(model), max_new_tokens=30)
    assert output.sequences[0, -1] == model.generation_config.eos_token_id and output.sequences.shape[1] < 39


@pytest.mark.parametrize("limit", [2, 32])
def test_unread_bytes_stay_few_without_a_state_per_byte(limit, monkeypatch):
    from hf_recurrent.generation import speculative

    monkeypatch.setattr(speculative, "_MOST_UNREAD", limit)
    monkeypatch.setattr(state_reader, "_compiled_step", lambda model: None)
    model, longest = tiny_model("memora", torch.float64), 0
    read = state_reader.StateReader.read

    def note(self, tokens, state):
        nonlocal longest
        longest = max(longest, len(tokens))
        return read(self, tokens, state)

    monkeypatch.setattr(state_reader.StateReader, "read", note)
    output = generate_speculative(
        model, PROMPT, draft=tiny_model("lru", torch.float64), max_new_tokens=60, eos_token_id=None
    )
    assert torch.equal(output.sequences, plain(model, max_new_tokens=60).sequences)
    assert longest <= limit + 4 + 3
    assert_same_state(output.state, plain(model, max_new_tokens=60).state, 1e-10)


def test_hooks_and_changed_weights_count():
    model = tiny_model("memora")
    before = generate_speculative(model, PROMPT, draft="prompt-lookup", max_new_tokens=10).sequences
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.roll(1, -1))
    output = generate_speculative(model, PROMPT, draft="prompt-lookup", max_new_tokens=10).sequences
    assert not torch.equal(output, before)
    assert torch.equal(output, plain(model, max_new_tokens=10, eos_token_id=0).sequences)


def test_the_streamer_receives_every_byte():
    received = []

    class Streamer:
        def put(self, value):
            received.append(value)

        def end(self):
            received.append(None)

    model = tiny_model("memora")
    output = generate_speculative(model, PROMPT, draft=model, max_new_tokens=7, eos_token_id=None, streamer=Streamer())
    assert torch.equal(received[0], PROMPT) and received[-1] is None
    assert torch.cat(received[1:-1]).tolist() == output.sequences[0, 9:].tolist()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations of the chi-square statistic above its mean, rare outcomes together."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 8
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    freedom = max(len(counts) - 1, 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}])
@pytest.mark.parametrize("lookup", [False, True])
def test_rejection_keeps_the_distribution(options, lookup):
    """Of the first kept token, and of the second where the first draft was accepted."""
    torch.manual_seed(0)
    target = torch.randn(3, 6) * 1.5
    proposed = target[:2] + torch.randn(2, 6)
    choice = SampledChoice(Sampling(**options), torch.Generator().manual_seed(1))
    expected = choice.sampling.probabilities(target)
    first, second = torch.zeros(6), torch.zeros(6)
    for _ in range(2000):
        pairs = [(3, None), (1, None)] if lookup else [choice.propose(row) for row in proposed]
        draft, distributions = zip(*pairs, strict=True)
        kept = choice.verify(target, draft, distributions)
        assert kept[:-1] == list(draft[: len(kept) - 1])
        first[kept[0]] += 1
        if len(kept) > 1:
            second[kept[1]] += 1
    assert chi_square(first, expected[0]) < 5 and not first[expected[0] == 0].any()
    assert second.sum() > 100 and chi_square(second, expected[1]) < 5


def test_sampled_texts_have_the_distribution_of_the_model():
    """All texts of three tokens, with a draft that knows another distribution."""
    sizes = {"vocab_size": 4, "hidden_size": 8, "state_size": 8, "num_hidden_layers": 1}
    torch.manual_seed(5)
    model, draft = (
        AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).eval() for _ in range(2)
    )
    prompt, generator = torch.tensor([[2]]), torch.Generator().manual_seed(0)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(64, 1), texts[:, :2]], 1)).logits
    probabilities = logits.double().log_softmax(-1).gather(2, texts[..., None])[..., 0].sum(1).exp()
    counts = torch.zeros(64)
    options = {"do_sample": True, "max_new_tokens": 3, "draft_tokens": 2, "eos_token_id": None, "generator": generator}
    for _ in range(600):
        output = generate_speculative(model, prompt, draft=draft, **options)
        first, second, third = output.sequences[0, 1:].tolist()
        counts[16 * first + 4 * second + third] += 1
    assert chi_square(counts, probabilities) < 5


def test_sampling_is_reproducible():
    model = tiny_model("memora", torch.float64)
    draft = similar_model(model)
    first, second, other = (
        generate_speculative(
            model,
            PROMPT,
            draft=draft,
            do_sample=True,
            max_new_tokens=20,
            generator=torch.Generator().manual_seed(seed),
        ).sequences
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_probabilities_follow_transformers():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = torch.randn(5, 40, dtype=torch.float64) * 3
    scores = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(12)(None, TemperatureLogitsWarper(0.7)(None, logits)))
    torch.testing.assert_close(Sampling(0.7, 12, 0.8).probabilities(logits), scores.softmax(-1))


def test_draw_takes_no_impossible_token():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    uniform = torch.tensor([0.0, 0.2999, 0.3001, 1 - 2**-53])
    found = [draw(weights, number[None]).item() for number in uniform.double()]
    assert found == [1, 1, 3, 3]


def test_lookup_finds_the_last_occurrence():
    draft = PromptLookup()
    draft.begin(torch.tensor([list(b"for item in things: one; for item in words: ")]))
    assert draft.propose(3, None) == ([], [])
    draft.accept(list(b"for item in "))
    assert bytes(draft.propose(5, None)[0]) == b"words"
    draft.accept(list(b"-" * 9))
    assert bytes(draft.propose(4, None)[0]) == b"----"


def test_greedy_keeps_one_more_than_it_accepts():
    logits = torch.eye(4)[[2, 0, 3]]
    assert GreedyChoice().verify(logits, [2, 0], [None, None]) == [2, 0, 3]
    assert GreedyChoice().verify(logits, [2, 1], [None, None]) == [2, 0]
    assert GreedyChoice().verify(logits, [1, 0], [None, None]) == [2]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"input_ids": PROMPT.repeat(2, 1)}, r"`input_ids` has shape \(2, 9\); it must be \(1, T\)"),
        ({"input_ids": PROMPT[:, :0]}, "T ≥ 1"),
        ({"draft": "lookup"}, "`draft` is 'lookup'"),
        ({"draft_state": {}}, "'prompt-lookup' has no state"),
        ({"draft_tokens": 0}, "`draft_tokens` is 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        ({"do_sample": True, "temperature": 0.0}, "`temperature` is 0"),
        ({"do_sample": True, "top_p": 1.5}, "`top_p` is 1.5"),
        ({"do_sample": True, "top_k": -1}, "`top_k` is -1"),
    ],
)
def test_arguments_are_checked(options, message):
    arguments = {"input_ids": PROMPT, "draft": "prompt-lookup"} | options
    with pytest.raises(ValueError, match=message):
        generate_speculative(tiny_model("memora"), **arguments)


def test_models_are_checked():
    model = tiny_model("memora")
    stock = AutoModelForCausalLM.from_config(
        config_from_preset("llama-s0", hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    )
    with pytest.raises(TypeError, match="`model` is a LlamaForCausalLM, which has no recurrent state"):
        generate_speculative(stock, PROMPT, draft=model)
    with pytest.raises(TypeError, match="`draft` is a LlamaForCausalLM"):
        generate_speculative(model, PROMPT, draft=stock)
    with pytest.raises(ValueError, match="`draft` has a vocabulary of 7; it must be as in the model, 256"):
        generate_speculative(model, PROMPT, draft=tiny_model("memora", vocab_size=7))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_do_not_learn_what_the_model_has_chosen(dtype):
    """Drafts are read in blocks; their bytes are mixed, but not learned, as in `generate()`."""
    corpus = word_corpus((1, 40, 90, 60))
    model = counted_model(corpus, documents=(2, 3)).to(dtype)
    prompt = torch.tensor(corpus[2][:200]).long()[None]
    expected = plain(model, prompt, max_new_tokens=60)
    for draft in ("prompt-lookup", model):
        output = generate_speculative(model, prompt, draft=draft, max_new_tokens=60, eos_token_id=None)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.accepted > 20
        last = model(output.sequences[:, -1:], state=output.pending_state, sampled=True)
        for state in (output.state, last.state):
            assert torch.equal(state["count_memory"], expected.state["count_memory"])
