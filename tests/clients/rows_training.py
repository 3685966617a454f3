"""Rows: training with the stock `Trainer` and with accelerate."""

from pathlib import Path

import torch
from client_rows import row
from tiny_checkpoints import batch, save_checkpoint, tiny_model, token_rows
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from hf_recurrent import ByteTokenizer


def stock_trainer(folder: Path, model=None, **overrides) -> Trainer:
    """transformers' own trainer on the texts."""
    options = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    options |= {"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2} | overrides
    return Trainer(
        tiny_model() if model is None else model,
        TrainingArguments(str(folder), **options),
        train_dataset=token_rows() * 2,
        eval_dataset=token_rows(),
        data_collator=DataCollatorForLanguageModeling(ByteTokenizer(), mlm=False),
    )


@row("transformers", "`Trainer`: train, evaluate, predict")
def stock_training(folder):
    trainer = stock_trainer(folder)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(token_rows()).predictions.shape[-1] == 256


@row("transformers", "`Trainer`: resume from a checkpoint")
def stock_resume(folder):
    whole = stock_trainer(folder / "whole")
    whole.train()
    first = stock_trainer(folder / "parts")
    first.train()
    second = stock_trainer(folder / "parts")
    second.train(resume_from_checkpoint=str(folder / "parts" / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], tensor, msg=name)


@row("transformers", "`gradient_checkpointing=True`")
def gradient_checkpointing(folder):
    losses = []
    for enabled in (False, True):
        trainer = stock_trainer(folder / str(enabled), gradient_checkpointing=enabled)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert torch.allclose(*map(torch.tensor, losses), atol=1e-5)
    return "the same losses"


@row("transformers", "`Trainer(torch_compile=True)`", slow=True)
def compiled_training(folder):
    stock_trainer(folder, torch_compile=True, max_steps=2).train()


@row("transformers", "`neftune_noise_alpha`, `label_smoothing_factor`, gradient accumulation in `Trainer`")
def training_options(folder):
    trainer = stock_trainer(
        folder, neftune_noise_alpha=5.0, label_smoothing_factor=0.1, gradient_accumulation_steps=2, max_steps=2
    )
    trainer.train()


@row("accelerate", "`prepare`, `backward`, `clip_grad_norm_`, `save_state`, `load_state`")
def accelerate_loop(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = batch()
    losses = []
    for _ in range(3):
        loss = model(**inputs, labels=inputs.input_ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    accelerator.save_state(str(folder))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state(str(folder))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())


@row("accelerate", "`cpu_offload`, `disk_offload`, `load_checkpoint_and_dispatch`")
def accelerate_offload(folder):
    from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch

    inputs, expected = batch(), tiny_model()(**batch()).logits
    torch.testing.assert_close(cpu_offload(tiny_model(), torch.device("cpu"))(**inputs).logits, expected)
    offloaded = disk_offload(tiny_model(), str(folder / "disk"), torch.device("cpu"))
    torch.testing.assert_close(offloaded(**inputs).logits, expected)
    checkpoint = save_checkpoint(folder / "model")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(tiny_model().config)
    model.tie_weights()
    model = load_checkpoint_and_dispatch(model, str(checkpoint), device_map={"": "cpu"})
    torch.testing.assert_close(model.eval()(**inputs).logits, expected)
