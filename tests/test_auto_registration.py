"""Importing the package is enough for the Auto classes, whatever was imported first, and it loads no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
PACKAGE_FIRST = "import hf_recurrent; assert 'torch' not in sys.modules"
WITH_TORCH = {
    "a model first": "from hf_recurrent.modeling.hawk.modeling_hawk import HawkModel; import hf_recurrent",
    "a tokenizer first": "from hf_recurrent import DNATokenizer; import hf_recurrent",
    "a trainer first": "from hf_recurrent import MultiStreamTrainer; import hf_recurrent",
    "auto classes first": "from transformers import AutoModelForCausalLM, AutoTokenizer; import hf_recurrent",
}
# Children of one process, which imports nothing of transformers but what takes it the longest.
FORKING = """
import os, sys
import contextlib, datasets, torch, torch._dynamo, torch.distributed.tensor
with contextlib.suppress(ImportError):
    import peft.utils.constants
for name in [name for name in sys.modules if name.split(".")[0] in ("transformers", "hf_recurrent", "peft")]:
    del sys.modules[name]
for name, program in {programs!r}.items():
    sys.stdout.flush()
    if not (child := os.fork()):
        exec(program, {{}})
        print(name, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.long
def test_auto_classes_know_our_families(tmp_path):
    program = PROGRAM.format(imports=PACKAGE_FIRST, folder=tmp_path)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "registered" in result.stdout, result.stderr


@pytest.mark.long
def test_auto_classes_know_our_families_after_transformers(tmp_path, bare_python):
    """Without torch's assertion: test_packaging.py shows that the package imports nothing after transformers."""
    program = PROGRAM.format(imports="import transformers, hf_recurrent", folder=tmp_path)
    result = bare_python.python(["-c", program], tmp_path, environment={"PYTHONPATH": os.fspath(ROOT)})
    assert "registered" in result.stdout, result.stderr


@pytest.mark.long
def test_auto_classes_know_our_families_where_torch_is_imported(tmp_path):
    programs = {
        order: PROGRAM.format(imports=imports, folder=tmp_path / order) for order, imports in WITH_TORCH.items()
    }
    program = FORKING.format(programs=programs)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.stdout.split("\n") == [*(line for order in programs for line in ("registered", order)), ""], (
        result.stderr
    )
