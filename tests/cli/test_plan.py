"""`hf-recurrent plan`: the table of a run, whether it fits, and one sentence for what it cannot plan."""

import json

import pytest
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.cli.main import main
from hf_recurrent.cli.plan import parse_size
from hf_recurrent.planning.report import duration, size

TINY = "--config_overrides hidden_size=16 state_size=16 num_hidden_layers=1 --use_cpu --report_to none --recipe none"


def run(capsys, words):
    try:
        main(["plan", *TINY.split(), *words.split()])
        status = 0
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr()


def test_a_plan_that_fits(capsys):
    status, out = run(capsys, "--memory 1GB --measure 1 --train_bytes 1e6 --block-size 8")
    assert status == 0 and "It fits:" in out.out and "measured here:" in out.out and "1,000,000 bytes take" in out.out


@pytest.mark.long
def test_a_plan_that_does_not_fit_names_changes(capsys):
    layers = "--config_overrides hidden_size=32 state_size=16 num_hidden_layers=3"
    status, out = run(capsys, f"--memory 150kB --processes 8 --block_size 64 --per_device_train_batch_size 2 {layers}")
    assert status == 1 and "It does not fit:" in out.out
    assert "--gradient_checkpointing true" in out.out and "--config_file fsdp2.yaml" in out.out


def test_numbers_as_json(capsys):
    status, out = run(capsys, "--json --method rtrl --block_size 1")
    numbers = json.loads(out.out)
    parts = ("parameters", "gradients", "optimizer", "communication", "state", "sensitivities", "activations")
    assert status == 0 and numbers["total"] == sum(numbers[part] for part in parts) and numbers["sensitivities"] > 0


def test_everything_that_is_planned_is_in_the_json(capsys):
    words = "--json --memory 1GB --measure 1 --train_bytes 1e6 --block-size 8 --processes 2"
    status, out = run(capsys, words)
    numbers = json.loads(out.out)
    assert status == 0 and numbers["fits"] is True
    assert numbers["seconds"] == pytest.approx(1e6 / (2 * numbers["bytes_per_second"]))
    status, out = run(capsys, "--json --memory 1kB")
    assert status == 1 and json.loads(out.out)["fits"] is False


def test_a_launch_configuration_says_how_processes_share(capsys, tmp_path):
    def planned(words):
        return json.loads(run(capsys, f"--json --block_size 8 {words}")[1].out)

    alone = planned("")
    sharded, offloaded = planned("--config_file fsdp2.yaml"), planned("--config_file fsdp2-offload.yaml --processes 4")
    assert sharded["optimizer"] == -(-alone["optimizer"] // 2) and sharded["host"] == 0
    assert offloaded["optimizer"] == 0 and offloaded["host"] > 3 * alone["parameters"] / 4
    (tmp_path / "own.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n")
    with pytest.raises(SystemExit):
        main(["plan", *TINY.split(), "--config_file", str(tmp_path / "own.yaml")])
    assert "`fsdp_version` of accelerate is 1; it must be 2." in capsys.readouterr().err


@pytest.mark.parametrize(
    "method, flags",
    [("smt", "--future_length 4"), pytest.param("dmt", "--rollout_length 12", marks=pytest.mark.long)],
)
def test_training_on_memories(capsys, method, flags):
    shape = "--teacher_overrides num_encoder_layers=1 num_decoder_layers=1 --context_length 8 --bf16 false"
    words = f"--recipe none --use_cpu --report_to none --model smt-rnn-tiny --method {method} --json {shape} {flags}"
    numbers = []
    for batch in (2, 4):
        main(["plan", *words.split(), "--per_device_train_batch_size", str(batch)])
        numbers.append(json.loads(capsys.readouterr().out))
    assert numbers[0]["state"] == numbers[0]["sensitivities"] == 0
    assert numbers[1]["activations"] > 1.5 * numbers[0]["activations"] > 0
    assert numbers[1]["optimizer"] == numbers[0]["optimizer"] < 2.1 * numbers[0]["parameters"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--processes 0", "`--processes` is 0; it must be at least 1"),
        ("--memory lots", "'lots' is not a size such as 80GB"),
        ("--config_file nowhere.yaml", "`--config_file` is 'nowhere.yaml'; file not found. Or choose from ddp.yaml,"),
        ("--method smt --model memora-s0", "it must be an RNN of SMT"),
        ("--blok_size 3", "unrecognized arguments: --blok_size; did you mean --block_size?"),
        ("--method rtrl --model llama-s0", "without element-wise recurrent units"),
    ],
)
def test_one_sentence(capsys, words, expected):
    tiny = TINY.split()
    with pytest.raises(SystemExit) as error:
        main(["plan", *words.split(), *(tiny if "llama" not in words and "smt" not in words else tiny[4:])])
    out = capsys.readouterr().err
    assert error.value.code == 2 and expected in out and "Traceback" not in out and out.count("\n") == 1


def test_sizes_and_durations():
    assert [parse_size(text) for text in ("80GB", "1 GiB", "1e6", "500mb")] == [
        8 * 10**10,
        1 << 30,
        10**6,
        5 * 10**8,
    ]
    assert [size(count) for count in (500, 1_153_000, 18.04e9, 900e12)] == ["0.50 kB", "1.15 MB", "18.0 GB", "900 TB"]
    assert (duration(90), duration(7200), duration(200_000)) == ("90 seconds", "2.0 hours", "2.3 days")


@pytest.mark.long
def test_a_server(capsys):
    main(["plan", "serve", "memora-tiny", "--rows", "2", "--user_rate", "0.5", "--json"])
    found = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny"))
    state = sum(part.nbytes for part in model.init_state(1).values())
    assert found["state_bytes"] == state and found["states_per_gb"] == 10**9 // (state + 1024)
    assert found["users_per_core"] == int(found["tokens_per_second"] // 0.5) > 0
    main(["plan", "serve", "memora-tiny", "--rows", "2"])
    assert "states per GB" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "serve", "memora-tiny", "--user_rate", "0"])
    assert "`--user_rate` is 0.0; it must be more than 0." in capsys.readouterr().err


@pytest.mark.long
def test_exported_c_is_planned_as_it_will_be_exported(capsys):
    status, out = run(capsys, "--target c --json --memory 200kB")
    numbers = json.loads(out.out)
    assert status == 0 and list(numbers)[1::3] == ["learner, adamw", "learner, rmsprop", "learner, sgd"]
    step, adamw, narrow, fixed, rmsprop, _, _, sgd, *_ = numbers.values()
    assert adamw["ram"] - rmsprop["ram"] == adamw["constants"] - 20  # a moment of every weight; the file has a header
    assert fixed["ram"] < narrow["ram"] < rmsprop["ram"] and fixed["constants"] < 0.6 * narrow["constants"]
    assert step["total"] < sgd["total"] < rmsprop["total"] < adamw["total"]
    assert step["fits"] is True and adamw["fits"] == (adamw["total"] <= 200_000)
    status, out = run(capsys, f"--target c --memory {step['total']}")
    assert status == 0 and out.out.count("  fits") == 1 and out.out.count("does not fit") == 9
    assert f"{adamw['operations']:,}" in out.out
    assert run(capsys, "--target c --memory 1kB")[0] == 1
    status, out = run(capsys, "--target c --inputs 1 --memory 32KiB")
    assert status == 0 and out.out.count("  fits") == 9 and "a new model of 1 measurements" in out.out
    status, out = run(capsys, "--target c --inputs 1 --targets 2 --memory 32KiB --json")
    assert status == 0 and all(one["fits"] for one in json.loads(out.out).values())
    status, out = run(capsys, "--target c --targets 2")
    assert status == 2 and "`--targets` needs --inputs." in out.err
    status, out = run(capsys, "--inputs 1")
    assert status == 2 and "`--inputs` needs --target c." in out.err


def test_a_learner_that_cannot_be_exported_is_planned_with_the_reason(capsys):
    words = f"{TINY} --target c --config_overrides hidden_size=16 state_size=16 num_hidden_layers=1 recurrent_unit=gru"
    main(["plan", *words.split()])
    table = capsys.readouterr().out
    assert "learner, adamw" in table and "is a GRU, whose recurrence mixes its channels" in table


def test_flags_of_training_have_no_effect_on_exported_c(capsys):
    status, out = run(capsys, "--target c --processes 2")
    assert status == 2 and "`--processes` is of training; leave it out with --target c." in out.err
