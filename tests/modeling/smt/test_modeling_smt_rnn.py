"""SMT's RNNs: every update against its definition, the readout, unrolling, the transfer from a teacher, bad input."""

import math

import pytest
import torch
from model_cases import relative_difference
from smt_reference import memory_norm, transformer
from torch import nn

from hf_recurrent import SmtRnnConfig, SmtRnnForCausalLM, SmtTeacherModel, config_from_preset

SIZES = {"hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2}
each_backbone = pytest.mark.parametrize("backbone", ["transformer", "mlp", "gru"])
each_memory_size = pytest.mark.parametrize("memory_size", [None, 2])


def student(dtype: torch.dtype = torch.float64, **overrides) -> SmtRnnForCausalLM:
    torch.manual_seed(0)
    return SmtRnnForCausalLM(config_from_preset("smt-rnn-tiny", **SIZES | overrides)).to(dtype).eval()


def teacher(dtype: torch.dtype = torch.float64, **overrides) -> SmtTeacherModel:
    torch.manual_seed(1)
    return SmtTeacherModel(config_from_preset("smt-teacher-tiny", **SIZES | overrides)).to(dtype).eval()


def memories(model, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    shape = (*shape, model.config.num_memory_tokens, model.config.memory_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(3))


@each_memory_size
def test_transformer_update_is_that_of_the_paper(memory_size):
    model = student(memory_size=memory_size)
    update, memory, ids = model.model.memory_update, memories(model, 4), tokens(4)
    for row in range(4):
        hidden = memory[row] if memory_size is None else memory[row] @ update.memory_in.weight.T
        hidden = torch.stack([*hidden, model.model.embed_tokens.weight[ids[row]]])
        hidden = transformer(update.transformer, hidden, lambda i, j: True, model.config)[:3]
        hidden = hidden if memory_size is None else hidden @ update.memory_out.weight.T
        torch.testing.assert_close(model.update(memory, ids)[row], memory_norm(hidden), rtol=1e-10, atol=1e-10)


@each_memory_size
def test_mlp_update_flattens_memory_and_input(memory_size):
    model = student(backbone="mlp", memory_size=memory_size, num_hidden_layers=3)
    update, memory, ids = model.model.memory_update, memories(model, 4), tokens(4)
    joined = torch.cat([memory.flatten(1), model.model.embed_tokens(ids)], dim=1)
    maps = [torch.cat([update.memory_proj.weight, update.input_proj.weight], dim=1)]
    maps += [projection.weight for projection in update.hidden_proj]
    assert len(maps) == 3
    for weight in maps:
        joined = nn.functional.gelu(memory_norm(joined @ weight.T))
    expected = memory_norm((joined @ update.out_proj.weight.T).view(memory.shape))
    torch.testing.assert_close(model.update(memory, ids), expected, rtol=1e-10, atol=1e-10)


@each_memory_size
def test_gru_update_is_a_stacked_gru_with_a_token_a_layer(memory_size):
    model = student(backbone="gru", memory_size=memory_size)
    cells, memory, ids = model.model.memory_update.cells, memories(model, 4), tokens(4, 6)
    layers = []  # torch wants every layer of a stacked GRU of one width; the lowest reads the embedding here
    for cell in cells:
        layer = nn.GRU(cell.input_size, cell.hidden_size, batch_first=True).double()
        layer.load_state_dict({f"{name}_l0": weight for name, weight in cell.state_dict().items()})
        layers.append(layer)
    below, expected = model.model.embed_tokens(ids), []
    for layer, token in zip(layers, memory.unbind(1), strict=True):
        below, _ = layer(below, token.unsqueeze(0).contiguous())
        expected.append(below)
    torch.testing.assert_close(model.unroll(memory, ids), torch.stack(expected, dim=2), rtol=1e-10, atol=1e-10)
    assert model.config.num_hidden_layers == model.config.num_memory_tokens


@pytest.mark.parametrize("causal", [True, False])
@each_memory_size
def test_readout_is_a_transformer_whose_last_memory_token_predicts(causal, memory_size):
    model = student(causal_readout=causal, memory_size=memory_size)
    decoder, memory = model.model.decoder, memories(model, 2)
    for row in range(2):
        hidden = memory[row] if memory_size is None else memory[row] @ decoder.memory_proj.weight.T
        hidden = transformer(decoder.transformer, hidden, lambda i, j: not causal or j <= i, model.config)
        expected = model.lm_head(memory_norm(hidden[-1]) * decoder.norm.weight)
        torch.testing.assert_close(model.readout(memory)[row], expected, rtol=1e-10, atol=1e-10)


@each_backbone
def test_forward_is_update_after_update_and_the_readout_of_each_memory(backbone):
    model = student(backbone=backbone)
    ids, reset_mask = tokens(2, 7), torch.zeros(2, 7, dtype=torch.bool)
    reset_mask[1, 4] = True
    memory, logits = torch.zeros(2, 3, 16, dtype=torch.float64), []
    for step in range(7):
        memory = model.update(memory * ~reset_mask[:, step, None, None], ids[:, step])
        logits.append(model.readout(memory))
    output = model(ids, reset_mask=reset_mask, output_hidden_states=True)
    torch.testing.assert_close(output.logits, torch.stack(logits, dim=1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output.state["memory"], memory, rtol=1e-10, atol=1e-10)
    unrolled = model.unroll(torch.zeros_like(memory), ids, reset_mask)
    torch.testing.assert_close(unrolled[:, -1], memory, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.readout(unrolled), output.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert len(output.hidden_states) == model.config.num_readout_layers + 1


@each_backbone
def test_any_leading_dimensions_are_rows(backbone):
    model = student(backbone=backbone)
    memory, ids = memories(model, 2, 5), tokens(2, 5)
    together = model.update(memory, ids)
    assert together.shape == memory.shape
    alone = torch.stack([model.update(memory[:, step], ids[:, step]) for step in range(5)], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    logits = torch.stack([model.readout(memory[:, step]) for step in range(5)], dim=1)
    torch.testing.assert_close(model.readout(memory), logits, rtol=1e-12, atol=1e-12)


def test_only_the_steps_asked_for_are_read_out_in_one_batch():
    model, rows = student(), []
    model.model.decoder.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for logits_to_keep, count in ((0, 24), (1, 2), (torch.tensor([0, 3, 5]), 6)):
        model(tokens(2, 12), logits_to_keep=logits_to_keep)
        assert rows.pop() == count and not rows
    model.generate(tokens(2, 12), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert rows == [2, 2, 2], "a prompt is read out at its end only"


def test_a_memory_is_normalised_and_lives_in_float32():
    for dtype in (torch.bfloat16, torch.float32):
        model = student(dtype)
        memory = model.update(memories(model, 4), tokens(4))
        assert memory.dtype == torch.float32
        torch.testing.assert_close(memory.square().mean(-1), torch.ones(4, 3), rtol=1e-3, atol=0)
    free = student(memory_norm=False)
    assert not torch.allclose(free.update(memories(free, 4), tokens(4)).square().mean(-1), torch.tensor(1.0).double())
    assert student(backbone="gru").config.memory_norm is False


def test_a_state_holds_no_more_than_itself():
    memory = student()(tokens(2, 30)).state["memory"]
    assert memory.untyped_storage().nbytes() == memory.nbytes, "a view would keep all the memories before it"


@each_backbone
def test_gradient_checkpointing_keeps_one_memory_in_every_root_t(backbone):
    model = student(backbone=backbone).train()
    model.gradient_checkpointing_enable()
    starts, original = [], model.model._unroll_chunk
    model.model._unroll_chunk = lambda *args: starts.append(args[1].shape[1]) or original(*args)
    model.unroll(memories(model, 2), tokens(2, 30)).sum().backward()
    assert starts[:5] == [6] * 5, "forward"
    assert starts[5:] == [6] * 5, "and once more, backwards"


@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_gradient_checkpointing_for_any_length(length):
    model = student().train()

    def gradients():
        model.zero_grad()
        model.unroll(memories(model, 2), tokens(2, length)).square().sum().backward()
        return [p.grad for p in model.model.memory_update.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for actual, gradient in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


@each_backbone
@each_memory_size
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_after_the_transfer_the_first_prediction_is_the_teachers(backbone, memory_size, dtype, tolerance):
    model, oracle = student(dtype, backbone=backbone, memory_size=memory_size), teacher(dtype, memory_size=memory_size)
    memory, future = memories(model, 8), tokens(8, 5)
    expected = oracle.decode(memory, future)[:, 0]
    assert relative_difference(model.readout(memory), expected) > 0.1
    update = {name: weight.clone() for name, weight in model.model.memory_update.state_dict().items()}
    model.load_readout(oracle)
    assert relative_difference(model.readout(memory), expected) <= tolerance
    for name, weight in model.model.memory_update.state_dict().items():
        assert torch.equal(weight, update[name]), name
    assert model.lm_head.weight.data_ptr() != oracle.lm_head.weight.data_ptr(), "copied, not shared"


def test_a_teacher_that_does_not_match_is_refused_with_every_difference_named():
    model = student()
    with pytest.raises(
        ValueError, match=r"is 16 and the teacher's `hidden_size` 32; `memory_size`.*`intermediate_size`"
    ):
        model.load_readout(teacher(hidden_size=32))
    with pytest.raises(ValueError, match="`num_readout_layers` is 2 and the teacher's `num_decoder_layers` 3"):
        model.load_readout(teacher(num_decoder_layers=3))
    with pytest.raises(ValueError, match="`tie_word_embeddings` is True"):
        student(tie_word_embeddings=True).load_readout(teacher())


@each_backbone
def test_initialisation_keeps_the_scale_of_memory_and_input(backbone):
    model = student(torch.float32, backbone=backbone, hidden_size=128, num_attention_heads=4)
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(1, rel=0.03)
    scaled = student(torch.float32, backbone=backbone, hidden_size=128, num_attention_heads=4, initializer_range=0.3)
    for name, weight in scaled.model.memory_update.named_parameters():
        if weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.3, rel=0.03), name
    for name, weight in model.model.memory_update.named_parameters():
        if weight.dim() == 2:
            depth = 2 * model.config.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            expected = 1 / math.sqrt(depth * weight.shape[1])
            assert weight.std().item() == pytest.approx(expected, rel=0.03), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backbone": "lstm"}, "`backbone` is 'lstm'; it must be one of transformer, mlp, gru"),
        ({"backbone": "gru", "memory_norm": True}, "`memory_norm` is True.*residual"),
        ({"num_memory_tokens": 0}, "`num_memory_tokens` is 0"),
        ({"memory_size": 0}, "`memory_size` is 0"),
        ({"num_attention_heads": 3}, "`hidden_size` is 256 and `num_attention_heads` 3"),
        ({"hidden_size": 24}, "`hidden_size` is 24 and `num_attention_heads` 8.*even"),
        ({"num_readout_layers": 0}, "`num_readout_layers` is 0"),
        ({"pooling": "max"}, "`pooling` is 'max'"),
        ({"norm_eps": 0.0}, "`norm_eps` is 0.0"),
        ({"initializer_range": -1.0}, "`initializer_range` is -1.0"),
    ],
)
def test_bad_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SmtRnnConfig(**fields)


def test_bad_memories_and_inputs_are_named():
    model = student()
    with pytest.raises(ValueError, match=r"`memory` has shape \(2, 4, 16\); it must be \(…, 3, 16\)"):
        model.update(torch.zeros(2, 4, 16), tokens(2))
    with pytest.raises(ValueError, match=r"`memory` has shape \(3, 16\)"):
        model.readout(torch.zeros(3, 16))
    with pytest.raises(ValueError, match=r"`input_ids` has shape \(2, 1\), but there are \(2,\) memories"):
        model.update(torch.zeros(2, 3, 16), tokens(2, 1))
    with pytest.raises(ValueError, match="`reset_mask` has shape"):
        model.unroll(torch.zeros(3, 3, 16), tokens(3, 5), torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`state\['memory'\]` has shape \(2, 3, 16\).*\(3, 3, 16\)"):
        model.unroll(torch.zeros(2, 3, 16), tokens(3, 5))
