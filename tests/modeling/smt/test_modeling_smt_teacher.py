"""SMT's teacher: encoder and decoder against their definitions, padding, causality, loss, saving, bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from smt_reference import memory_norm, transformer
from transformers import AutoConfig, AutoModel

from hf_recurrent import SmtTeacherConfig, SmtTeacherModel, config_from_preset

SIZES = {"hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2}
each_memory_size = pytest.mark.parametrize("memory_size", [None, 2])


def teacher(dtype: torch.dtype = torch.float64, **overrides) -> SmtTeacherModel:
    torch.manual_seed(0)
    return SmtTeacherModel(config_from_preset("smt-teacher-tiny", **SIZES | overrides)).to(dtype).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(seed))


@each_memory_size
def test_encoder_is_that_of_the_paper(memory_size):
    model, ids = teacher(memory_size=memory_size), tokens(2, 5)
    encoder = model.encoder
    for row in range(2):
        sequence = torch.cat([model.embed_tokens(ids[row]), encoder.registers.weight])
        # Attention sees differences of positions: where the sequence starts is of no account.
        registers = transformer(encoder.transformer, sequence, lambda i, j: True, model.config, first_position=9)[5:]
        registers = registers if memory_size is None else registers @ encoder.memory_proj.weight.T
        torch.testing.assert_close(model.encode(ids)[row], memory_norm(registers), rtol=1e-10, atol=1e-10)


@each_memory_size
def test_decoder_is_that_of_the_paper(memory_size):
    model, future = teacher(memory_size=memory_size), tokens(2, 4)
    decoder, memory = model.decoder, model.encode(tokens(2, 5))
    logits = model.decode(memory, future)
    assert logits.shape == (2, 4, 256)
    for row in range(2):
        hidden = memory[row] if memory_size is None else memory[row] @ decoder.memory_proj.weight.T
        sequence = torch.cat([hidden, model.embed_tokens(future[row])])
        outputs = transformer(decoder.transformer, sequence, lambda i, j: j <= i, model.config)
        outputs = memory_norm(outputs) * decoder.norm.weight
        # Position M - 1 + i has seen the memory and i inputs.
        torch.testing.assert_close(logits[row], model.lm_head(outputs[2:6]), rtol=1e-10, atol=1e-10)


def test_a_prediction_sees_the_memory_and_the_inputs_before_it():
    model = teacher()
    memory, future = model.encode(tokens(1, 5)), tokens(1, 6)
    logits = model.decode(memory, future)
    for changed in range(6):
        other = future.clone()
        other[0, changed] = 0
        same = (model.decode(memory, other) == logits).all(-1)[0]
        assert same.tolist() == [i <= changed for i in range(6)]
    assert ((model.decode(memory.flip(1), future) - logits).abs().amax(-1) > 1e-6).all()


def test_the_last_input_is_not_read():
    model = teacher()
    model.embed_tokens.weight.data[7] = torch.nan
    future = tokens(2, 4)
    future[:, -1] = 7
    assert torch.isfinite(model.decode(torch.zeros(2, 3, 16), future)).all()


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 12), padding=st.integers(1, 9), seed=st.integers(0, 100))
def test_left_padding_changes_no_memory(length, padding, seed):
    model, ids = teacher(), tokens(2, length, seed=seed)
    padded = torch.cat([tokens(2, padding, seed=seed + 1), ids], dim=1)
    mask = torch.cat([torch.zeros(2, padding, dtype=torch.long), torch.ones(2, length, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model.encode(padded, mask), model.encode(ids), rtol=1e-11, atol=1e-11)


def test_left_padding_in_single_precision_and_at_the_papers_length():
    model, ids = teacher(torch.float32), tokens(1, 6)
    padded = torch.cat([tokens(1, 250), ids], dim=1)
    torch.testing.assert_close(
        model.encode(padded, torch.arange(256)[None] >= 250), model.encode(ids), rtol=0, atol=1e-4
    )


def test_a_context_that_is_padding_only_has_the_memory_of_the_registers():
    model = teacher()
    mask = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]])
    memory = model.encode(tokens(2, 4), mask)
    registers = transformer(model.encoder.transformer, model.encoder.registers.weight, lambda i, j: True, model.config)
    torch.testing.assert_close(memory[0], memory_norm(registers), rtol=1e-10, atol=1e-10)
    model.zero_grad()
    memory.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.encoder.parameters())


def test_the_loss_is_the_mean_over_the_targets_given():
    model = teacher()
    context, future, labels = tokens(3, 5), tokens(3, 4), tokens(3, 4, seed=2)
    labels[0, 1:], labels[2] = -100, -100
    output = model(context, future_ids=future, labels=labels)
    expected = [
        -torch.log_softmax(output.logits[row, step], -1)[labels[row, step]]
        for row in range(3)
        for step in range(4)
        if labels[row, step] >= 0
    ]
    assert len(expected) == 5
    torch.testing.assert_close(output.loss, sum(expected) / 5)
    summed = model(context, future_ids=future, labels=labels, num_items_in_batch=10).loss
    torch.testing.assert_close(summed, output.loss / 2)
    plain = model(context, future_ids=future, labels=labels, return_dict=False)
    assert torch.equal(plain[1], output.logits) and torch.equal(plain[2], output.memory)
    alone = model(context)
    assert alone.logits is None and torch.equal(alone.memory, output.memory)


def test_one_embedding_serves_encoder_and_decoder_and_learns_from_both():
    model = teacher()
    context, future = torch.full((1, 3), 5), torch.full((1, 3), 9)
    model(context, future_ids=future, labels=tokens(1, 3)).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert set(gradient.abs().sum(1).nonzero().flatten().tolist()) == {5, 9}


def test_gradient_checkpointing_changes_no_gradient():
    model = teacher().train()
    arguments = {"context_ids": tokens(2, 6), "future_ids": tokens(2, 4), "labels": tokens(2, 4, seed=2)}
    arguments["context_mask"] = torch.arange(6).expand(2, 6) >= torch.tensor([[2], [0]])

    def gradients():
        model.zero_grad()
        model(**arguments).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_keeps_the_memory_in_float32(how):
    exact, model = teacher(torch.float32), teacher(torch.bfloat16 if how == "weights" else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        output = model(tokens(2, 6), future_ids=tokens(2, 4))
    assert output.memory.dtype == torch.float32 and output.logits.dtype == torch.bfloat16
    expected = exact(tokens(2, 6), future_ids=tokens(2, 4))
    assert (output.memory - expected.memory).abs().max() < 0.15
    assert (output.logits.float() - expected.logits).abs().max() < 0.3


@pytest.mark.parametrize("tie", [False, True])
def test_saving_and_resizing(tie, tmp_path):
    model = teacher(torch.float32, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tie)
    assert {path.name for path in tmp_path.glob("*.py")} >= {"modeling_smt_teacher.py", "recurrent_shared.py"}
    assert type(AutoConfig.from_pretrained(tmp_path)) is SmtTeacherConfig
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = model(tokens(2, 6), future_ids=tokens(2, 4)).logits
    assert torch.equal(loaded.eval()(tokens(2, 6), future_ids=tokens(2, 4)).logits, expected)
    loaded.resize_token_embeddings(260)
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == tie
    assert loaded(tokens(2, 6), future_ids=torch.full((1, 2), 259).expand(2, 2)).logits.shape == (2, 2, 260)


def test_bad_input_is_named():
    model, ids = teacher(), tokens(2, 4)
    with pytest.raises(ValueError, match="padding after a real position in row 1; contexts are padded on the left"):
        model.encode(ids, torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]))
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(2, 3\)"):
        model.encode(ids, torch.ones(2, 3))
    with pytest.raises(ValueError, match="`input_ids` holds 256"):
        model.encode(torch.full((1, 2), 256))
    with pytest.raises(ValueError, match=r"`memory` has shape \(1, 3, 16\); these inputs need \(2, 3, 16\)"):
        model.decode(torch.zeros(1, 3, 16), ids)
    with pytest.raises(ValueError, match="T ≥ 1"):
        model.decode(torch.zeros(2, 3, 16), ids[:, :0])
    with pytest.raises(ValueError, match="`labels` are given without `future_ids`"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="`num_decoder_layers` is 0"):
        SmtTeacherConfig(num_decoder_layers=0)
