"""Importing the package is enough for the Auto classes, whatever was imported first, and it loads no torch."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{imports}
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as AutoClassifier
for family in ("memora", "hawk", "mgrade", "lru", "smt_rnn"):
    sizes = {{"num_attention_heads": 2}} if family == "smt_rnn" else {{"state_size": 8}}
    config = AutoConfig.for_model(family, hidden_size=8, num_hidden_layers=1, **sizes)
    prefix = family.title().replace("_", "")
    assert type(AutoModel.from_config(config)).__name__ == f"{{prefix}}Model"
    assert type(AutoClassifier.from_config(config)).__name__ == f"{{prefix}}ForSequenceClassification"
    model = AutoModelForCausalLM.from_config(config)
    for name in ("ByteTokenizer", "DNATokenizer"):
        folder = f"{folder}/{{family}}-{{name}}"
        model.save_pretrained(folder)
        getattr(hf_recurrent, name)().save_pretrained(folder)
        assert type(AutoTokenizer.from_pretrained(folder)).__name__ == name
teacher = AutoConfig.for_model("smt_teacher", hidden_size=8, num_attention_heads=2, num_encoder_layers=1)
assert type(AutoModel.from_config(teacher)).__name__ == "SmtTeacherModel"
print("registered")
"""
ORDERS = {
    "package first": "import hf_recurrent; assert 'torch' not in sys.modules",
    "transformers first": "import transformers, hf_recurrent; assert 'torch' not in sys.modules",
    "a model first": "from hf_recurrent.modeling.modeling_hawk import HawkModel; import hf_recurrent",
    "a tokenizer first": "from hf_recurrent import DNATokenizer; import hf_recurrent",
    "a trainer first": "from hf_recurrent import MultiStreamTrainer; import hf_recurrent",
    "auto classes first": "from transformers import AutoModelForCausalLM, AutoTokenizer; import hf_recurrent",
}


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_our_families(order, tmp_path):
    program = PROGRAM.format(imports=ORDERS[order], folder=tmp_path)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "registered" in result.stdout, result.stderr
