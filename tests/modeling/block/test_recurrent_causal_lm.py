"""Checks that transformers runs on its own models: saving, tying, initialisation, hidden states, resizing,
checkpointing, training, compilation, adapters, memory."""

import copy
import gc
import weakref

import pytest
import torch
from model_cases import each_family, each_family_and_own_unit, relative_difference, tiny_config, tiny_model
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline, set_seed

from hf_recurrent import ByteTokenizer
from hf_recurrent.modeling.block.recurrent_blocks import Contraction


def batch(rows: int = 2, steps: int = 12) -> torch.Tensor:
    return torch.randint(1, 256, (rows, steps), generator=torch.Generator().manual_seed(0))


@each_family_and_own_unit
def test_configuration_round_trip(family, tmp_path):
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_json_string() == config.to_json_string()


def test_outputs_are_those_of_transformers():
    """[`RecurrentOutput`] stores its fields by itself."""
    model = tiny_model("memora")
    with torch.no_grad():
        for steps, fields in ((1, ["logits", "state"]), (3, ["logits", "state"])):
            output = model(batch(steps=steps))
            assert list(output) == list(dict(output.items())) == fields and len(output) == 2
            assert output["state"] is output.state and output[0] is output.logits is output.to_tuple()[0]
            assert output.loss is None and "loss" not in output
            again = torch.utils._pytree.tree_map(torch.clone, output)
            assert type(again) is type(output) and torch.equal(again.logits, output.logits)
            output.loss = torch.ones(())
            assert output["loss"] is output.loss and copy.copy(output).logits is output.logits
    output = model(batch(), labels=batch())
    assert list(output) == ["loss", "logits", "state"]
    again = type(output)(dict(output))  # as accelerate makes it
    assert list(again) == list(output) and again.loss is output.loss and again.state is output.state


@each_family_and_own_unit
def test_save_and_load_give_the_same_outputs(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(loaded.eval()(batch()).logits, model(batch()).logits)
    assert {weight.data_ptr() % 64 for weight in loaded.parameters()} == {0}  # lines of the cache


@each_family_and_own_unit
def test_the_base_model_loads_from_the_checkpoint_with_a_head(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path).eval()
    expected = model(batch(), output_hidden_states=True).hidden_states[-1]
    assert torch.equal(base(batch()).last_hidden_state, expected)


@each_family_and_own_unit
def test_embedding_and_head_are_tied_also_after_loading_and_resizing(family, tmp_path):
    model = tiny_model(family)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    loaded.resize_token_embeddings(260)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.vocab_size == 260
    assert loaded(torch.tensor([[259]])).logits.shape == (1, 1, 260)
    torch.testing.assert_close(loaded.lm_head.weight[:256], model.lm_head.weight)


@each_family_and_own_unit
def test_initialisation_is_the_published_one(family):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, hidden_size=200, state_size=300))
    layers = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, Contraction):
            expected = (2 * module.in_features * layers) ** -0.5
        elif isinstance(module, torch.nn.Linear):
            expected = module.in_features**-0.5
        else:
            continue
        assert module.weight.std().item() == pytest.approx(expected, rel=0.03), name
        biased = name != "lm_head" if family == "mgrade" else family == "lru" and ".glu." in name
        assert (module.bias is not None) == biased
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


@each_family_and_own_unit
def test_loading_initialises_only_what_is_missing(family, tmp_path):
    model = tiny_model(family)
    vectors = {
        "memora": "recurrent_unit.nu",
        "memora+leaky": "recurrent_unit.rate",
        "hawk": "recurrent_unit.recurrent_param",
        "mgrade": "convolution.weight",
        "lru": "recurrent_unit.nu",
        "smt-rnn": "memory_update.transformer.layers.0.attention.q_proj.weight",
    }
    name = next(n for n, _ in model.named_parameters() if n.endswith(vectors[family]))
    tensors = {k: v.clone() for k, v in model.state_dict().items() if k not in (name, "lm_head.weight")}
    model.save_pretrained(tmp_path, state_dict=tensors)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {name}
    fresh = dict(loaded.named_parameters())
    assert torch.isfinite(fresh[name]).all()
    assert not torch.equal(fresh[name], dict(model.named_parameters())[name])
    for other, parameter in model.named_parameters():
        if other != name:
            assert torch.equal(fresh[other], parameter), other


@each_family_and_own_unit
def test_hidden_states_and_plain_tuples(family):
    model = tiny_model(family)
    output = model(batch(), output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert all(h.shape == (2, 12, model.config.hidden_size) for h in output.hidden_states)
    assert model(batch()).hidden_states is None
    plain = model(batch(), return_dict=False, labels=batch())
    assert torch.equal(plain[1], output.logits)
    assert model(batch(), use_cache=False).state is None


@each_family_and_own_unit
def test_embedded_inputs_equal_ids(family):
    model = tiny_model(family)
    embedded = model.get_input_embeddings()(batch())
    assert torch.equal(model(inputs_embeds=embedded).logits, model(batch()).logits)
    new = model.generate(inputs_embeds=embedded, max_new_tokens=5, do_sample=False, eos_token_id=None)
    whole = model.generate(batch(), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(new, whole[:, 12:])


@each_family_and_own_unit
def test_hidden_states_keep_their_gradients(family):
    model = tiny_model(family)
    output = model(batch(), output_hidden_states=True)
    output.hidden_states[0].retain_grad()
    output.logits[0, -1].sum().backward()
    gradient = output.hidden_states[0].grad
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0, "rows of a batch do not see each other"


@each_family_and_own_unit
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(family, use_reentrant):
    model = tiny_model(family, torch.float64).train()
    reset_mask = torch.zeros(2, 12, dtype=torch.bool)
    reset_mask[0, 5] = True

    def gradients():
        model.zero_grad()
        output = model(batch(), labels=batch(), reset_mask=reset_mask)
        output.loss.backward()
        return output.state, {n: p.grad.clone() for n, p in model.named_parameters()}

    state, expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    checkpointed_state, actual = gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-12, atol=1e-12)
    for name, tensor in state.items():
        torch.testing.assert_close(checkpointed_state[name], tensor, rtol=1e-12, atol=1e-12)


@each_family_and_own_unit
def test_overfits_one_batch(family):
    model = tiny_model(family).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = None
    for _ in range(60):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(), labels=batch()).loss
        first = first or loss.item()
        if loss.item() < 0.3 * first:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.3 * first


@each_family_and_own_unit
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_keeps_the_state_in_float32(family, how):
    exact = tiny_model(family)
    model = copy.deepcopy(exact)
    if how == "weights":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        first = model(batch())
        output = model(batch(), state=first.state)
    assert output.logits.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in output.state.values()} == {torch.float32}
    expected = exact(batch(), state=exact(batch()).state)
    assert relative_difference(output.logits.float(), expected.logits) < 0.05


@pytest.mark.sampled(3)
@each_family
def test_compiles_as_one_graph_once_for_all_blocks(family):
    torch._dynamo.reset()
    model = tiny_model(family).train()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    state = model.init_state(2)
    for seed in range(4):
        ids = torch.randint(1, 256, (2, 6), generator=torch.Generator().manual_seed(seed))
        reset_mask = torch.rand(2, 6) < 0.3
        output = compiled(ids, state=state, reset_mask=reset_mask, shift_labels=ids, use_cache=True)
        expected = model(ids, state=state, reset_mask=reset_mask, shift_labels=ids)
        torch.testing.assert_close(output.logits, expected.logits)
        output.loss.backward()
        state = {name: tensor.detach() for name, tensor in output.state.items()}
    assert counter.frame_count == 1


@each_family_and_own_unit
def test_lora_trains_only_its_own_weights_and_generates(family, tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_model(family)
    before = {n: p.clone() for n, p in base.named_parameters()}
    modules = {
        "mgrade": ["update_gate", "up_proj"],
        "lru": ["input_projection", "gate_proj"],
        "smt-rnn": ["q_proj", "kv_proj", "up_proj"],
    }
    modules = modules.get(family, ["gate_proj", "out_proj", "recurrence_gate"])
    settings = peft.LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merged = dict(model.named_parameters())
    for name, parameter in before.items():
        wrapped = f"base_model.model.{name}"
        wrapped = wrapped if wrapped in merged else ".base_layer.".join(wrapped.rsplit(".", 1))
        assert torch.equal(merged[wrapped], parameter), name
    model.eval()
    generated = model.generate(input_ids=batch(), max_new_tokens=4, do_sample=False, eos_token_id=None)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path).eval()
    assert torch.equal(
        again.generate(input_ids=batch(), max_new_tokens=4, do_sample=False, eos_token_id=None), generated
    )


@each_family_and_own_unit
def test_text_generation_pipeline(family):
    generator = pipeline("text-generation", model=tiny_model(family), tokenizer=ByteTokenizer())
    out = generator(["def f", "import"], batch_size=2, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert [row[0]["generated_text"].startswith(p) for row, p in zip(out, ["def f", "import"], strict=True)] == [
        True
    ] * 2


@each_family_and_own_unit
def test_a_deleted_model_leaves_nothing_behind(family):
    model = tiny_model(family)
    output = model(batch(), labels=batch())
    output.loss.backward()
    model.generate(batch(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert not list(model.buffers()), "the state never lives on the module"
    seen = weakref.ref(next(model.model.children()))
    del model, output
    gc.collect()
    assert seen() is None
