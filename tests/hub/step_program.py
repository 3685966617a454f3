"""Run by test_exported_step.py: an exported step goes to the Hub, and runs from there."""

import json
import sys
from pathlib import Path

import torch
from huggingface_hub import create_repo, upload_folder
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, ExportedStep, config_from_preset, save_exported_step
from hf_recurrent.checkpoints.manifest import write_manifest

work = Path(sys.argv[1])
config = config_from_preset("memora-tiny", hidden_size=8, state_size=8, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(config).eval()
save_exported_step(model, work / "step", tokenizer=ByteTokenizer())
with (work / "step" / "README.md").open("a") as card:
    card.write("\nA card may be edited.\n")
create_repo("tester/step")
upload_folder(repo_id="tester/step", folder_path=work / "step")

step = ExportedStep("tester/step")
with torch.no_grad():
    outputs, state = step(torch.tensor([65, 66]), step.init_state(2))
    expected = model(torch.tensor([[65], [66]]))
torch.testing.assert_close(outputs, expected.logits[:, 0], atol=1e-5, rtol=1e-5)
step.save_state(state, work / "state.safetensors")
assert step.load_state(work / "state.safetensors").keys() == state.keys()

# Machine code: what is not trusted is not even opened.
path = work / "step" / "specification.json"
path.write_text(json.dumps(json.loads(path.read_text()) | {"runtime": "aoti", "program": "step.aoti.pt2"}))
(work / "step" / "step.pt2").rename(work / "step" / "step.aoti.pt2")
(work / "step" / "README.md").unlink()
write_manifest(work / "step", kind="exported_step")
create_repo("tester/native")
upload_folder(repo_id="tester/native", folder_path=work / "step")
for name, options, wanted in (
    ("tester/native", {}, "`folder` is 'tester/native', whose program is machine code; it is run only with"),
    ("tester/native", {"trust_remote_code": True}, "step.aoti.pt2` cannot be loaded: "),
    (
        "tester/missing",
        {},
        "`folder` is 'tester/missing'; neither a directory nor a model on the Hub: there is no such",
    ),
    ("tester/step", {"revision": "other"}, "`folder` is 'tester/step'; neither"),
):
    try:
        ExportedStep(name, **options)
    except (ValueError, FileNotFoundError) as error:
        assert wanted in str(error), error
    else:
        raise AssertionError(name)
print("done")
