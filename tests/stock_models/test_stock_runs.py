"""Training, evaluation and state files of stock models with their state carried."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from stock_cases import CASES, Float64, stock_model
from tiny_run import logged, tiny_corpora, tiny_trainer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from hf_recurrent import Corpus, MultiStreamDataset, evaluate_bits_per_byte, with_state
from hf_recurrent.generation.text_state import continue_texts, load_text_state, read_texts, save_text_state
from hf_recurrent.modeling.block.causal_lm_loss import causal_lm_loss
from hf_recurrent.modeling.block.recurrent_state import detach_state

RATE = 0.05


@pytest.fixture(params=CASES)
def family(request):
    return request.param


def test_two_steps_equal_the_computation_by_hand(family, tmp_path):
    model = stock_model(family, torch.float64)  # xLSTM's roundings in float32 depend on the processor and grow
    by_hand = with_state(copy.deepcopy(model)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    arguments = {"max_steps": 2, "logging_steps": 1, "max_grad_norm": 0, "save_strategy": "no"}
    trainer = tiny_trainer(tmp_path, model, per_device_train_batch_size=3, block_size=40, **arguments)
    trainer.optimizer, trainer.lr_scheduler = optimizer, LambdaLR(optimizer, lambda step: 1.0)
    trainer.train()

    blocks = iter(MultiStreamDataset(tiny_corpora()[0], 3, 40, seed=trainer.args.seed))
    state, resets = by_hand.init_state(3), 0
    for step in (1, 2):
        batch = next(blocks)
        resets += int(batch["reset_mask"][:, 1:].sum())
        logits, rows = [], []
        # Each stream alone, in pieces that begin at its resets.
        for row in range(3):
            own = {name: tensor[row : row + 1] for name, tensor in state.items()}
            starts = batch["reset_mask"][row].nonzero().flatten().tolist()
            bounds = sorted({0, *starts, 40})
            pieces = []
            for begin, end in pairwise(bounds):
                before = by_hand.init_state(1) if begin in starts else own
                output = by_hand(batch["input_ids"][row : row + 1, begin:end], state=before)
                own = output.state
                pieces.append(output.logits)
            logits.append(torch.cat(pieces, dim=1))
            rows.append(own)
        state = detach_state({name: torch.cat([own[name] for own in rows]) for name in rows[0]})
        loss = causal_lm_loss(torch.cat(logits), None, batch["shift_labels"])
        assert logged(trainer)[step] == pytest.approx(loss.item(), rel=1e-5)
        by_hand.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in by_hand.parameters():
                if weight.grad is not None:
                    weight -= RATE * weight.grad
    assert resets
    for name, tensor in trainer.carried.get(0, 3).items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-5, msg=name)
    for (name, weight), expected in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_resumed_run_is_the_uninterrupted_one_and_loads_as_the_stock_class(tmp_path):
    trainer = tiny_trainer(tmp_path, stock_model("mamba2", torch.float32), max_steps=8, logging_steps=1)
    trainer.train()
    resumed = tiny_trainer(tmp_path, stock_model("mamba2", torch.float32), max_steps=8, logging_steps=1)
    resumed.train(str(tmp_path / "checkpoint-5"))
    assert logged(resumed) == logged(trainer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    assert type(saved).__module__.startswith("transformers.")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name]) and torch.equal(weight, resumed.model.state_dict()[name])
    # Without carried states, training on blocks of 16 bytes has other losses.
    alone = tiny_trainer(tmp_path / "iid", stock_model("mamba2", torch.float32), max_steps=8, regime="iid")
    assert alone.carried is None
    with pytest.raises(ValueError, match="`gradient_checkpointing` is True"):
        tiny_trainer(tmp_path / "no", stock_model("mamba2", torch.float32), gradient_checkpointing=True)


def test_evaluation_equals_that_of_whole_episodes(family):
    generator = np.random.default_rng(0)
    lengths = (1, 5, 150, 64, 17)
    corpus = Corpus.from_documents([generator.integers(1, 256, n, dtype=np.uint8).tobytes() for n in lengths])
    model, nats = stock_model(family).eval(), 0.0
    with Float64():
        for episode in corpus:
            targets = torch.tensor([*episode[1:].tolist(), 0])
            with torch.no_grad():
                logits = model(torch.from_numpy(episode.astype(np.int64))[None], use_cache=False).logits[0]
            nats -= logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
        for num_streams, block_size in ((1, 1000), (3, 33)):
            options = {"num_streams": num_streams, "block_size": block_size, "progress": False}
            assert evaluate_bits_per_byte(model, corpus, **options)["nats"] == pytest.approx(nats, rel=1e-10)
        windows = evaluate_bits_per_byte(model, corpus, **options, carry_state=False)["nats"]
    assert abs(windows - nats) > 1e-3


def test_a_state_file_continues_a_text(family, tmp_path):
    model = stock_model(family, torch.float32).eval()
    text = np.frombuffer(b"The quick brown fox jumps over the lazy dog.", dtype=np.uint8)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    (whole,), _ = continue_texts(model, read_texts(model, [text]), **options)
    part = read_texts(model, [text[:30], text[:7]], chunk=8)
    save_text_state(model, part, tmp_path / "state.safetensors")
    loaded = load_text_state(model, tmp_path / "state.safetensors")
    assert loaded.pending == part.pending
    assert all(torch.equal(tensor, part.state[name]) for name, tensor in loaded.state.items())
    both, after = continue_texts(model, read_texts(model, [text[30:], text[7:]], loaded, chunk=5), **options)
    assert [new.tolist() for new in both] == [whole.tolist()] * 2
    again = read_texts(model, [np.concatenate([text, whole.numpy()])])
    assert after.pending == again.pending * 2
    for name, tensor in again.state.items():
        torch.testing.assert_close(after.state[name][:1], tensor, rtol=1e-3, atol=1e-4, msg=name)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="belongs to other weights"):
        load_text_state(model, tmp_path / "state.safetensors")
