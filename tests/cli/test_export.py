"""`hf-recurrent export`: a folder that runs, and refusals before anything is exported."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from own_parts_state import restored_parts
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, ExportedStep, VectorLearner, config_from_preset
from hf_recurrent.cli.main import main
from hf_recurrent.cli.user_code import import_user_code


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


def test_c_with_its_weights_in_a_file(checkpoint, tmp_path):
    main(["export", str(checkpoint), "--format", "c", "--weights_file", "--output_dir", str(tmp_path / "step")])
    assert {"step.c", "model.weights"} <= {path.name for path in (tmp_path / "step").iterdir()}


def test_a_learner_in_c(checkpoint, tmp_path):
    command = ["export", str(checkpoint), "--format", "c", "--learn", "--optim", "rmsprop", "--learning_rate", "1e-4"]
    main([*command, "--output_dir", str(tmp_path / "learner")])
    assert {"model.h", "model.c", "model.weights"} <= {path.name for path in (tmp_path / "learner").iterdir()}
    source = (tmp_path / "learner/model.c").read_text()
    assert "RMSProp" in source and "token == 0 ? -1" in source and "learning_rate = 0.0001f;" in source
    assert "model_learn(&learner, 'd', &nats);" in (tmp_path / "learner/README.md").read_text()
    main([*command, "--binary", "--output_dir", str(tmp_path / "binary")])
    assert "token == -1 ? -1" in (tmp_path / "binary/model.c").read_text()


def test_a_learner_of_measurements_in_c(tmp_path, capsys):
    command = ["export", "--format", "c", "--learn", "--numbers", "bfloat16", "--config_overrides", "hidden_size=8"]
    main([*command, "--inputs", "3", "--output_dir", str(tmp_path / "new")])
    header = (tmp_path / "new/model.h").read_text()
    assert "#define MODEL_INPUTS 3" in header and "uint16_t first[" in header
    sizes = re.search(r"RAM ([\d,]+) bytes; flash [\d,]+ bytes and the code", capsys.readouterr().err)
    assert f"#define MODEL_LEARNER_BYTES {sizes[1].replace(',', '')} " in header
    main([*command, "--inputs", "3", "--targets", "2", "--output_dir", str(tmp_path / "targets")])
    assert "#define MODEL_TARGETS 2" in (tmp_path / "targets/model.h").read_text()
    assert "model_learn(&learner, values, target, &score);" in (tmp_path / "targets/README.md").read_text()
    VectorLearner.new(2).model.save_pretrained(tmp_path / "saved")
    main(["export", str(tmp_path / "saved"), "--format", "c", "--learn", "--output_dir", str(tmp_path / "learner")])
    assert "#define MODEL_INPUTS 2" in (tmp_path / "learner/model.h").read_text()
    of_saved = ["export", str(tmp_path / "saved"), "--format", "c", "--learn", "--targets"]
    main([*of_saved, "2", "--output_dir", str(tmp_path / "regression")])
    assert "#define MODEL_TARGETS 2" in (tmp_path / "regression/model.h").read_text()
    with pytest.raises(SystemExit):
        main([*of_saved, "3", "--output_dir", str(tmp_path / "wrong")])
    assert "`--targets` is 3; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing/folder/x"], "directory not found"),
        (["{checkpoint}", "--format", "tflite"], "invalid choice: 'tflite'"),
        (["{checkpoint}", "--quantize", "int2"], "invalid choice: 'int2'"),
        (["{checkpoint}", "--learn"], "`--learn` needs --format c; --format is torch"),
        (["{checkpoint}", "--learning_rate", "1e-3"], "`--learning_rate` needs --learn"),
        (["{checkpoint}", "--format", "c", "--learn", "--quantize", "int8"], "leave out --quantize"),
        (["--format", "c", "--inputs", "3"], "`--inputs` needs --learn"),
        (["{checkpoint}", "--format", "c", "--targets", "1"], "`--targets` needs --learn"),
        (["{checkpoint}", "--format", "c", "--learn", "--targets", "1"], "`--targets` needs --inputs or a model"),
        (["--format", "c", "--learn", "--inputs", "2", "--targets", "0"], "`num_targets` is 0; it must be at least 1"),
        (["--format", "c"], "`MODEL` is missing; give a checkpoint"),
        (["--format", "c", "--learn"], "`MODEL` is missing; give a checkpoint, a preset, or --inputs"),
        (
            ["{checkpoint}", "--format", "c", "--learn", "--inputs", "3"],
            "`--inputs` makes a new model",
        ),
        (
            ["{checkpoint}", "--format", "c", "--learn", "--seed", "1"],
            "`--seed` needs a new model: --inputs",
        ),
        (["--format", "c", "--learn", "--inputs", "0"], "`input_size` is 0; it must be"),
        (["{checkpoint}", "--weights_file"], "`--weights_file` needs --format c; --format is torch"),
        (["{checkpoint}", "--output_dir", "missing/step"], "directory 'missing' not found"),
    ],
)
def test_wrong_arguments(arguments, message, checkpoint, capsys):
    with pytest.raises(SystemExit):
        main(["export", *(argument.format(checkpoint=checkpoint) for argument in arguments)])
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("target", ["pathlib.Path.write_bytes", "pathlib.Path.write_text"])
def test_a_full_disk_names_the_folder(target, checkpoint, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(target, fail)
    with pytest.raises(SystemExit):
        main(["export", str(checkpoint), "--output_dir", str(tmp_path / "step")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(rf"No space left on device: '{tmp_path}/\S*step", error)
    assert not list(tmp_path.iterdir())


BRANCHING = """
import torch
from hf_recurrent import RecurrentUnit, register_recurrent_unit

@register_recurrent_unit("branching")
class Branching(RecurrentUnit):
    def __init__(self, input_size, state_size, **options):
        super().__init__(input_size, state_size, **options)
        self.input_projection = self.input_map()

    def coefficients(self, projection):
        decay = torch.sigmoid(projection)
        if projection.sum() > 0:
            decay = decay / 2
        return decay, 1 - decay
"""


def test_a_step_that_depends_on_values_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "branching.py").write_text(BRANCHING)
    with restored_parts(tmp_path):
        import_user_code(["branching.py"])
        sizes = {"hidden_size": 8, "state_size": 8, "num_hidden_layers": 1, "recurrent_unit": "branching"}
        AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).save_pretrained("model")
        ByteTokenizer().save_pretrained("model")
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["export", "model", "--import", "branching.py"])
    message = capsys.readouterr().err
    assert "`MODEL` is a MemoraModel, of which a step cannot be exported: `if projection.sum() > 0:`" in message
    assert "(branching.py, line 13): Could not guard on data-dependent expression" in message
    assert message.count("error:") == 1 and len(message.splitlines()) == 1
    assert not Path("model-torch").exists()


def test_generate_with_narrow_weights(checkpoint, capsys):
    pytest.importorskip("hf_recurrent.kernels.step_cpu")
    command = ["generate", str(checkpoint), "--prompt", "a", "--max_new_tokens", "3", "--device", "cpu"]
    main([*command, "--quantize", "int8"])
    assert len(capsys.readouterr().out) > 1


def test_evaluate_with_narrow_weights(checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(65, 91)) * 8)
    command = ["evaluate", str(checkpoint), "--corpus", str(text), "--split", "all", "--no_compressors", "--quiet"]

    def rows(*arguments):
        main([*command, "--device", "cpu", *arguments])
        lines = capsys.readouterr().out.splitlines()
        return [line.split() for line in lines if "whole episode" in line or line.startswith(("bfloat16", "int8"))]

    own, bfloat16, int8 = rows("--quantize", "both", "--output", str(tmp_path / "results.json"))
    alone = [rows()[0], *(rows("--quantize", kind)[0] for kind in ("bfloat16", "int8"))]
    assert [own[-1], bfloat16[2], int8[2]] == [line[-1] for line in alone]
    differences = [float(line[2]) - float(own[-1]) for line in (bfloat16, int8)]
    assert [float(line[3]) for line in (bfloat16, int8)] == pytest.approx(differences, abs=1.1e-4)
    assert 0 < max(map(abs, differences)) < 0.05
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["rounded_weights"]) == ["bfloat16", "int8"] and results["weights"] is None
