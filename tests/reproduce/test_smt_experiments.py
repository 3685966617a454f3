"""What SMT's experiments count, measure and draw, on cases whose answer is known."""

import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_recurrent import Retrieval, StackOperations, StringCopy
from hf_recurrent.reproduce import load_experiment
from hf_recurrent.reproduce.smt_gradients import bptt_norms, scale_maps, smt_norms
from hf_recurrent.reproduce.smt_memory_space import memories_over_time, what_matters
from hf_recurrent.reproduce.smt_operations import critical_path, step_operations
from hf_recurrent.reproduce.smt_pictures import as_colours, image_sheet, pack, project, unpack
from hf_recurrent.reproduce.smt_pixels import DigitPixels, draw_samples
from hf_recurrent.reproduce.smt_tasks import solved_words
from hf_recurrent.reproduce.smt_training import build_pair

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_critical_path_is_the_longest_chain():
    weight = torch.randn(3, 3, requires_grad=True)
    hidden = torch.ones(2, 3)
    for _ in range(4):
        hidden = (hidden @ weight).tanh().view(2, 3)  # two operations; a view is none
    short = (torch.ones(2, 3) @ weight).sum()
    assert critical_path(hidden.sum() + short) == 4 * 2 + 2
    assert critical_path(short) == 2


def test_sequential_operations_grow_with_the_length_but_for_smt():
    rnn, teacher = build_pair(SHAPE, 5, 0)
    counts = {
        method: [step_operations(rnn, teacher, method, length, 3) for length in (2, 4, 8)]
        for method in ("BPTT", "SMT", "DMT")
    }
    assert len(set(counts["SMT"])) == 1
    for method in ("BPTT", "DMT"):
        first, second, third = counts[method]
        assert 0 < 2 * (second - first) == third - second
    # What an unrolled step adds does not depend on the depth of anything but the update.
    assert counts["BPTT"][1] - counts["BPTT"][0] == counts["DMT"][1] - counts["DMT"][0]
    deeper, deep_teacher = build_pair(SHAPE | {"num_hidden_layers": 2}, 5, 0)
    growth = [step_operations(deeper, deep_teacher, "BPTT", length) for length in (2, 4)]
    assert growth[1] - growth[0] > 1.5 * (counts["BPTT"][1] - counts["BPTT"][0])


def test_gradient_norms_of_the_unrolled_network():
    """By differences: what the loss changes by, with a memory moved a little against its gradient."""
    rnn, _ = (model.double() for model in build_pair(SHAPE, 5, 0))
    task = Retrieval(length=5, vocab_size=5)
    inputs, targets = (torch.from_numpy(part) for part in task.examples(np.arange(1)))
    norms = bptt_norms(rnn, inputs, targets)

    @torch.no_grad()
    def loss(change):
        memory = rnn.init_state(1)["memory"]
        for step in range(5):
            memory = rnn.update(memory, inputs[:, step])
            if step == 1:
                memory = memory + change
        return torch.nn.functional.cross_entropy(rnn.readout(memory), targets[:, -1]).item()

    gradient = torch.zeros(1, 2, 8, dtype=torch.float64)
    for place in range(16):
        step = torch.zeros(16, dtype=torch.float64)
        step[place] = 1e-6
        gradient.view(-1)[place] = (loss(step.view(1, 2, 8)) - loss(-step.view(1, 2, 8))) / 2e-6
    assert norms.shape == (5,)
    assert norms[1].item() == pytest.approx(gradient.norm().item(), rel=1e-5)


def test_gradients_of_smt_do_not_depend_on_the_length():
    """Doubling the maps makes BPTT explode, a step of SMT does not notice how far the end is."""
    shape = SHAPE | {"num_memory_tokens": 8, "num_readout_layers": 4}
    rnn, teacher = (model.double() for model in build_pair(shape, 5, 0))
    for model in (rnn, teacher):
        before = model.lm_head.weight.clone()
        scale_maps(model, 3.0)
        assert torch.equal(model.lm_head.weight, before)
    task = Retrieval(length=48, vocab_size=5)
    inputs, targets = (torch.from_numpy(part) for part in task.examples(np.arange(3)))
    ratios = [
        (norms.max() / norms.min()).item()
        for norms in (bptt_norms(rnn, inputs, targets), smt_norms(rnn, teacher, inputs, targets))
    ]
    assert ratios[0] > 1000 > 50 > ratios[1]


def test_what_matters_of_the_past():
    tasks = {
        "retrieval": Retrieval(6, 4),
        "string copy": StringCopy(4, 3),
        "stack operations": StackOperations(8, 2, 3),
    }
    for name, task in tasks.items():
        inputs, targets = task.examples(np.arange(50))
        states = what_matters(name, inputs)
        # The state before an answer, and the input, decide it.
        seen = {}
        for row, step in np.argwhere(targets >= 0):
            before = states[row, step - 1]
            answer = targets[row, step]
            assert seen.setdefault((before, step if name == "retrieval" else 0), answer) == answer
    assert what_matters("stack operations", np.array([[1, 2, 0, 0, 2]])).tolist() == [[1, 5, 1, 0, 2]]
    assert what_matters("retrieval", np.array([[3, 0, 2, 1, 0]])).tolist() == [[0, 1, 3, 3, 3]]


def test_memories_over_time_are_those_of_the_models():
    shape = SHAPE | {"num_memory_tokens": 1, "memory_size": 2, "memory_norm": False}
    rnn, teacher = build_pair(shape, 4, 0)
    inputs, _ = Retrieval(6, 4).examples(np.arange(3))
    labels, own = memories_over_time(rnn, teacher, inputs)
    ids = torch.from_numpy(inputs)
    torch.testing.assert_close(labels[:, 3], teacher.encode(ids[:, :4]).flatten(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own[:, 5], rnn(ids, use_cache=True).state["memory"].flatten(1), atol=1e-5, rtol=1e-5)


def test_digits_are_read_pixel_after_pixel(write_digits):
    task = DigitPixels(data=write_digits("t10k", 40, side=8), pooling=2, levels=4)
    assert (task.length, task.vocab_size) == (16, 5)
    inputs, targets = task.examples(np.arange(20))
    assert (inputs[:, 0] == 4).all() and (inputs[:, 1:] == targets[:, :-1]).all()
    assert set(np.unique(targets)) == set(range(4))
    held_out = {tuple(row) for row in task.examples(np.arange(100), "validation")[1].tolist()}
    assert len(held_out) == 6 and not held_out & {tuple(row) for row in task.examples(np.arange(200))[1].tolist()}
    cropped = DigitPixels(data=task.data, crop=1, pooling=3, levels=4)
    whole = DigitPixels(data=task.data)
    square = whole.examples(np.arange(20))[1].reshape(20, 8, 8)[:, 1:4, 1:4]
    assert (cropped.examples(np.arange(20))[1][:, 0] == np.rint(square.mean((1, 2))).astype(int) // 64).all()
    assert task.fingerprint != DigitPixels(data=task.data, pooling=2, levels=2).fingerprint
    samples = draw_samples(build_pair(SHAPE, 5, 0)[0], task, 3, seed=0)
    assert samples.shape == (3, 16) and samples.max() < 4


def test_missing_digits_are_named(tmp_path):
    experiment = load_experiment("smt-pixels")
    settings = {**experiment.rows("small")[0], "data": str(tmp_path / "nothing"), "seed": 0}
    with pytest.raises(FileNotFoundError, match=r"`data` is '.*nothing', but .*--override data=FOLDER"):
        experiment.run(settings)


def test_where_a_method_falls_below():
    curves = {
        "retrieval, BPTT": {8.0: [0.99, 0.97], 16.0: [0.99, 0.5], 32.0: [0.2]},
        "retrieval, SMT→DMT": {8.0: [1.0], 16.0: [0.96]},
    }
    words = solved_words(curves)
    assert words == "Retrieval at 95 %: SMT→DMT stays above to T = 16, BPTT falls below at T = 16. "
    assert solved_words({}) == ""


def test_arrays_in_rows():
    for array in (np.arange(6).reshape(2, 3), np.array([[300, 2]]), np.array([0.5, -math.pi])):
        again = unpack(pack(array))
        assert again.shape == array.shape
        assert np.allclose(again, array, rtol=1e-3)
    sheet = image_sheet(np.arange(4 * 4).reshape(4, 2, 2), 2)
    assert sheet.tolist()[:3] == [[0, 1, 15, 4, 5, 15], [2, 3, 15, 6, 7, 15], [15] * 6]


def test_projections():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(50, 2)) * [5, 1] @ np.linalg.qr(generator.normal(size=(6, 6)))[0][:2] + 3
    flat = project(points, 2)
    assert flat.var(0)[0] > flat.var(0)[1] and abs(np.cov(flat.T)[0, 1]) < 1e-9
    # A turn in the plane of the points: distances stay.
    assert np.allclose(np.linalg.norm(flat[1:] - flat[:-1], axis=1), np.linalg.norm(points[1:] - points[:-1], axis=1))
    colours = as_colours(flat)
    assert colours.min() == 0 and colours.max() == 1
    with pytest.raises(ValueError, match="method is 'umap', allowed is pca or tsne"):
        project(points, 2, "umap")
    with pytest.raises(ValueError, match="has no 3 dimensions"):
        project(points[:, :2], 3)


def test_tsne_or_what_it_needs():
    points = np.random.default_rng(0).normal(size=(20, 4))
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="t-SNE needs the scikit-learn package: pip install scikit-learn"):
            project(points, 2, "tsne")
    else:
        assert project(points, 2, "tsne").shape == (20, 2)


def test_the_memory_over_an_image(write_digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    script = Path(__file__).parents[2] / "scripts" / "picture_memory.py"
    build_pair(SHAPE, 256, 0)[0].save_pretrained(tmp_path / "rnn")
    corpus = "mnist:" + write_digits("train", 3, side=28)
    output = tmp_path / "memory.png"
    arguments = [str(tmp_path / "rnn"), corpus, "--output", str(output), "--images"]
    monkeypatch.setattr(sys, "argv", ["picture_memory.py", *arguments, "1"])
    runpy.run_path(str(script), run_name="__main__")
    assert output.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["picture_memory.py", *arguments, "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert "--images has 3, allowed is 0 to 2" in capsys.readouterr().err
