"""A stock model with a state of plain tensors does what it does with its own cache, bit for bit."""

import copy

import pytest
import torch
from cached_cases import ATTENTION, FAMILIES, cached_model
from transformers import LlamaConfig, LlamaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

from hf_recurrent.server.state_packing import StatePacking
from hf_recurrent.stock_models.caches import CachedModel, UnsupportedCache

PROMPT = [5, 9, 200, 31, 8, 77, 12, 45, 66, 100, 3]
# The others take longer to import.
QUICK = ("mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm", "bamba")
families = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in FAMILIES]
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def generated(model, prompt, count, **options):
    """Tokens and logits of the model's own `generate`, of a copy, because RecurrentGemma keeps states on itself."""
    output = copy.deepcopy(model).generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


@torch.no_grad()
def stepped(cached, prompt, count, packing=None):
    """The same from single steps; with a packing, every state goes through plain bytes."""
    state, tokens, logits = cached.zero, [*prompt], []
    for number in range(len(prompt) + count - 1):
        found, state = cached.forward(torch.tensor([tokens[number : number + 1]]), state)
        if packing is not None:
            state = packing.unpack(packing.pack(state))
        if number >= len(prompt) - 1:
            logits.append(found[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits), state


@families
def test_steps_equal_generate(family):
    model = cached_model(family)
    one, whole = generated(model, [7], 30), generated(model, PROMPT, 30)
    cached = CachedModel(model)
    assert cached.adapter.has_attention == (family in ATTENTION)
    tokens, logits, state = stepped(cached, [7], 30)
    assert tokens == one[0] and torch.equal(logits, one[1])  # bit for bit
    again, same, _ = stepped(cached, [7], 30, StatePacking(cached.zero))
    assert again == tokens and torch.equal(same, logits)
    # A longer prompt is one block for `generate`, whose last bits differ.
    tokens, logits, _ = stepped(cached, PROMPT, 30)
    assert tokens == whole[0]
    torch.testing.assert_close(logits, whole[1], rtol=1e-4, atol=1e-4)
    cached.check_state(state)


@pytest.mark.long
@pytest.mark.parametrize("family", [*sorted(ATTENTION - {"recurrent_gemma"})])
def test_steps_equal_generate_that_reads_its_prompt_token_by_token(family):
    model = cached_model(family)
    tokens, logits = generated(model, PROMPT, 20, prefill_chunk_size=1)
    found = stepped(CachedModel(model), PROMPT, 20)
    assert found[0] == tokens and torch.equal(found[1], logits)


@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma", "bamba"])
def test_a_step_leaves_its_state_unchanged(family):
    cached = CachedModel(cached_model(family))
    _, _, state = stepped(cached, PROMPT, 2)
    before = {name: part.clone() for name, part in state.items()}
    with torch.no_grad():
        first, _ = cached.forward(torch.tensor([[4]]), state)
        second, _ = cached.forward(torch.tensor([[4]]), state)
    assert torch.equal(first, second)
    assert all(torch.equal(part, before[name]) for name, part in state.items())


def test_blocks_are_read_where_stock_code_or_ours_goes_on_from_a_state():
    expected = {family: family not in ("recurrent_gemma", "jamba") for family in (*QUICK, "falcon_mamba")}
    assert {family: CachedModel(cached_model(family)).continues_blocks for family in expected} == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@families
@torch.no_grad()
def test_blocks_equal_single_steps(family, dtype):
    model = cached_model(family).to(dtype)
    model.set_experts_implementation("eager")  # the others take no float64
    cached = CachedModel(model)
    sizes = (4, 1, 3, 3) if cached.continues_blocks else (4, 1, 1)
    tokens, begin, one, many = torch.tensor([PROMPT]), 0, cached.zero, cached.zero
    for size in sizes:
        piece = tokens[:, begin : begin + size]
        begin += size
        found, many = cached.forward(piece, many)
        expected = []
        for column in range(size):
            logits, one = cached.forward(piece[:, column : column + 1], one)
            expected.append(logits)
        if dtype == torch.float64:  # some stock code computes in float32 inside
            torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)
        cached.check_state(many)
        assert {name: (part.shape, part.dtype) for name, part in many.items()} == {
            name: (part.shape, part.dtype) for name, part in one.items()
        }


def test_a_model_that_is_not_recurrent_is_refused():
    config = LlamaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(UnsupportedCache, match="its only memory is the keys and values of attention"):
        CachedModel(LlamaForCausalLM(config))


def test_a_cache_of_another_class_is_refused():
    config = MiniMaxConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedCache, match="its cache cannot be taken apart: MiniMax uses"):
        CachedModel(MiniMaxForCausalLM(config).eval())


def test_states_of_another_layout_are_refused():
    cached = CachedModel(cached_model("bamba"))
    _, _, state = stepped(cached, PROMPT, 2)
    wrong = {
        "is not a number of tokens": state | {"position": state["position"].float()},
        "has the parts": {name: part for name, part in state.items() if name != "layers.1.keys"},
        "has shape": state | {"layers.1.keys": state["layers.1.keys"][:, :, 1:]},
        "needs": state | {"layers.0.conv.0": state["layers.0.conv.0"].double()},
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            cached.check_state(changed)
