"""Rows: trainers of trl."""

from client_rows import row
from tiny_checkpoints import save_checkpoint, tiny_classifier, tiny_model
from transformers import AutoModelForCausalLM

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer

OPTIONS = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "bf16": False}
OPTIONS |= {"disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3}


def tokenizer():
    """A byte tokenizer with the chat template, loaded from a checkpoint by most users."""
    return ByteTokenizer(chat_template=CHAT_TEMPLATE)


def losses(trainer) -> list[float]:
    """Logged losses after training; all finite."""
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 2 and all(abs(loss) < 100 for loss in found)
    return found


def texts():
    from datasets import Dataset

    return Dataset.from_dict({"text": ["def main():", "import os", "café", "x = 1"] * 4})


def chats():
    from datasets import Dataset

    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    return Dataset.from_dict({"messages": [turns] * 8})


def preferences(chosen="chosen", rejected="rejected"):
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["a", "bc"] * 4, chosen: ["yes", "yes!"] * 4, rejected: ["no", "n"] * 4})


@row("trl", "`SFTTrainer`")
def sft(folder):
    from trl import SFTConfig, SFTTrainer

    options = SFTConfig(str(folder), **OPTIONS)
    losses(SFTTrainer(tiny_model(), options, train_dataset=texts(), processing_class=tokenizer()))


@row("trl", "`SFTTrainer(packing=True)`, strategy `bfd`")
def sft_packed(folder):
    from trl import SFTConfig, SFTTrainer

    options = SFTConfig(str(folder), packing=True, packing_strategy="bfd", max_length=32, **OPTIONS)
    losses(SFTTrainer(tiny_model(), options, train_dataset=texts(), processing_class=tokenizer()))


@row("trl", "`SFTTrainer(padding_free=True)`")
def sft_padding_free(folder):
    from trl import SFTConfig, SFTTrainer

    plain = SFTTrainer(
        tiny_model(), SFTConfig(str(folder / "a"), **OPTIONS), train_dataset=texts(), processing_class=tokenizer()
    )
    options = SFTConfig(str(folder / "b"), padding_free=True, max_length=None, **OPTIONS)
    packed = SFTTrainer(tiny_model(), options, train_dataset=texts(), processing_class=tokenizer())
    expected, actual = losses(plain), losses(packed)
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) < 1e-3, (actual, expected)
    return "the same losses as with padding"


@row("trl", "`SFTTrainer` on chats, `assistant_only_loss=True`")
def sft_chat(folder):
    from trl import SFTConfig, SFTTrainer

    options = SFTConfig(str(folder), assistant_only_loss=True, **OPTIONS)
    losses(SFTTrainer(tiny_model(), options, train_dataset=chats(), processing_class=tokenizer().to_fast()))
    return "with the chat template and `tokenizer.to_fast()`"


@row("trl", "`SFTTrainer(peft_config=...)`", "peft")
def sft_with_adapter(folder):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = SFTConfig(str(folder), **OPTIONS)
    losses(SFTTrainer(tiny_model(), options, train_dataset=texts(), processing_class=tokenizer(), peft_config=adapter))


@row("trl", "`RewardTrainer`")
def reward(folder):
    from trl import RewardConfig, RewardTrainer

    options = RewardConfig(str(folder), **OPTIONS)
    losses(
        RewardTrainer(
            tiny_classifier(num_labels=1), options, train_dataset=preferences(), processing_class=tokenizer()
        )
    )


@row("trl", "`DPOTrainer`")
def dpo(folder):
    from trl import DPOConfig, DPOTrainer

    options = DPOConfig(str(folder), **OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint(folder / "model"))
    losses(DPOTrainer(model, args=options, train_dataset=preferences(), processing_class=tokenizer()))


@row("trl", "`GRPOTrainer`")
def grpo(folder):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def length_of_answer(completions, **kwargs):
        return [float(len(set(text))) for text in completions]

    options = GRPOConfig(
        str(folder), **OPTIONS | {"per_device_train_batch_size": 4}, num_generations=4, max_completion_length=5
    )
    data = Dataset.from_dict({"prompt": ["a", "bc", "def", "x"]})
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint(folder / "model"))
    losses(
        GRPOTrainer(
            model,
            args=options,
            reward_funcs=length_of_answer,
            train_dataset=data,
            processing_class=tokenizer(),
        )
    )
