"""`hf-recurrent export`: a folder that runs, and refusals before anything is exported."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, ExportedStep, config_from_preset
from hf_recurrent.cli.main import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config = config_from_preset("memora-tiny", hidden_size=16, state_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def test_a_checkpoint_becomes_a_folder_that_runs(checkpoint, tmp_path, capsys):
    folder = tmp_path / "step"
    main(["export", str(checkpoint), "--output_dir", str(folder), "--quantize", "bfloat16"])
    assert f"{folder}: step.pt2, " in capsys.readouterr().err
    step = ExportedStep(folder)
    logits, _ = step(torch.tensor([65]), step.init_state(1))
    state = AutoModelForCausalLM.from_pretrained(checkpoint)(torch.tensor([[65]])).logits[:, 0]
    assert step.specification.weights == "bfloat16" and (logits - state).abs().max() < 0.1
    with pytest.raises(SystemExit):
        main(["export", str(checkpoint), "--output_dir", str(folder)])
    assert "must be a new or empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing/folder/x"], "directory not found"),
        (["{checkpoint}", "--format", "tflite"], "invalid choice: 'tflite'"),
        (["{checkpoint}", "--quantize", "int2"], "invalid choice: 'int2'"),
        (["{checkpoint}", "--output_dir", "missing/step"], "directory 'missing' not found"),
    ],
)
def test_wrong_arguments(arguments, message, checkpoint, capsys):
    with pytest.raises(SystemExit):
        main(["export", *(argument.format(checkpoint=checkpoint) for argument in arguments)])
    assert message in capsys.readouterr().err


def test_generate_and_evaluate_with_narrow_weights(checkpoint, tmp_path, capsys):
    pytest.importorskip("hf_recurrent.kernels.step_cpu")
    main(
        [
            "generate",
            str(checkpoint),
            "--prompt",
            "a",
            "--quantize",
            "int8",
            "--max_new_tokens",
            "3",
            "--device",
            "cpu",
        ]
    )
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(65, 91)) * 8)
    command = ["evaluate", str(checkpoint), "--corpus", str(text), "--split", "all", "--no_compressors", "--quiet"]
    values = []
    for quantize in ([], ["--quantize", "int8"]):
        main([*command, "--device", "cpu", *quantize])
        values.append(float(capsys.readouterr().out.split("whole episode")[1].splitlines()[0].split()[-1]))
    assert 0 < abs(values[1] - values[0]) < 0.05
