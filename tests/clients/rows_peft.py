"""Rows: adapters of peft."""

import torch
from client_rows import refusal, row
from rows_training import stock_trainer
from tiny_checkpoints import batch, save_checkpoint, tiny_classifier, tiny_model
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer

LINEAR = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def adapted(model=None, **options):
    """A model with a LoRA adapter that changes its outputs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = LINEAR | {"init_lora_weights": False} | options
    return get_peft_model(tiny_model() if model is None else model, LoraConfig(**options)).eval()


@row("peft", "LoRA on all linear layers: train, save, load, `merge_and_unload`")
def lora_on_linear_layers(folder):
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    base = save_checkpoint(folder / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LINEAR))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}
    trainer = stock_trainer(folder / "run", model)
    loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < loss
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    model.save_pretrained(folder / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").eval()
    inputs = batch()
    expected = model.eval()(**inputs).logits
    torch.testing.assert_close(loaded(**inputs).logits, expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, expected, atol=1e-4, rtol=1e-3)
    assert type(merged) is type(tiny_model())


@row("peft", "LoRA without `target_modules`")
def lora_on_default_layers(folder):
    model = adapted(target_modules=None)
    assert any("lora_" in name for name, _ in model.named_parameters())
    assert not torch.allclose(model(**batch()).logits, tiny_model()(**batch()).logits)


@row("peft", "`generate` with an adapter, a padded batch")
def generation_with_adapter(folder):
    model, inputs = adapted(), batch()
    output = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    merged = model.merge_and_unload().generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(output, merged)


@row("peft", "LoRA on the embedding")
def lora_on_embedding(folder):
    plain = tiny_model()(**batch()).logits
    changed = adapted(target_modules=["embed_tokens"])(**batch()).logits
    assert not torch.allclose(plain, changed)


@row("peft", "`trainable_token_indices`")
def trainable_tokens(folder):
    model = adapted(trainable_token_indices=[97], init_lora_weights=True)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "token" in name]
    assert trained
    before = model(**batch()).logits
    trainer = stock_trainer(folder / "run", model)
    trainer.train()
    model.save_pretrained(folder / "adapter")
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(tiny_model(), folder / "adapter").eval()
    expected = model.eval()(**batch()).logits
    torch.testing.assert_close(loaded(**batch()).logits, expected)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(model.merge_and_unload()(**batch()).logits, expected, atol=1e-4, rtol=1e-3)


@row("peft", "DoRA, rsLoRA")
def dora(folder):
    for options in ({"use_dora": True}, {"use_rslora": True}):
        model, inputs = adapted(**options), batch()
        expected = model(**inputs).logits
        torch.testing.assert_close(model.merge_and_unload()(**inputs).logits, expected, atol=1e-4, rtol=1e-3)


@row("peft", "`modules_to_save` with a new head of a classifier")
def modules_to_save(folder):
    from peft import AutoPeftModelForSequenceClassification

    base = save_checkpoint(folder / "base", tiny_classifier(num_labels=3))
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(base)
    model = adapted(model, task_type="SEQ_CLS", modules_to_save=["score"])
    model.save_pretrained(folder / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(folder / "adapter", num_labels=3).eval()
    torch.testing.assert_close(loaded(**batch()).logits, model(**batch()).logits)


@row("peft", "several adapters: `load_adapter`, `set_adapter`, `disable_adapter`, `add_weighted_adapter`")
def several_adapters(folder):
    from peft import LoraConfig

    model, inputs = adapted(), batch()
    first = model(**inputs).logits
    torch.manual_seed(2)
    model.add_adapter("second", LoraConfig(**LINEAR, init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.allclose(model(**inputs).logits, first)
    model.add_weighted_adapter(["default", "second"], [1.0, 0.0], "mixed", combination_type="linear")
    model.set_adapter("mixed")
    torch.testing.assert_close(model(**inputs).logits, first, atol=1e-4, rtol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(model(**inputs).logits, tiny_model()(**inputs).logits)


@row("peft", "prompt tuning: virtual tokens before a batch that is padded on the left")
def prompt_tuning(folder):
    from peft import PromptTuningConfig, get_peft_model

    torch.manual_seed(1)
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "num_attention_heads": 1}
    model = get_peft_model(tiny_model(), PromptTuningConfig(**options)).eval()
    inputs = batch()
    together = model(**inputs).logits[:, -1]
    for number, (ids, mask) in enumerate(zip(inputs.input_ids, inputs.attention_mask, strict=True)):
        alone = model(input_ids=ids[mask == 1][None], attention_mask=torch.ones(1, int(mask.sum()))).logits[0, -1]
        torch.testing.assert_close(together[number], alone, atol=1e-5, rtol=1e-4)
    model.generate(**inputs, max_new_tokens=3)
    return "with `num_attention_heads=1` in its configuration, which peft asks for; each row as alone"


@row("peft", "prefix tuning")
def prefix_tuning(folder):
    from peft import PrefixTuningConfig, get_peft_model

    with refusal(TypeError, "past_key_values", "needs keys and values of attention, which the models do not have"):
        model = get_peft_model(
            tiny_model(),
            PrefixTuningConfig(
                task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=2, token_dim=16, num_attention_heads=2
            ),
        )
        model(**batch())


@row("peft", "LoRA trained with the stock `Trainer` and gradient checkpointing")
def adapter_with_checkpointing(folder):
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    model.enable_input_require_grads()
    stock_trainer(folder, get_peft_model(model, LoraConfig(**LINEAR)), gradient_checkpointing=True).train()


@row("peft", "an adapter by `model.add_adapter`, of transformers")
def adapter_of_transformers(folder):
    from peft import LoraConfig

    model = tiny_model()
    model.add_adapter(LoraConfig(**LINEAR, init_lora_weights=False))
    expected = model(**batch()).logits
    model.save_pretrained(folder / "adapter")
    save_checkpoint(folder / "base")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded.load_adapter(str(folder / "adapter"))
    torch.testing.assert_close(loaded(**batch()).logits, expected)
    assert ByteTokenizer().decode(loaded.generate(**batch(), max_new_tokens=2)[0])
