# ruff: noqa: E402 (the imports come after the block on them)
"""Run by test_hub_round_trip.py: a machine on which this package was never installed loads what was uploaded."""

import logging
import sys
from pathlib import Path

logging.basicConfig(level=logging.DEBUG)
for name in ("hf_recurrent", "modeling", "trainers"):
    sys.modules[name] = None  # every import of it raises

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

try:
    import hf_recurrent  # noqa: F401
except ImportError:
    pass
else:
    raise AssertionError("hf_recurrent can be imported, so this program shows nothing")

work = Path(sys.argv[1])
text = bytes(range(256)) + "çé 漢字".encode()
for repository in sys.argv[2:]:
    name = f"tester/{repository}"
    config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    assert type(config).__module__.startswith("transformers_modules."), type(config)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert type(tokenizer).__module__.startswith("transformers_modules."), type(tokenizer)
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(text)) == text

    expected = load_file(work / f"{repository}.safetensors")
    with torch.no_grad():
        whole = model(expected["probe"], use_cache=True)
        first = model(expected["probe"][:, :5], use_cache=True)
        second = model(expected["probe"][:, 5:], state=first.state, use_cache=True)
    assert torch.equal(whole.logits, expected["logits"]), (whole.logits - expected["logits"]).abs().max()
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole.logits)

    prompt = tokenizer(["def ", "x"], padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert output.shape == (2, 10)
    generator = pipeline("text-generation", model=name, trust_remote_code=True)
    assert generator("def ", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("def ")

    # Its files have the base model and the classifier, too.
    base = AutoModel.from_pretrained(name, trust_remote_code=True).eval()
    classifier = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=True, num_labels=3).eval()
    with torch.no_grad():
        hidden = base(expected["probe"]).last_hidden_state
        assert torch.equal(classifier.model(expected["probe"]).last_hidden_state, hidden)
    assert classifier(expected["probe"], labels=torch.zeros(len(hidden), dtype=torch.long)).loss.requires_grad

    # Saved again from here, it still carries its code, and loads without the Hub.
    again = work / f"again-{repository}"
    model.save_pretrained(again)
    tokenizer.save_pretrained(again)
    copy = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
    assert torch.equal(copy(expected["probe"]).logits, whole.logits)
    assert len(AutoTokenizer.from_pretrained(again, trust_remote_code=True)) == 256

    if repository == "memora-own":
        unit = model.model.layers[0].recurrent_block.recurrent_unit
        assert type(unit).__module__.endswith(".leaky_unit") and (again / "leaky_unit.py").is_file()

    if repository == "smt_rnn-whole":
        teacher = AutoModel.from_pretrained(work / "teacher", trust_remote_code=True).eval()
        assert type(teacher).__module__.startswith("transformers_modules."), type(teacher)
        memory = teacher.encode(expected["probe"])
        torch.testing.assert_close(model.readout(memory), teacher.decode(memory, expected["probe"])[:, 0])

assert sys.modules["hf_recurrent"] is None
