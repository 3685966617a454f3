import os

import pytest
import torch
from safetensors import safe_open
from tiny_run import Noise, logged, sensitivities, tiny_model, tiny_trainer
from transformers import TrainerCallback

from hf_recurrent.kernels.thread_count import num_threads
from hf_recurrent.trainers.kernel_threads import kernel_threads

STREAMS = 4


def online_trainer(output_dir, model=None, callbacks=None, **arguments):
    options = {"per_device_train_batch_size": STREAMS, "block_size": 1} | arguments
    return tiny_trainer(output_dir, model, callbacks, online=True, **options)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("streams", "of_torch"), [(STREAMS, 2), (512, 1)])
def test_kernels_have_the_threads_of_many_streams(streams, of_torch, tmp_path):
    pytest.importorskip("hf_recurrent.kernels.training_cpu", reason="the kernel was not built")
    before = torch.get_num_threads()
    trainer = online_trainer(tmp_path, per_device_train_batch_size=streams)
    torch.set_num_threads(2)
    try:
        with kernel_threads(trainer.model, trainer.method, trainer.args):
            assert (torch.get_num_threads(), num_threads()) == (of_torch, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("arguments", [{}, {"optim": "rmsprop", "learning_rate": 3e-4}], ids=["adamw", "rmsprop"])
def test_it_learns_byte_by_byte(arguments, tmp_path):
    trainer = online_trainer(
        tmp_path, max_steps=60, logging_steps=20, lr_scheduler_type="constant", save_strategy="no", **arguments
    )
    trainer.train()
    losses = list(logged(trainer).values())
    assert losses[-1] < losses[0] - 0.4
    assert logged(trainer, "bytes_seen")[60] == 60 * STREAMS
    assert trainer.args.optim_args == ("alpha=0.9999" if arguments else None)
    for group in trainer.optimizer.param_groups:
        assert not arguments or group["alpha"] == 0.9999


def test_truncated_is_the_stream_trainer(tmp_path):
    truncated = online_trainer(tmp_path / "a", method="truncated", block_size=4, save_strategy="no")
    truncated.train()
    streams = tiny_trainer(
        tmp_path / "b",
        per_device_train_batch_size=STREAMS,
        block_size=4,
        lr_scheduler_type="constant",
        warmup_steps=0,
        save_strategy="no",
    )
    streams.train()
    assert same(weights(truncated), weights(streams))
    others = {}
    for method in ("rtrl", "spatial"):
        trainer = online_trainer(tmp_path / method, method=method, block_size=4, save_strategy="no")
        trainer.train()
        others[method] = weights(trainer)
        assert not same(others[method], weights(truncated))
    assert not same(others["rtrl"], others["spatial"])


def test_snap1_takes_a_model_that_rtrl_refuses(tmp_path):
    options = {"max_steps": 60, "logging_steps": 20, "save_strategy": "no"}
    model = tiny_model(recurrent_unit="gru")
    with pytest.raises(ValueError, match=r"is a GRU, whose recurrence mixes.*`snap1`"):
        online_trainer(tmp_path, model, method="rtrl", **options)
    trainer = online_trainer(tmp_path, model, method="snap1", **options)
    trainer.train()
    losses = list(logged(trainer).values())
    assert losses[-1] < losses[0]
    assert "model.layers.0.recurrent_block.recurrent_unit.recurrent_candidate.weight" in sensitivities(trainer)


def test_strides_of_a_block_are_read_with_the_weights_frozen(tmp_path):
    """One layer, plain gradient descent on its unit alone: only RTRL makes the stride irrelevant."""

    class UnitOnly(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for name, parameter in model.named_parameters():
                if "recurrent_unit" not in name:
                    parameter.grad = None

    def run(method, stride):
        trainer = online_trainer(
            tmp_path / f"{method}{stride}",
            tiny_model(num_hidden_layers=1).double(),
            [UnitOnly()],
            method=method,
            stride=stride,
            block_size=8,
            optim="sgd",
            max_grad_norm=0,
            max_steps=4,
            save_strategy="no",
        )
        trainer.train()
        return torch.cat([p.detach().flatten() for n, p in trainer.model.named_parameters() if "recurrent_unit" in n])

    expected = run("rtrl", 8)
    torch.testing.assert_close(run("rtrl", 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(run("rtrl", 4), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(run("truncated", 1), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("accumulation", "optim"), [(1, "adamw_torch"), (2, "rmsprop")])
def test_a_resumed_run_is_the_uninterrupted_one(accumulation, optim, tmp_path):
    options = {
        "per_device_train_batch_size": STREAMS // accumulation,
        "gradient_accumulation_steps": accumulation,
        "optim": optim,
        "block_size": 2,
        "stride": 1,
    }
    whole = online_trainer(tmp_path / "whole", callbacks=[Noise()], **options)
    whole.train()
    resumed = online_trainer(tmp_path / "resumed", callbacks=[Noise()], **options)
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    resumed.train(os.fspath(checkpoint))
    assert same(weights(resumed), weights(whole))
    assert logged(resumed).items() <= logged(whole).items() or logged(resumed) == logged(whole)
    assert whole.carried.groups.keys() == resumed.carried.groups.keys()
    for group in whole.carried.groups:
        assert same(sensitivities(whole, group), sensitivities(resumed, group))
    with safe_open(checkpoint / "streams_rank0.safetensors", "pt") as file:
        names = [name for name in file.keys() if "sensitivities" in name]  # noqa: SIM118
        assert len(names) == 2 * 4
        assert all(file.get_slice(name).get_shape()[0] == STREAMS for name in names)


def test_what_does_not_fit_a_checkpoint_is_refused(tmp_path):
    online_trainer(tmp_path / "truncated", method="truncated").train()
    with pytest.raises(ValueError, match=r"checkpoint-5.*no `sensitivities\.model\.layers\.0"):
        online_trainer(tmp_path / "new").train(os.fspath(tmp_path / "truncated" / "checkpoint-5"))
    online_trainer(tmp_path / "rtrl").train()
    with pytest.raises(ValueError, match=r"4 streams.*2; they must be equal"):
        online_trainer(tmp_path / "new", per_device_train_batch_size=2).train(
            os.fspath(tmp_path / "rtrl" / "checkpoint-5")
        )


def test_arguments_are_checked(tmp_path):
    for arguments, message in (
        ({"method": "uoro"}, "`method` is 'uoro'; it must be one of rtrl, snap1, truncated, spatial"),
        ({"block_size": 4, "stride": 3}, "`stride` is 3; it must divide `block_size`, which is 4"),
        ({"stride": 0}, "`stride` is 0"),
        ({"regime": "iid"}, "`regime` is 'iid'"),
        ({"gradient_checkpointing": True}, "`gradient_checkpointing` must be off"),
    ):
        with pytest.raises(ValueError, match=message):
            online_trainer(tmp_path, **arguments)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, which carries no state"):
        online_trainer(tmp_path, tiny_model("llama-s0", num_attention_heads=2, num_key_value_heads=2))


def test_groups_of_streams_may_be_cut_anew(tmp_path):
    whole = online_trainer(tmp_path / "whole")
    whole.train()
    again = online_trainer(tmp_path / "again", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    again.train(os.fspath(tmp_path / "whole" / "checkpoint-5"))
    assert logged(again)[12] == pytest.approx(logged(whole)[12], rel=1e-5)
    assert sorted(again.carried.groups) == [0, 2]
    for name, tensor in sensitivities(whole).items():
        parts = torch.cat([sensitivities(again, group)[name] for group in (0, 2)])
        torch.testing.assert_close(parts, tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_two_processes_learn_as_one(launch, tmp_path):
    two = launch(tmp_path / "two", 4, 1, "--online", "--save_steps", 6, processes=2)
    one = tiny_trainer(tmp_path / "one", online=True, save_strategy="no")
    one.train()
    assert two.losses == pytest.approx(logged(one), rel=1e-5)
    # The sensitivities of both processes are found by the number of their streams.
    resumed = tiny_trainer(tmp_path / "resumed", online=True, save_strategy="no")
    resumed.train(os.fspath(tmp_path / "two" / "checkpoint-6"))
    assert logged(resumed)[12] == pytest.approx(two.losses[12], rel=1e-5)
