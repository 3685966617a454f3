"""Rows: loading, saving and other ways to use a model of ours than generation and training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from client_rows import refusal, row
from safetensors.torch import load_file
from tiny_checkpoints import TEXTS, batch, save_checkpoint, tiny_classifier, tiny_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from hf_recurrent import ByteTokenizer

HUB_TESTS = Path(__file__).resolve().parents[1] / "hub"

WITHOUT_PACKAGE = """
import sys
sys.modules["hf_recurrent"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=4)[0]))
"""


@row("transformers", "`AutoConfig`, `AutoModel`, `AutoModelForCausalLM`, `AutoTokenizer` with this package installed")
def auto_classes(folder):
    model = tiny_model()
    save_checkpoint(folder, model)
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    inputs = batch()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert torch.equal(
        AutoModel.from_pretrained(folder)(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state
    )
    assert isinstance(AutoTokenizer.from_pretrained(folder), ByteTokenizer)
    return "after `import hf_recurrent`"


@row("transformers", "the same without this package", slow=True)
def auto_classes_without_the_package(folder):
    save_checkpoint(folder / "model")
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folder / "model")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("def ")
    return "`trust_remote_code=True`: the checkpoint carries its code"


@row("transformers", "`AutoModelForSequenceClassification`")
def sequence_classification(folder):
    save_checkpoint(folder, tiny_classifier(num_labels=3))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model(**batch()).logits.shape == (len(TEXTS), 3)


@row("transformers", "`pipeline('text-generation')`")
def text_generation_pipeline(folder):
    generator = pipeline("text-generation", model=str(save_checkpoint(folder)))
    results = generator(TEXTS, max_new_tokens=4, do_sample=False, batch_size=2)
    assert [result[0]["generated_text"].startswith(text) for result, text in zip(results, TEXTS, strict=True)]


@row("transformers", "`pipeline('text-classification')`")
def text_classification_pipeline(folder):
    classifier = pipeline("text-classification", model=str(save_checkpoint(folder, tiny_classifier(num_labels=3))))
    alone = [classifier(text)[0]["score"] for text in TEXTS]
    together = [result["score"] for result in classifier(TEXTS, batch_size=4)]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))


@row("transformers", "`pipeline('feature-extraction')`")
def feature_extraction_pipeline(folder):
    extractor = pipeline("feature-extraction", model=str(save_checkpoint(folder)))
    features = extractor("def", return_tensors=True)
    model = AutoModel.from_pretrained(folder)
    assert torch.equal(features, model(**ByteTokenizer()("def", return_tensors="pt")).last_hidden_state)


@row("transformers", "`save_pretrained(max_shard_size=...)`, sharded loading")
def sharded_checkpoint(folder):
    model = tiny_model()
    model.save_pretrained(folder, max_shard_size="4KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    inputs = batch()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(**inputs).logits, model(**inputs).logits)


@row("safetensors", "the weights of a checkpoint as plain tensors")
def safetensors_file(folder):
    model = tiny_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert set(tensors) == set(parameters) and all(torch.equal(tensors[name], parameters[name]) for name in tensors)


@row("transformers", "`from_pretrained(dtype=torch.bfloat16)`")
def reduced_precision(folder):
    save_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    output = model(**batch())
    assert output.logits.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in output.state.values())
    return "the state stays float32"


@row("accelerate", "`from_pretrained(device_map='auto')`")
def device_map_auto(folder):
    save_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    inputs = batch().to(model.device)
    torch.testing.assert_close(model(**inputs).logits.cpu(), tiny_model()(**batch()).logits, atol=1e-4, rtol=1e-3)


@row("transformers", "`resize_token_embeddings` after `add_special_tokens`")
def resized_embeddings(folder):
    model, tokenizer = tiny_model(), ByteTokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})
    model.resize_token_embeddings(len(tokenizer))
    save_checkpoint(folder, model)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("<user>hi", return_tensors="pt")
    assert inputs.input_ids.tolist() == [[256, 104, 105]] and model(**inputs).logits.shape == (1, 3, 257)


@row("transformers", "`from_pretrained(attn_implementation='sdpa')`")
def attention_implementation(folder):
    save_checkpoint(folder)
    with refusal(ValueError, "scaled_dot_product_attention", "the models have no attention; transformers says so"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


@row("torch", "`torch.compile(model)`", slow=True)
def compiled_model(folder):
    model, inputs = tiny_model(), ByteTokenizer()("def main", return_tensors="pt")
    expected = model(**inputs).logits
    compiled = torch.compile(model)
    torch.testing.assert_close(compiled(**inputs).logits, expected)


@row("torch", "`torch.export` of one step: id and state in, logits and state out")
def exported_step(folder):
    model = tiny_model()
    state = model.init_state(2)
    ids = torch.tensor([[1], [2]])
    program = torch.export.export(model, (), {"input_ids": ids, "state": state})
    expected = model(input_ids=ids, state=state)
    output = program.module()(input_ids=ids, state=state)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.state, expected.state)


@row("huggingface_hub", "`push_to_hub` to a server, and loading it from there without this package", slow=True)
def hub_round_trip(folder):
    sys.path.append(str(HUB_TESTS))
    from hub_process import TOKEN, run_program
    from loopback_hub import LoopbackHub

    with LoopbackHub(TOKEN) as hub:
        run_program("upload_program.py", hub, folder)
        run_program("load_program.py", hub, folder, "memora-whole")
    return "also `hf-recurrent push-to-hub`"
