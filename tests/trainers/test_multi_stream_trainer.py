import dataclasses
import math

import pytest
import torch
from tiny_run import Noise, logged, tiny_corpora, tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hf_recurrent import (
    ByteTokenizer,
    Corpus,
    DmtTrainingArguments,
    MultiStreamDataset,
    MultiStreamTrainingArguments,
    OnlineTrainingArguments,
    SmtTrainingArguments,
    config_from_preset,
    evaluate_bits_per_byte,
)
from hf_recurrent.trainers.smt_arguments import MemoryTrainingArguments


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.fixture(scope="module")
def eight_streams(tmp_path_factory):
    trainer = tiny_trainer(tmp_path_factory.mktemp("eight"), callbacks=[Noise()])
    trainer.train()
    return trainer


def test_accumulation_is_another_group_of_streams(eight_streams, tmp_path):
    for batch_size, accumulation in ((4, 2), (2, 4)):
        trainer = tiny_trainer(
            tmp_path / str(batch_size),
            callbacks=[Noise()],
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        assert logged(trainer) == pytest.approx(logged(eight_streams), rel=1e-6)
        assert logged(trainer, "state_resets") == logged(eight_streams, "state_resets")


@pytest.mark.long
def test_two_processes_train_as_one(two_processes, tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    assert two_processes.losses == pytest.approx(logged(trainer), rel=1e-6)
    assert two_processes.record["resets"] == {str(k): v for k, v in logged(trainer, "state_resets").items()}
    # Every document is read once, whatever the number of processes. (The weights differ by rounding.)
    assert two_processes.record["eval_bits_per_byte"] == pytest.approx(
        trainer.evaluate()["eval_bits_per_byte"], rel=1e-4
    )


@pytest.mark.long
def test_a_compiled_model_trains_as_it_stands(eight_streams, tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Noise()], torch_compile=True, torch_compile_backend="aot_eager")
    trainer.train()
    assert trainer.model_wrapped is not trainer.model and hasattr(trainer.model_wrapped, "_orig_mod")
    assert logged(trainer) == pytest.approx(logged(eight_streams), rel=1e-5)
    trainer.save_model(tmp_path / "saved")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), trainer.model.state_dict())


def test_operations_are_those_of_transformers(eight_streams):
    for length in (16, 3):
        inputs = {"input_ids": torch.zeros(8, length, dtype=torch.long)}
        assert eight_streams.floating_point_ops(inputs) == Trainer.floating_point_ops(eight_streams, inputs) > 0
    assert eight_streams.floating_point_ops({}) == 0


def test_losses_are_those_of_a_loop_by_hand(tmp_path):
    """The whole contract in twenty lines of plain PyTorch: what goes in, what is carried, how the loss is divided."""
    trainer = tiny_trainer(tmp_path, max_steps=5, logging_steps=1, save_strategy="no", per_device_train_batch_size=4)
    trainer.train()

    model = tiny_model().train()
    by_hand = tiny_trainer(tmp_path, model, max_steps=5, per_device_train_batch_size=4)
    optimizer = by_hand.create_optimizer()
    schedule = by_hand.create_scheduler(5, optimizer)
    batches = iter(MultiStreamDataset(tiny_corpora()[0], 4, 16, seed=trainer.args.seed))
    state, losses = model.init_state(4), {}
    for step in range(1, 6):
        batch = next(batches)
        output = model(batch["input_ids"], state=state, reset_mask=batch["reset_mask"], use_cache=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["shift_labels"].flatten())
        losses[step] = loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        state = {name: tensor.detach() for name, tensor in output.state.items()}
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)


def test_iid_starts_every_block_from_zero(tmp_path):
    seen = []
    model = tiny_model()
    forward = model.forward

    def spy(*args, **kwargs):
        seen.append((kwargs.get("state"), kwargs["reset_mask"]))
        return forward(*args, **kwargs)

    model.forward = spy
    trainer = tiny_trainer(tmp_path, model, regime="iid", max_steps=3, save_strategy="no")
    trainer.train()
    assert len(seen) == 3
    assert all(state is None and mask[:, 0].all() for state, mask in seen)
    streams = tiny_trainer(tmp_path, max_steps=3, save_strategy="no")
    streams.train()
    assert logged(trainer) != logged(streams)


def test_evaluation_leaves_training_untouched(eight_streams, tmp_path):
    trainer = tiny_trainer(
        tmp_path, callbacks=[Noise()], eval_strategy="steps", eval_steps=2, sample_every=4, sample_bytes=8
    )
    trainer.train()
    assert_same(weights(trainer), weights(eight_streams))
    assert logged(trainer) == logged(eight_streams)
    assert len(logged(trainer, "eval_bits_per_byte")) == 6
    assert trainer.model.training


def test_samples_are_printed_while_training(tmp_path, capsys):
    trainer = tiny_trainer(tmp_path, max_steps=4, sample_every=2, sample_bytes=5, sample_prompts=["ab"])
    trainer.train()
    assert capsys.readouterr().out.count("sample after 'ab'") == 2


def test_evaluation_is_bits_per_byte_of_whole_episodes(eight_streams):
    metrics = eight_streams.evaluate()
    corpus = tiny_corpora()[1]
    alone = evaluate_bits_per_byte(eight_streams.model, corpus, num_streams=1, block_size=1000, progress=False)
    assert metrics["eval_bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_bits_per_byte"] * math.log(2), rel=1e-9)
    named = eight_streams.evaluate({"a": corpus, "b": tiny_corpora()[0]})
    assert named["eval_a_bits_per_byte"] == metrics["eval_bits_per_byte"]
    assert named["eval_b_bits_per_byte"] != metrics["eval_bits_per_byte"]


def test_evaluation_without_carrying(eight_streams, tmp_path):
    trainer = tiny_trainer(tmp_path, eight_streams.model, eval_carry_state=False)
    carried = eight_streams.evaluate()["eval_bits_per_byte"]
    assert trainer.evaluate()["eval_bits_per_byte"] != pytest.approx(carried, rel=1e-6)


@pytest.mark.parametrize("regime", ["iid", "multi_stream"])
def test_stock_llama_trains_on_the_same_batches(tmp_path, regime):
    trainer = tiny_trainer(tmp_path, tiny_model("llama-s0"), regime=regime, max_steps=8, logging_steps=1)
    trainer.train()
    losses = logged(trainer)
    assert losses[8] < losses[1]
    resumed = tiny_trainer(tmp_path, tiny_model("llama-s0"), regime=regime, max_steps=8, logging_steps=1)
    resumed.train(str(tmp_path / "checkpoint-5"))
    assert logged(resumed) == losses
    assert_same(weights(resumed), weights(trainer))


def test_stock_mamba2_trains(tmp_path):
    model = tiny_model("mamba2-s0", num_heads=4, head_dim=8)
    trainer = tiny_trainer(tmp_path, model, regime="iid", max_steps=4, logging_steps=1, save_strategy="no")
    trainer.train()
    assert logged(trainer)[4] < logged(trainer)[1]


def test_logs_are_in_bytes(eight_streams):
    entry = next(entry for entry in eight_streams.state.log_history if entry["step"] == 6)
    assert entry["bits_per_byte"] == pytest.approx(entry["loss"] / math.log(2))
    assert entry["bytes_seen"] == 6 * 8 * 16
    assert entry["bytes_per_second"] > 0
    assert entry["epoch"] == pytest.approx(6 * 8 * 16 / tiny_corpora()[0].num_bytes)
    batches = iter(MultiStreamDataset(tiny_corpora()[0], 8, 16, seed=eight_streams.args.seed))
    assert entry["state_resets"] == sum(int(next(batches)["reset_mask"].sum()) for _ in range(6))


def test_workers_do_not_change_training(eight_streams, tmp_path):
    trainer = tiny_trainer(tmp_path, callbacks=[Noise()], dataloader_num_workers=2)
    trainer.train()
    assert_same(weights(trainer), weights(eight_streams))


def test_blocks_of_one_byte_train(tmp_path):
    trainer = tiny_trainer(tmp_path, block_size=1, max_steps=4, save_strategy="no")
    trainer.train()
    assert math.isfinite(logged(trainer)[3])


def test_number_of_steps(tmp_path):
    corpus = tiny_corpora()[0]
    assert tiny_trainer(tmp_path, max_steps=7, train_bytes=1e6).num_training_steps == 7
    assert tiny_trainer(tmp_path, max_steps=-1, train_bytes=1000).num_training_steps == math.ceil(1000 / 128)
    trainer = tiny_trainer(tmp_path, max_steps=-1, num_train_epochs=2)
    assert trainer.num_training_steps == math.ceil(2 * corpus.num_bytes / 128)
    steps = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    tiny_trainer(tmp_path, callbacks=[Count()], max_steps=-1, train_bytes=640, save_strategy="no").train()
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("decay", "factor"), [("linear", lambda x: 1 - x), ("1-sqrt", lambda x: 1 - math.sqrt(x))])
def test_schedules_that_decay_to_zero(tmp_path, decay, factor):
    options = {"num_decay_steps": 10, "decay_type": decay}
    trainer = tiny_trainer(
        tmp_path, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=options, warmup_steps=2,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer.train()
    expected = [0, 0.5, *(factor(step / 10) for step in range(10))]
    assert list(logged(trainer, "learning_rate").values()) == pytest.approx([1e-2 * each for each in expected])


def test_rates_and_positions_do_not_decay(tmp_path):
    trainer = tiny_trainer(tmp_path)
    decayed = trainer.get_decay_parameter_names(trainer.model)
    parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
    exempt = parameters.keys() - set(decayed)
    assert {name.rsplit(".", 1)[-1] for name in exempt} == {"weight", "nu"}  # of norms and of units
    assert all(parameters[name].dim() == 2 for name in decayed)
    mgrade = AutoModelForCausalLM.from_config(config_from_preset("mgrade-tiny"))
    assert "model.layers.0.convolution.positions" in mgrade.parameters_without_weight_decay()


def test_bfloat16_needs_no_flag_without_a_gpu(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert MultiStreamTrainingArguments(str(tmp_path), bf16=True).use_cpu
    trainer = tiny_trainer(tmp_path, max_steps=2, bf16=True)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize(
    "kind",
    [
        MultiStreamTrainingArguments,
        OnlineTrainingArguments,
        MemoryTrainingArguments,
        SmtTrainingArguments,
        DmtTrainingArguments,
    ],
)
def test_every_other_default_is_documented(kind):
    base = kind.__base__
    ours = {field.name: field for field in dataclasses.fields(kind)}
    own = {field.name for field in dataclasses.fields(base)}

    def default(field):
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    for field in dataclasses.fields(base):
        if default(field) != default(ours[field.name]):
            assert f"| `{field.name}` |" in kind.__doc__
    for name in set(ours) - own:
        assert f"`{name}`" in kind.__doc__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"regime": "shuffled"}, "`regime` is 'shuffled'"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` is 0"),
        ({"train_bytes": -1.0}, "`train_bytes` is -1.0"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` is 0.1"),
        ({"auto_find_batch_size": True}, "`auto_find_batch_size`"),
    ],
)
def test_bad_arguments(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        tiny_trainer(tmp_path, **arguments)


def test_corpus_that_does_not_fit_the_model(tmp_path):
    with pytest.raises(ValueError, match=r"`train_corpus` 'toy' has 256 token ids, but .* only 7"):
        tiny_trainer(tmp_path, tiny_model(vocab_size=7))
    with pytest.raises(ValueError, match="`block_size` is 64; the model has 32 positions"):
        tiny_trainer(tmp_path, tiny_model("llama-s0", max_position_embeddings=32), block_size=64)
    few = Corpus.from_documents([b"abc", b"defgh"], ByteTokenizer(), name="few")
    trainer = tiny_trainer(tmp_path, corpora=(few, few), max_steps=2, save_strategy="no")
    trainer.train()  # fewer documents than streams
    assert math.isfinite(trainer.evaluate()["eval_loss"])
