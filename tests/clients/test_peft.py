"""Adapters of PEFT: default targets, embeddings, single tokens, prompts on padded batches, generation."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.modeling.step import single_step

peft = pytest.importorskip("peft")

FAMILIES = ["memora", "hawk", "mgrade", "lru", "smt-rnn"]
SETTINGS = {
    "default targets": {},
    "all linear maps": {"target_modules": "all-linear"},
    "the embedding": {"target_modules": ["embed_tokens"]},
    "some tokens": {"target_modules": "all-linear", "trainable_token_indices": [0, 65]},
    "a trained embedding": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
    "DoRA": {"use_dora": True},
}


def tiny_model(family="hawk"):
    torch.manual_seed(0)
    config = config_from_preset(f"{family}-tiny", hidden_size=16, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config).double()


def padded_batch():
    ids = torch.randint(1, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def train(model, steps=15):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = padded_batch()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = []
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family, settings, tmp_path):
    settings = peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS[settings])
    model = peft.get_peft_model(tiny_model(family), settings)
    losses = train(model)
    assert losses[-1] < losses[0]
    model.eval()
    batch = padded_batch()
    expected = model(**batch).logits
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).logits, expected, rtol=0, atol=1e-10)
    if settings.target_modules == {"embed_tokens"} and loaded.config.tie_word_embeddings:
        return  # merged, it would change the head, which shares the weight
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=0, atol=1e-10)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**batch, **options), merged.generate(**batch, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_prompts_on_padded_batches(family, kind):
    # PEFT asks every model for a number of attention heads; of a prompt without attention, it uses none of them.
    options = {"encoder_hidden_size": 8} if kind == "PromptEncoderConfig" else {}
    settings = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=1, **options)
    model = peft.get_peft_model(tiny_model(family), settings)
    losses = train(model)
    assert losses[-1] < losses[0]
    model.eval()
    batch = padded_batch()
    together = model(**batch).logits
    real = batch["attention_mask"][0] != 0
    alone = model(input_ids=batch["input_ids"][:1, real]).logits
    torch.testing.assert_close(together[0, 4:][real], alone[0, 4:], rtol=0, atol=1e-10)
    assert model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 11)


def test_prefixes_are_refused():
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=1)
    with pytest.raises(TypeError, match="'past_key_values'; a recurrent model has no attention"):
        peft.get_peft_model(tiny_model(), settings)(**padded_batch())


@torch.no_grad()
def test_single_steps_with_adapters_are_compiled_and_follow_them():
    pytest.importorskip("hf_recurrent.kernels.step_cpu")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    text, byte = torch.ones(1, 3, dtype=torch.long), torch.tensor([[65]])
    base = model.get_base_model()

    def step():
        state = base(text, use_cache=True).state
        expected = base(torch.cat([text, byte], 1)).logits[:, -1:]
        logits = base(byte, state=state).logits
        assert single_step._steps[base].watch.unchanged()
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        return logits

    adapted = step()
    for module in model.modules():
        for name in getattr(module, "scaling", {}):
            module.scaling[name] *= 3
    assert (step() - adapted).abs().max() > 1e-2
    with model.disable_adapter():
        plain = step()
    model.merge_adapter()
    merged = step()
    assert (merged - plain).abs().max() > 1e-2
