"""`pretrain --method smt` and `dmt`: both phases, with and without a saved teacher, and bad input."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent.cli.pretrain import main, prepare

SIZES = ["--config_overrides", "hidden_size=16", "num_memory_tokens=2", "num_attention_heads=2"]
SHORT = [
    "--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--max_steps", "3", "--context_length", "6",
    "--per_device_train_batch_size", "4", "--logging_steps", "1", "--eval_windows", "4", "--max_eval_bytes", "300",
    "--sample_bytes", "5",
]  # fmt: skip
SMT = ["--method", "smt", "--future_length", "3", *SIZES, *SHORT, "--dmt_rollout_length", "5"]


@pytest.fixture
def corpus(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("to be or not to be, that is the question. " * (number + 2))
    return str(tmp_path / "*.txt")


@pytest.mark.long
def test_both_phases_in_one_command_and_the_second_again(tmp_path, corpus, capsys):
    output = tmp_path / "run"
    main([*SMT, "--corpus", corpus, "--output_dir", str(output), "--dmt_steps", "2"])
    printed = capsys.readouterr().out
    assert "SMT, memories of 6 bytes that predict 3" in printed
    assert "DMT, the RNN on its own memories" in printed
    assert "drift" in printed
    student = AutoModelForCausalLM.from_pretrained(output)
    teacher = AutoModel.from_pretrained(output / "teacher")
    # DMT has tuned the readout away from the decoder, and left the teacher as SMT saved it.
    assert not torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    first = AutoModel.from_pretrained(output / "checkpoint-3" / "teacher")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), teacher.parameters(), strict=True))

    again = tmp_path / "again"
    arguments = ["--method", "dmt", "--rollout_length", "5", *SHORT]
    main([*arguments, "--model", str(output), "--corpus", corpus, "--output_dir", str(again)])
    assert "bits per byte on" in capsys.readouterr().out
    kept = AutoModel.from_pretrained(again / "teacher")
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), teacher.parameters(), strict=True))


def test_a_task_and_its_length(tmp_path):
    run = prepare([*SMT, "--corpus", "task:retrieval,length=9", "--output_dir", str(tmp_path)])
    assert run.trainer.args.block_size == 9
    assert run.trainer.teacher.config.vocab_size == run.trainer.train_dataset.vocab_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "memora-tiny"], "`--model` is 'memora-tiny'; it must be an RNN of SMT"),
        (["--block_size", "8"], "`--block_size` is 8; it must be 9 or more"),
        (["--teacher", "nowhere"], "`--teacher` is 'nowhere'; it cannot be loaded"),
        (["--teacher_overrides", "num_memory_tokens=3"], "does not match its teacher"),
        (["--dmt_steps", "-1"], "`--dmt_steps` is -1; it must be at least 0."),
        (["--dynamics_weight", "-1"], "`--dynamics_weight` is -1"),
        (["--neftune_noise_alpha", "5"], "`--neftune_noise_alpha` is 5.0; it must be None"),
    ],
)
def test_bad_input(tmp_path, corpus, arguments, message, capsys):
    start = [argument for argument in SMT if argument not in SIZES] if "--model" in arguments else SMT
    with pytest.raises(SystemExit):
        main([*start, "--corpus", corpus, "--output_dir", str(tmp_path / "run"), *arguments])
    assert message in capsys.readouterr().err


def test_dmt_needs_a_trained_teacher(tmp_path, corpus, capsys):
    arguments = ["--method", "dmt", "--model", "smt-rnn-tiny", "--rollout_length", "5", *SHORT]
    with pytest.raises(SystemExit):
        main([*arguments, "--corpus", corpus, "--output_dir", str(tmp_path / "run")])
    assert "`--teacher` is 'smt-rnn-tiny'; it cannot be loaded" in capsys.readouterr().err
