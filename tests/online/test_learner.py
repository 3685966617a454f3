"""The online learner: its result depends neither on the cuts of the stream nor on saving and loading."""

import gc
import itertools
import json
import math
import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import sensitivities
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

from hf_recurrent import (
    ByteTokenizer,
    Corpus,
    DNATokenizer,
    LruConfig,
    MultiStreamDataset,
    OnlineLearner,
    OnlineTrainer,
    OnlineTrainingArguments,
    config_from_preset,
    evaluate_bits_per_byte,
)
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.block_step import BlockStep
from hf_recurrent.online.prequential import PrequentialMeter
from hf_recurrent.online.saved_learner import learner_tree

TABLES = {"ngram_orders": [2, 3, 5], "ngram_rows": 256, "ngram_output": True}
COUNTS = {"count_memory_slots": 256, "count_memory_text": 4096, "count_memory_window": 256}
SIZES = {"hidden_size": 16, "state_size": 24, "num_hidden_layers": 2}
DOCUMENTS = [bytes((i * 7 + j * j + i * j) % 90 + 32 for j in range(5 + 17 * i % 40)) for i in range(5)]
STREAM = b"".join(document + b"\0" for document in DOCUMENTS)


def build(family="memora", **overrides):
    set_seed(7)
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **SIZES | overrides))


def learner_of(model=None, **settings):
    return OnlineLearner(build() if model is None else model, **{"learning_rate": 1e-2} | settings)


def same(first, second, equal_nan=False):
    """True if two learners are equal in everything that they save."""
    trees = [_flat(learner_tree(learner)) | dict(learner.model.state_dict()) for learner in (first, second)]
    assert trees[0].keys() == trees[1].keys()
    for name, value in trees[0].items():
        other = trees[1][name]
        if isinstance(value, torch.Tensor):
            equal = torch.equal(value, other)
            equal = equal or (equal_nan and torch.allclose(value, other, rtol=0, atol=0, equal_nan=True))
        else:
            equal = value == other
        if not equal:
            return False
    return True


def _flat(tree, name=""):
    if isinstance(tree, dict):
        return {key: value for part in tree for key, value in _flat(tree[part], f"{name}.{part}").items()}
    if isinstance(tree, list | tuple):
        return {key: value for place, part in enumerate(tree) for key, value in _flat(part, f"{name}.{place}").items()}
    return {name: tree}


def reference(model, rule_stride, learning_rate):
    """AdamW on the mean loss of each block, truncated: nothing is carried but the state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    pairs = [
        (document[i], document[i + 1] if i + 1 < len(document) else 0, i == 0)
        for document in DOCUMENTS
        for i in range(len(document))
    ]
    state, nats = model.init_state(1), []
    for begin in range(0, len(pairs) // rule_stride * rule_stride, rule_stride):
        ids, labels, resets = (torch.tensor([part]) for part in zip(*pairs[begin : begin + rule_stride], strict=True))
        output = model(ids, state=state, reset_mask=resets, use_cache=True)
        losses = torch.nn.functional.cross_entropy(output.logits[0], labels[0], reduction="none")
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = {name: tensor.detach() for name, tensor in output.state.items()}
        nats += losses.tolist()
    return nats


@pytest.mark.parametrize("stride", [1, 8])
def test_it_learns_as_the_equations_say(stride):
    expected, learner = build().double(), learner_of(build().double(), rule="truncated", stride=stride)
    nats = reference(expected, stride, 1e-2)
    learner.read(STREAM)
    for name, weight in expected.named_parameters():
        # AdamW divides the smallest gradients by themselves, and shows how they were rounded.
        torch.testing.assert_close(learner.model.get_parameter(name), weight, rtol=0, atol=1e-9)
    assert learner.record().bits_per_byte == pytest.approx(sum(nats) / len(nats) / math.log(2), abs=1e-10)
    assert learner.updates == len(nats) // stride
    assert learner.bytes_read == len(STREAM)


def test_it_learns_as_the_trainer_does_from_one_stream(tmp_path):
    steps, stride, corpus = 15, 3, Corpus.from_documents(DOCUMENTS)
    stream, blocks = b"", iter(MultiStreamDataset(corpus, 1, stride, seed=3))
    for block in itertools.islice(blocks, steps):
        for token, begins in zip(block["input_ids"][0].tolist(), block["reset_mask"][0].tolist(), strict=True):
            stream += b"\0" * (begins and bool(stream)) + bytes([token])
        after = block["shift_labels"][0, -1].tolist()
    arguments = OnlineTrainingArguments(
        os.fspath(tmp_path),
        per_device_train_batch_size=1,
        block_size=stride,
        max_steps=steps,
        seed=3,
        learning_rate=1e-2,
        adam_beta2=0.999,
        weight_decay=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = OnlineTrainer(build().double(), arguments, corpus)
    trainer.train()
    learner = learner_of(build().double(), stride=stride)
    learner.read(stream + bytes([after]))
    assert learner.updates == steps
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(learner.model.get_parameter(name), weight, rtol=0, atol=1e-10)
    for name, sensitivity in sensitivities(trainer).items():
        torch.testing.assert_close(learner.stream.carried[name], sensitivity, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", ["rtrl", "spatial"])
def test_the_rule_decides_what_is_learned(rule):
    ours, truncated = learner_of(rule=rule), learner_of(rule="truncated")
    for learner in (ours, truncated):
        learner.read(STREAM[:60])
    assert not torch.equal(ours.model.lm_head.weight, truncated.model.lm_head.weight)
    assert bool(ours.stream.carried) == (rule == "rtrl")


def test_without_learning_it_is_the_held_out_measure():
    model = build()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = learner_of(model, stride=16, learn=False, window=1000).read(STREAM)
    learner = learner_of(model, stride=16, learn=False)
    learner.read(STREAM)
    corpus = Corpus.from_documents(DOCUMENTS)
    expected = evaluate_bits_per_byte(model, corpus, num_streams=1, progress=False)["bits_per_byte"]
    assert learner.flush().bits_per_byte == pytest.approx(expected, rel=1e-6)
    assert record.windowed_bits_per_byte == pytest.approx(record.bits_per_byte, rel=1e-9)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert record.updates == 0


def test_updates_of_several_blocks_are_those_of_one_with_frozen_weights():
    """One layer: with RTRL the gradient of its unit does not depend on the stride."""
    pair = []
    for stride, every in ((8, 1), (2, 4)):
        model = build(num_hidden_layers=1).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("recurrent_unit" in name)
        learner = learner_of(model, stride=stride, update_every=every)
        learner.read(STREAM[:90])
        pair.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(pair[0], pair[1], rtol=0, atol=1e-12)


def pieces(data, seed):
    source = random.Random(seed)
    while data:
        size = source.randint(0, 20)
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({}, {"stride": 8, "update_every": 2, "optimizer": "rmsprop", "binary": True}),
        (TABLES | COUNTS, {"stride": 2}),
    ],
)
def test_cuts_of_the_source_change_nothing(fields, settings):
    whole, cut = (learner_of(build(**fields), **settings) for _ in range(2))
    whole.read(STREAM)
    list(cut.learn(pieces(STREAM, 0), report_every=7))
    assert same(whole, cut)


@pytest.fixture
def one_by_one(monkeypatch):
    """Learners that are made while this is active read one block at a time."""
    monkeypatch.setattr(BlockStep, "blocks_at_once", 1)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({}, {"stride": 4, "max_grad_norm": 0.1}),
        ({}, {"stride": 3, "optimizer": "rmsprop", "rule": "snap1"}),
        ({}, {"stride": 2, "rule": "spatial", "binary": True}),
        ({}, {"optimizer": "rmsprop", "rule": "truncated", "max_grad_norm": 0}),
        (TABLES, {}),
        (TABLES, {"stride": 4, "table_learning_rate": 0.1}),
        (TABLES | COUNTS, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_blocks_in_one_call_change_nothing(fields, settings, dtype, request):
    pytest.importorskip("hf_recurrent.kernels.block_cpu")
    together = learner_of(build(**fields).to(dtype), **settings)
    together.read(STREAM)
    together.flush()
    assert together.slow_because is None and together.step.blocks_at_once > 1
    request.getfixturevalue("one_by_one")
    alone = learner_of(build(**fields).to(dtype), **settings)
    alone.read(STREAM)
    alone.flush()
    assert same(together, alone)


# A gradient without bounds after some updates; a loss, and a gradient, that is not finite after one.
@pytest.mark.parametrize("learning_rate", [30.0, 1e6, 1e19])
@pytest.mark.parametrize("stride", [1, 3])
def test_a_block_that_fails_among_many(learning_rate, stride, request):
    learners, errors = [], []
    for fixture in (None, "one_by_one"):
        if fixture:
            request.getfixturevalue(fixture)
        learner = learner_of(stride=stride, learning_rate=learning_rate, max_grad_norm=0)
        with pytest.raises(NonFiniteLossError) as error:
            learner.read(STREAM)
        learners.append(learner)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and learners[0].updates > (learning_rate < 1e6)
    assert len(learners[0].stream.waiting) == stride
    assert learners[0].stream.last == learners[1].stream.last
    assert same(*learners, equal_nan=True)  # sensitivities


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 8, "update_every": 3},
        {"stride": 4, "optimizer": "rmsprop", "rule": "spatial"},
        {"binary": True, "window": 20},
        {"learn": False, "stride": 5},
        {"rule": "snap1", "stride": 3, "recurrent_unit": "gru"},
    ],
)
def test_saving_and_loading_change_nothing(settings, tmp_path):
    unit = {"recurrent_unit": settings.get("recurrent_unit", "glru")}
    settings = {name: value for name, value in settings.items() if name not in unit}
    whole, learner = (learner_of(build(**unit), **settings) for _ in range(2))
    whole.read(STREAM)
    learner.metadata = {"source": "a file"}
    for begin in range(0, len(STREAM), 41):  # full blocks and not, episodes that end and not
        learner.read(STREAM[begin : begin + 41])
        learner.save(tmp_path / "learner")
        learner = OnlineLearner.load(tmp_path / "learner")
        assert learner.metadata == {"source": "a file"}
    learner.metadata = {}
    assert same(whole, learner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learner"]


def test_a_saved_learner_is_a_model_and_plain_data(tmp_path):
    learner = OnlineLearner(build(), ByteTokenizer(), learning_rate=1e-2)
    learner.read(STREAM[:50])
    learner.save(tmp_path / "new" / "learner")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "learner")
    assert torch.equal(model.lm_head.weight, learner.model.lm_head.weight)
    assert json.loads((tmp_path / "new" / "learner" / "learner.json").read_text())["bytes_read"] == 50
    assert any("carried" in name for name in load_file(tmp_path / "new" / "learner" / "learner.safetensors"))
    assert OnlineLearner.load(tmp_path / "new" / "learner").tokenizer is not None


def test_errors_of_loading_and_saving(tmp_path):
    with pytest.raises(ValueError, match="it must be a saved learner"):
        OnlineLearner.load(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="it must be new, empty or a saved learner"):
        learner_of().save(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    learner_of().save(tmp_path / "learner")
    with pytest.raises(ValueError, match="`stride` is 2, but the learner was saved with 1"):
        OnlineLearner.load(tmp_path / "learner", stride=2)
    with pytest.raises(ValueError, match=r"has shape \(24, 16\) in the checkpoint .* but \(32, 16\) in the model"):
        OnlineLearner.load(tmp_path / "learner", build(state_size=32))
    assert OnlineLearner.load(tmp_path / "learner", learning_rate=0.5).step.optimizer.param_groups[0]["lr"] == 0.5
    frozen = OnlineLearner.load(tmp_path / "learner", learn=False)
    frozen.save(tmp_path / "frozen")
    assert OnlineLearner.load(tmp_path / "frozen", learn=True).stream.carried
    (tmp_path / "learner" / "learner.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"learner` is damaged: `learner\.safetensors` has 2 bytes instead of"):
        OnlineLearner.load(tmp_path / "learner")


def test_an_end_byte_resets_state_and_sensitivities():
    """Two equal episodes leave the same sensitivities."""
    text = b"abcabcabd"
    learner = learner_of(learning_rate=1e-30)
    learner.read(text + b"\0")
    first = {name: tensor.clone() for name, tensor in learner.stream.carried.items()}
    learner.read(b"\0\0" + text + b"\0")  # episodes without a byte are none
    assert learner.bytes_read == 2 * len(text) + 4
    assert all(torch.allclose(tensor, learner.stream.carried[name]) for name, tensor in first.items())
    binary = learner_of(learning_rate=1e-30, binary=True)
    binary.read(text + b"\0" + text + b"\0")
    assert not all(torch.allclose(tensor, binary.stream.carried[name]) for name, tensor in first.items())


@pytest.mark.parametrize("stride", [1, 8])
def test_the_context_continues_the_stream(stride):
    learner = learner_of(stride=stride, learning_rate=1e-30)
    model = learner.model
    for text in (b"the quick brown", b"a", b"dog"):  # the episode begins before the block that waits, and in it
        learner.read(b"before\0" + text)
        context = learner.context()
        logits = model(**context).logits[0, -1]
        expected = model(torch.tensor([list(text)])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        learner.read(b"\0")
    learner.read(b"the quick brown")
    context = learner.context()
    before = learner_tree(learner)["state"]
    new = model.generate(**context, max_new_tokens=5, do_sample=False)
    assert new.shape[1] == context["input_ids"].shape[1] + 5
    assert learner_tree(learner)["state"] is before
    learner.read(b"\0")
    with pytest.raises(ValueError, match="beginning of an episode"):
        learner.context()


def test_reports_come_at_multiples_at_silence_and_at_the_end():
    learner = learner_of(stride=4)
    learner.read(STREAM[:3])
    records = list(learner.learn([STREAM[3:50], b"", STREAM[50:75]], report_every=20))
    assert [record.bytes_read for record in records] == [20, 40, 50, 60, 75]
    assert all(record.bytes_per_second > 0 for record in records)
    assert list(learner.learn([])) == []
    assert [record.bytes_read for record in learner.learn(bytes(range(32, 60)), 100)] == [100, 103]


def test_a_failing_source_keeps_the_bytes_before_the_failure():
    def source():
        yield STREAM[:30]
        raise OSError("the cable was cut")

    learner, whole = learner_of(), learner_of()
    with pytest.raises(OSError, match="cable"):
        list(learner.learn(source()))
    whole.read(STREAM[:30])
    assert same(learner, whole)


class Poison:
    """Makes the loss NaN once, or the gradient infinite."""

    def __init__(self, model, gradient):
        self.gradient = gradient
        self.handle = model.register_forward_hook(self)

    def __call__(self, model, inputs, output):
        if self.gradient:
            output.logits.register_hook(lambda gradient: gradient * float("inf"))
        else:
            output.loss = output.loss * float("nan")
        self.handle.remove()
        return output


@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_is_learned_from_nan_or_infinity(gradient, tmp_path):
    learner, whole = learner_of(stride=4), learner_of(stride=4)
    learner.read(STREAM[:50])
    weights = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    Poison(learner.model, gradient)
    with pytest.raises(NonFiniteLossError, match=r"nothing was learned"):
        learner.read(STREAM[50:])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.model.state_dict().items())
    assert 50 < learner.bytes_read < 56  # the block that it happened in waits
    read = learner.bytes_read
    learner.save(tmp_path / "learner")
    learner = OnlineLearner.load(tmp_path / "learner")
    assert learner.stream.carried
    assert all(bool(tensor.isfinite().all()) for tensor in learner.stream.carried.values())
    learner.read(STREAM[read:])
    whole.read(STREAM)
    assert same(learner, whole) != gradient  # sensitivities that led to a gradient without bounds are forgotten


@pytest.mark.parametrize(
    ("stride", "settings"),
    [
        (1, {}),
        (4, {"update_every": 3}),
        (16, {"optimizer": "rmsprop", "rule": "truncated", "learning_rate": 1e-4}),
        (64, {"rule": "snap1"}),
    ],
)
def test_the_compiled_kernel_learns_as_plain_torch_does(stride, settings):
    pytest.importorskip("hf_recurrent.kernels.block_cpu")
    compiled, plain = (learner_of(build().double(), stride=stride, **settings) for _ in range(2))
    plain.learn_in_plain_torch()
    stream = STREAM * (1 if stride < 16 else 3)
    for learner in (compiled, plain):
        learner.read(stream)
        learner.flush()
    assert compiled.slow_because is None
    assert plain.slow_because == "plain torch was asked for"
    assert compiled.updates == plain.updates
    assert compiled.record().bits_per_byte == pytest.approx(plain.record().bits_per_byte, rel=1e-9)
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name), weight, rtol=0, atol=1e-8)


def test_a_compiled_learner_continues_exactly(tmp_path):
    pytest.importorskip("hf_recurrent.kernels.block_cpu")
    whole, first = (learner_of(stride=4, update_every=2) for _ in range(2))
    whole.read(STREAM)
    first.read(STREAM[:30])  # an update has half of its blocks
    first.save(tmp_path / "learner")
    resumed = OnlineLearner.load(tmp_path / "learner")
    resumed.read(STREAM[30:])
    assert resumed.slow_because is None
    assert same(resumed, whole)


def test_a_model_that_cannot_be_compiled_learns_in_plain_torch():
    learner = learner_of(build("mgrade", state_size=None), stride=4)
    learner.read(STREAM)
    assert learner.updates > 10
    assert learner.slow_because.startswith("unsupported operator: ")


def test_learning_rate_factors_of_the_model(tmp_path):
    set_seed(7)
    config = LruConfig(hidden_size=16, state_size=12, num_hidden_layers=1, vocab_size=256, learning_rate_factor=0.5)
    learner = learner_of(AutoModelForCausalLM.from_config(config))
    learner.read(STREAM[:20])
    learner.save(tmp_path / "learner")
    for rate, loaded in (
        (1e-2, OnlineLearner.load(tmp_path / "learner")),
        (4e-3, OnlineLearner.load(tmp_path / "learner", learning_rate=4e-3)),
    ):
        assert [group["lr"] for group in loaded.step.optimizer.param_groups] == [rate, rate / 2]


def test_memory_does_not_grow():
    learner = learner_of(stride=2)

    def tensors():
        gc.collect()
        return sum(item.numel() for item in gc.get_objects() if type(item) is torch.Tensor)

    learner.read(STREAM[:60])
    before = tensors()
    learner.read(STREAM)
    assert tensors() == before
    assert len(learner.stream.waiting) < 2


def test_bad_input_is_named():
    for settings, message in (
        ({"rule": "bptt"}, "`rule` is 'bptt'; it must be one of"),
        ({"optimizer": "lion"}, "`optimizer` is 'lion'"),
        ({"stride": 0}, "`stride` is 0"),
        ({"update_every": 1.5}, "`update_every` is 1.5"),
        ({"window": 10**12}, "`window` is 1000000000000; it must be an integer from 1 to 1000000000"),
        ({"learning_rate": 0}, "`learning_rate` is 0"),
        ({"learning_rate": "fast"}, "`learning_rate` is 'fast'"),
        ({"max_grad_norm": -1}, "`max_grad_norm` is -1"),
        ({"tokenizer": "byte"}, "`tokenizer` is a str; it must have `encode_bytes`"),
    ):
        with pytest.raises(ValueError, match=message):
            learner_of(**settings)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    with pytest.raises(ValueError, match="LlamaForCausalLM, which carries no state"):
        OnlineLearner(llama)
    learner = learner_of()
    for data in ("text", 5, None):
        with pytest.raises(ValueError, match="it must be bytes"):
            learner.read(data)
    for source in (["text"], [5]):
        with pytest.raises(ValueError, match="it must be bytes"):
            list(learner.learn(source))
    with pytest.raises(ValueError, match="`report_every` is 0"):
        list(learner.learn([], 0))
    small = learner_of(build(vocab_size=7))
    with pytest.raises(ValueError, match="the token 84; it must be below the vocabulary size 7"):
        small.read(b"ACGT")
    assert small.bytes_read == 0
    dna = OnlineLearner(small.model, DNATokenizer())
    assert dna.read(b"ACGTACGT").updates == 7


def test_the_meter_is_the_mean_of_what_it_was_given():
    numbers = np.random.default_rng(0).random(50)
    for size in (1, 7, 30):
        meter = PrequentialMeter(12)
        assert meter.bits_per_byte is None
        assert meter.windowed_bits_per_byte is None
        for begin in range(0, 50, size):
            meter.add(numbers[begin : begin + size])
            end = min(begin + size, 50)
            assert meter.bits_per_byte == pytest.approx(numbers[:end].mean() / math.log(2))
            assert meter.windowed_bits_per_byte == pytest.approx(numbers[max(end - 12, 0) : end].mean() / math.log(2))
