"""Run by test_hub_round_trip.py with HF_ENDPOINT set: every way to upload but the trainer's."""

import logging
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import remember_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Result
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.hub.checkpoint import push_checkpoint_to_hub, save_checkpoint_for_hub
from hf_recurrent.hub.model_card import Statements, create_model_card

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import leaky_unit  # noqa: F401 (registers "leaky")

logging.basicConfig(level=logging.DEBUG)  # whatever a library logs must not hold the token
work = Path(sys.argv[1])
tokenizer = ByteTokenizer()
probe = torch.tensor([list(b"def caf\xc3\xa9(x):\n    return")])


def tiny(family: str, seed: int, **fields):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2, **fields}
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **sizes)).eval()


def measured(corpus: str, bits_per_byte: float) -> Provenance:
    return Provenance(results=[Result(0, 0, "w", Data(corpus, "f"), {"bits_per_byte": bits_per_byte})], weights="w")


def record(repository: str, model) -> None:
    with torch.no_grad():
        output = model.eval()(probe, use_cache=True)
    save_file({"probe": probe, "logits": output.logits}, work / f"{repository}.safetensors")


# 1. Everything in one commit.
memora = tiny("memora", 0)
statements = Statements(repo_id="tester/memora-whole", tags=[os.environ["HF_TOKEN"]])
card = create_model_card(memora, measured("python", 2.05), statements)
push_checkpoint_to_hub(memora, tokenizer, "tester/memora-whole", card)
record("memora-whole", memora)

# 2. transformers' own methods, one after another, the card first: they keep it.
hawk = tiny("hawk", 1)
hub_card = create_model_card(hawk, measured("python", 1.5), Statements(model_name="Hawk"))
hawk.push_to_hub("hawk-parts")
tokenizer.push_to_hub("tester/hawk-parts")
hub_card.push_to_hub("tester/hawk-parts")
hawk.push_to_hub("tester/hawk-parts", commit_message="Again")
record("hawk-parts", hawk)

# 3. The command, into a private repository.
local = work / "local"
save_checkpoint_for_hub(
    hawk, tokenizer, local, create_model_card(hawk, statements=Statements(repo_id="tester/hawk-command"))
)
push_to_hub([str(local), "tester/hawk-command", "--private"])
record("hawk-command", hawk)

# 4. An RNN of another kind, whose state is no row of layers, and a model that is no language model.
torch.manual_seed(2)
sizes = {"hidden_size": 16, "num_memory_tokens": 3, "num_attention_heads": 2}
student = AutoModelForCausalLM.from_config(config_from_preset("smt-rnn-tiny", **sizes)).eval()
teacher = AutoModel.from_config(config_from_preset("smt-teacher-tiny", **sizes)).eval()
student.load_readout(teacher)
found = weights_fingerprint(student)
on_the_hub = Result(0, 0, found, Data("hub:owner/stories", "f"), {"bits_per_byte": 1.25})
remember_provenance(student, Provenance(results=[on_the_hub], weights=found))
push_checkpoint_to_hub(student, tokenizer, "tester/smt_rnn-whole")
remember_provenance(student, Provenance(weights=found))  # as after other training: the results of before go
push_checkpoint_to_hub(student, tokenizer, "tester/smt_rnn-whole")
record("smt_rnn-whole", student)
teacher.save_pretrained(work / "teacher")

# 5. A unit of the user, by all three ways; the last one counts.
own = tiny("memora", 3, recurrent_unit="leaky")
own.save_pretrained(work / "own", push_to_hub=True, repo_id="tester/memora-own")
own.push_to_hub("tester/memora-own")
tokenizer.save_pretrained(work / "own")
push_to_hub([str(work / "own"), "tester/memora-own"])
record("memora-own", own)
