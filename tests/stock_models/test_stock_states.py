"""Stock models with a state: any cut, resets and padding equal the stock class on whole episodes, in float64."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from stock_cases import CASES, Float64, stock_model
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_recurrent import select_state, with_state
from hf_recurrent.modeling.block.recurrent_state import detach_state

CUTS = (1, 1, 30, 2, 66, 10)  # more than a chunk, single steps, and less than the taps
STEPS = sum(CUTS)


@pytest.fixture(autouse=True)
def in_float64():
    with Float64():
        yield


@pytest.fixture(params=CASES)
def pair(request):
    """A stock model, and a copy of it with a state."""
    stock = stock_model(request.param).eval()
    return stock, with_state(copy.deepcopy(stock))


def random_ids(batch_size, steps=STEPS):
    return torch.randint(1, 256, (batch_size, steps), generator=torch.Generator().manual_seed(1))


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_close(found, expected, tolerance=1e-11):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= tolerance * max(tensor.abs().max(), 1e-3), name


def read(model, ids, cuts, resets=None, detach=False):
    state, logits, begin = model.init_state(len(ids)), [], 0
    for size in cuts:
        part = slice(begin, begin + size)
        output = model(ids[:, part], state=state, reset_mask=None if resets is None else resets[:, part])
        state = detach_state(output.state) if detach else output.state
        logits.append(output.logits)
        begin += size
    assert begin == ids.shape[1]
    return torch.cat(logits, dim=1), state


def backward(logits, ids):
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def test_any_cut_equals_the_stock_class_on_the_whole(pair):
    stock, model = pair
    ids = random_ids(2)
    expected = stock(ids, use_cache=False).logits
    backward(expected, ids)
    for cuts in (CUTS, (STEPS,)):
        model.zero_grad()
        logits, state = read(model, ids, cuts)
        assert_close({"logits": logits}, {"logits": expected})
        backward(logits, ids)
        assert_close(gradients(model), gradients(stock))
    assert {name: tensor.shape for name, tensor in state.items()} == model.state_shapes(2)
    assert all(
        tensor.dtype == torch.float64 and tensor.grad_fn is not None for tensor in state.values() if tensor.dim() > 2
    )


def test_gradients_reach_back_to_the_given_state(pair):
    model = pair[1]
    ids = random_ids(2, 12)
    _, state = read(model, ids[:, :6], (6,))
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.items() if name != "age"}
    model(ids[:, 6:], state=state | leaves).logits.square().sum().backward()
    # The normalizer of xLSTM acts only where it is above 1, and its maximum only scales both sides of a fraction.
    used = {name: leaf.grad for name, leaf in leaves.items() if not name.endswith(("normalizer", "maximum"))}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in used.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cuts", [CUTS, (STEPS,), (55, 55)])
def test_a_reset_anywhere_begins_a_new_episode(pair, cuts):
    stock, model = pair
    ids, resets = random_ids(2), torch.zeros(2, STEPS, dtype=torch.bool)
    starts = ((0, 1, 7, 9, 55, 90), (0, 32, 33, 100))
    expected, last_state = [], []
    for row, begins in enumerate(starts):
        resets[row, list(begins)] = True
        ends = (*begins[1:], STEPS)
        episodes = [ids[row : row + 1, begin:end] for begin, end in zip(begins, ends, strict=True)]
        expected.append(torch.cat([stock(episode, use_cache=False).logits for episode in episodes], dim=1))
        last_state.append(read(model, episodes[-1], (episodes[-1].shape[1],))[1])
    expected = torch.cat(expected)
    backward(expected, ids)
    logits, state = read(model, ids, cuts, resets)
    assert_close({"logits": logits}, {"logits": expected})
    backward(logits, ids)
    assert_close(gradients(model), gradients(stock))
    alone = {name: torch.cat([part[name] for part in last_state]) for name in last_state[0]}
    assert_close(state, alone)


def test_a_reset_at_the_first_step_forgets_that_stream_only(pair):
    model = pair[1]
    ids, more = random_ids(2, 9), random_ids(2, 5)
    _, state = read(model, ids, (9,))
    resets = torch.zeros(2, 5, dtype=torch.bool)
    resets[1, 0] = True
    mixed = model(more, state=state, reset_mask=resets)
    kept, fresh = model(more, state=state), model(more, state=model.init_state(2))
    assert torch.equal(mixed.logits[1], fresh.logits[1])
    assert_close({"row": mixed.logits[0]}, {"row": kept.logits[0]})
    assert (mixed.logits[1] - kept.logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_leaves_the_state_as_it_was(pair, side):
    model = pair[1]
    ids = random_ids(3, 20)
    lengths = (20, 2, 0)
    _, before = read(model, random_ids(3, 9), (9,))
    mask = torch.zeros(3, 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        places = {
            "left": range(20 - length, 20),
            "right": range(length),
            "inside": range(0, 20, max(20 // max(length, 1), 1)),
        }
        mask[row, list(places[side])[:length]] = 1
    output = model(ids, attention_mask=mask, state=before)
    for row, length in enumerate(lengths):
        own = {name: tensor[row : row + 1] for name, tensor in before.items()}
        if length:
            alone = model(ids[row, mask[row] > 0].unsqueeze(0), state=own)
            assert_close({"logits": output.logits[row, mask[row] > 0]}, {"logits": alone.logits[0]})
            own = alone.state
        assert_close({name: tensor[row : row + 1] for name, tensor in output.state.items()}, own)


def test_float32_agrees_with_the_whole_in_losses_and_gradients():
    stock = stock_model("mamba2", torch.float32)
    model = with_state(copy.deepcopy(stock))
    ids = random_ids(2, 512)
    for block_size in (64, 256):
        model.zero_grad()
        stock.zero_grad()
        backward(stock(ids, use_cache=False).logits, ids)
        backward(read(model, ids, [block_size] * (512 // block_size))[0], ids)
        assert_close(gradients(model), gradients(stock), 1e-4)


def test_detached_blocks_equal_the_whole_truncated_at_the_same_step(pair):
    """The second block's gradient is the whole sequence's, less what reaches its losses through the state between."""
    model = pair[1]
    ids = random_ids(2, 40)
    logits, _ = read(model, ids, (20, 20), detach=True)
    backward(logits, ids)
    truncated = gradients(model)
    model.zero_grad(set_to_none=True)
    # The same by hand: the whole's losses of each half, with the first half of the weights' uses held constant.
    frozen = copy.deepcopy(model).requires_grad_(False)
    _, state = read(frozen, ids[:, :20], (20,))
    halves = model(ids[:, :20], state=model.init_state(2)).logits, model(ids[:, 20:], state=state).logits
    backward(torch.cat(halves, dim=1), ids)
    assert_close(truncated, gradients(model))
    model.zero_grad(set_to_none=True)
    backward(read(model, ids, (40,))[0], ids)
    assert any((truncated[name] - gradient).abs().max() > 1e-6 for name, gradient in gradients(model).items())


def test_calls_without_a_state_stay_those_of_the_stock_class(pair, tmp_path):
    stock, model = pair
    ids = random_ids(1, 12)
    assert type(model).__name__ == type(stock).__name__ and isinstance(model, type(stock))
    assert torch.equal(model(ids, use_cache=False).logits, stock(ids, use_cache=False).logits)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert type(loaded) is type(stock) and not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.architectures == [type(stock).__name__]
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in stock.state_dict().items())
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    assert with_state(model) is model


def test_generation_from_a_state(pair):
    stock, model = pair
    ids = random_ids(1, 12)
    _, state = read(model, ids[:, :11], (11,))
    output = model.generate(
        ids[:, 11:], state=state, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, eos_token_id=None
    )
    expected = ids
    for _ in range(5):
        expected = torch.cat([expected, stock(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert output.sequences[0, 1:].tolist() == expected[0, 12:].tolist()
    assert_close(output.pending_state, read(model, expected[:, :-1], (16,))[1])
    assert_close(output.state, read(model, expected, (17,))[1])
    beams = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3, "eos_token_id": None}
    output = model.generate(ids[:, 11:], state=state, return_dict_in_generate=True, **beams)
    for row in range(2):
        text = torch.cat([ids[:, :11], output.sequences[row : row + 1]], dim=1)
        assert_close(select_state(output.state, row), read(model, text, (text.shape[1],))[1])
    with pytest.raises(ValueError, match="`state` is None; to begin a new text"):
        model.generate(ids, state=None)


def test_a_state_of_another_type_is_read_in_the_models_own(pair):
    _, model = pair
    ids = random_ids(2, 3)
    stored = {name: tensor.bfloat16() for name, tensor in model(ids, state=model.init_state(2)).state.items()}
    expected = model(ids, state={name: tensor.double() for name, tensor in stored.items()}).logits
    assert torch.equal(model(ids, state=stored).logits, expected)


def test_positions_of_packed_documents_are_resets(pair):
    model, ids = pair[1], random_ids(1, 12)
    resets = torch.zeros(1, 12, dtype=torch.bool)
    resets[0, [0, 5]] = True
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    expected = model(ids, reset_mask=resets)
    assert torch.equal(model(ids, state=model.init_state(1), position_ids=positions).logits, expected.logits)


def test_other_models_and_bad_input():
    llama = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    assert type(with_state(llama)) is type(llama) and not hasattr(llama, "init_state")
    model = with_state(stock_model("mamba"))
    assert with_state(model.backbone) is model.backbone  # without a head
    with pytest.raises(ValueError, match=r"`state` has no `layers.0.recurrent`"):
        model(random_ids(1, 3), state={})
    with pytest.raises(ValueError, match="`reset_mask` has shape"):
        model(random_ids(1, 3), reset_mask=torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="`input_ids` holds 300"):
        model(torch.tensor([[300]]), state=model.init_state(1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'reset_masks'"):
        model(random_ids(1, 3), state=model.init_state(1), reset_masks=torch.ones(1, 3))
    with pytest.raises(ValueError, match="`batch_size` is 0"):
        model.init_state(0)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="`gradient_checkpointing` is True"):
        model.train()(random_ids(1, 3), state=model.init_state(1))
    short = with_state(stock_model("xlstm", max_inference_chunksize=4)).eval()
    with pytest.raises(ValueError, match="at most 4"):
        short(random_ids(1, 5), state=short.init_state(1))
