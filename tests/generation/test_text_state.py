"""Texts are read and continued in pieces as at once, and saved with the hash of their model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset, save_state
from hf_recurrent.generation.text_state import continue_texts, load_text_state, read_texts, save_text_state

GREEDY = {"do_sample": False}
SIZES = {"hidden_size": 32, "state_size": 48, "num_hidden_layers": 2}
BOOK = "".join(f"{number}: the quick brown fox jumps over the lazy dog.\n" for number in range(200))


def build(family: str, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    # With a tied embedding, an untrained model says the last byte again and again.
    options = SIZES | {"tie_word_embeddings": False} | overrides
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **options)).eval()


@pytest.fixture(scope="module", params=["memora", "hawk"])
def model(request):
    return build(request.param)


def ids(text: str) -> np.ndarray:
    return ByteTokenizer().encode_bytes(text.encode())


def test_reading_in_chunks_is_reading_at_once(model):
    texts = [ids(BOOK[:100]), ids("a"), ids(BOOK[50:87])]
    whole = read_texts(model, texts)
    for chunk in (1, 7, 64):
        part = read_texts(model, texts, chunk=chunk)
        assert part.pending == whole.pending == [int(text[-1]) for text in texts]
        for name, tensor in whole.state.items():
            torch.testing.assert_close(part.state[name], tensor, rtol=1e-4, atol=1e-5)


def test_reading_on_is_reading_at_once(model):
    texts = [ids(BOOK[:100]), ids(BOOK[30:60])]
    whole = read_texts(model, texts)
    parts = read_texts(model, [texts[0][:40], texts[1]])
    parts = read_texts(model, [texts[0][40:], texts[1][:0]], parts, chunk=9)
    # The second text got no new token: its pending one is not fed, it stays as it was.
    assert parts.pending == whole.pending
    for name, tensor in whole.state.items():
        torch.testing.assert_close(parts.state[name], tensor, rtol=1e-4, atol=1e-5)


def test_two_runs_joined_are_one(model, tmp_path):
    texts = [ids(BOOK[:100]), ids("x")]
    start = read_texts(model, texts)
    whole, _ = continue_texts(model, start, max_new_tokens=40, eos_token_id=None, **GREEDY)
    first, text = continue_texts(model, start, max_new_tokens=15, eos_token_id=None, **GREEDY)
    save_text_state(model, text, tmp_path / "text.safetensors")
    text = load_text_state(model, tmp_path / "text.safetensors")
    second, _ = continue_texts(model, text, max_new_tokens=25, eos_token_id=None, **GREEDY)
    for row in range(2):
        assert torch.cat([first[row], second[row]]).tolist() == whole[row].tolist()
        assert len(set(whole[row].tolist())) > 1


def test_generation_equals_feeding_everything_again(model):
    prompt = ids(BOOK[:60])
    new, _ = continue_texts(model, read_texts(model, [prompt]), max_new_tokens=12, **GREEDY)
    text = torch.from_numpy(prompt.astype(np.int64))[None]
    for token in new[0]:
        with torch.no_grad():
            assert int(model(text).logits[0, -1].argmax()) == int(token)
        text = torch.cat([text, token.view(1, 1)], dim=1)


def test_beams_leave_the_state_of_the_best(model):
    start = read_texts(model, [ids(BOOK[:60]), ids("ab")])
    new, after = continue_texts(model, start, max_new_tokens=10, num_beams=3, eos_token_id=None, **GREEDY)
    again = read_texts(model, [row.numpy() for row in new], start)
    assert after.pending == again.pending
    for name, tensor in again.state.items():
        torch.testing.assert_close(after.state[name], tensor)


def test_an_ended_text_stays_and_a_prompt_begins_anew(model):
    start = read_texts(model, [ids(BOOK[:100]), ids("x")])
    plain, _ = continue_texts(model, start, max_new_tokens=6, **GREEDY)
    end = int(plain[0][2])
    previous = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = end
    try:
        new, text = continue_texts(model, start, max_new_tokens=6, pad_token_id=0, **GREEDY)
    finally:
        model.generation_config.eos_token_id = previous
    first_end = plain[0].tolist().index(end)
    assert new[0].tolist() == plain[0][: first_end + 1].tolist()
    assert text.pending[0] is None and not any(tensor[0].any() for tensor in text.state.values())
    more, still = continue_texts(model, text, max_new_tokens=3, eos_token_id=None, **GREEDY)
    assert len(more[0]) == 0 and still.pending[0] is None
    fresh = read_texts(model, [ids("again"), ids("on")], still)
    for name, tensor in read_texts(model, [ids("again")]).state.items():
        torch.testing.assert_close(fresh.state[name][:1], tensor, rtol=1e-4, atol=1e-5)


def test_a_state_of_another_model_or_a_damaged_one_is_refused(model, tmp_path):
    path = tmp_path / "text.safetensors"
    save_text_state(model, read_texts(model, [ids("hello")]), path)
    family = model.config.model_type
    with pytest.raises(ValueError, match="belongs to other weights; a state works only with the model that saved it"):
        load_text_state(build(family, seed=1), path)
    with pytest.raises(ValueError, match="belongs to other weights"):
        load_text_state(build(family, num_hidden_layers=1), path)
    save_state(model.init_state(1), path, model)
    with pytest.raises(ValueError, match="is not the state of a text; it must be written by `--save_state`"):
        load_text_state(model, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        load_text_state(model, path)
    with pytest.raises(FileNotFoundError, match="no saved state"):
        load_text_state(model, tmp_path / "none.safetensors")
