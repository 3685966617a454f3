"""Run by test_hub_round_trip.py with HF_ENDPOINT set: a trainer trains, evaluates and pushes."""

import logging
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, Corpus, MultiStreamTrainer, MultiStreamTrainingArguments, config_from_preset

logging.basicConfig(level=logging.DEBUG)  # whatever a library logs must not hold the token
work = Path(sys.argv[1])
torch.manual_seed(2)
tokenizer = ByteTokenizer()
config = config_from_preset("memora-tiny", hidden_size=16, state_size=24, num_hidden_layers=2)
model = AutoModelForCausalLM.from_config(config)
corpus = Corpus.from_documents([b"one two three four five six seven " * 8] * 4, tokenizer=tokenizer, name="counting")
arguments = MultiStreamTrainingArguments(
    output_dir=str(work / "run"),
    per_device_train_batch_size=2,
    block_size=8,
    max_steps=2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    hub_model_id="tester/memora-trained",
    hub_token=os.environ["HF_TOKEN"],
)
trainer = MultiStreamTrainer(model, arguments, train_corpus=corpus, eval_corpus=corpus, processing_class=tokenizer)
trainer.train()
trainer.evaluate()
trainer.push_to_hub()
probe = torch.tensor([list(b"one two thr")])
with torch.no_grad():
    save_file(
        {"probe": probe, "logits": model.eval()(probe, use_cache=True).logits}, work / "memora-trained.safetensors"
    )
