"""`VectorLearner`: gradients, scales and refusals."""

import itertools

import numpy as np
import pytest
import torch

import hf_recurrent as hf
from hf_recurrent.online.vector_learner import half_mean_square, predict_scaled


def build(**settings):
    learner = hf.VectorLearner.new(2, seed=1, config={"hidden_size": 6, "state_size": 4}, window=10, **settings)
    torch.nn.init.normal_(learner.model.score.weight, generator=torch.Generator().manual_seed(0))
    return hf.VectorLearner(learner.model.double(), window=10, **settings)


def series(size):
    return torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 5


def reference_scales(data, window):
    """Running mean and deviation after each vector, as NumPy computes them."""
    mean, variance, scales = np.zeros(2), np.zeros(2), []
    for count, vector in enumerate(data.numpy()):
        rate = max(1 / (count + 1), 1 / window)
        change = vector - mean
        mean, variance = mean + rate * change, (1 - rate) * (variance + rate * change**2)
        scales.append((mean, np.where(variance > 0, np.sqrt(variance), 1)))
    return scales


def test_gradients_are_those_of_backpropagation_through_all_of_the_past():
    learner, data = build(optimizer="sgd", learning_rate=1e-300, max_grad_norm=0), series(25)
    gradients = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: weight.grad.clone() for name, weight in learner.parameters.items()})
    )
    scores = [learner.learn(vector) for vector in data]
    scales = reference_scales(data, 10)
    state, error, errors = learner.model.model.init_state(1), None, []
    for (before, after), (mean, deviation) in zip(itertools.pairwise(data), scales[1:], strict=True):
        current, following = ((x - torch.tensor(mean)) / torch.tensor(deviation) for x in (before, after))
        found, state = predict_scaled(learner.model, current, state)
        error = found - following
        errors.append(error.detach().numpy() ** 2)
    loss = half_mean_square(error)
    for (name, found), expected in zip(
        gradients.items(), torch.autograd.grad(loss, list(learner.parameters.values())), strict=True
    ):
        # Before the unit, the gradient through the past ends: the encoder and the norm get the last step's.
        if "embed_tokens" not in name and "norm" not in name:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    usual, expected = np.ones(2), [0.0]
    for count, square in enumerate(errors, 1):
        expected.append((square / (usual + 1e-8)).mean())
        usual = usual + max(1 / (count + 1), 1 / 10) * (square - usual)
    np.testing.assert_allclose(scores, expected, rtol=1e-9)


def test_a_wave_is_learned_and_a_change_is_noticed():
    learner = hf.VectorLearner.new(1, config={"hidden_size": 8, "state_size": 8}, learning_rate=3e-3)
    wave, scores, errors = np.sin(np.arange(160) / 2)[:, None], [], []
    for vector in wave:
        errors.append(abs(learner.predict().item() - vector[0]) if scores else 0.0)
        scores.append(learner.learn(vector))
    assert np.mean(errors[-40:]) < 0.5 * np.abs(np.diff(wave[-40:, 0])).mean()
    assert learner.learn([5.0]) > 20 * max(scores[-40:])


def test_what_is_refused():
    learner = build()
    with pytest.raises(ValueError, match="Nothing was read since the beginning of the series"):
        learner.predict()
    learner.learn([1, 2])
    with pytest.raises(ValueError, match=r"`values` has shape \(3,\); it must be \(2,\)"):
        learner.learn([1, 2, 3])
    for value in (float("nan"), float("inf"), 1e16):
        with pytest.raises(ValueError, match="values must be finite and at most 1e"):
            learner.learn([1, value])
    assert learner.vectors_read == 1
    weights = [weight.detach().clone() for weight in learner.model.parameters()]
    learner.state = {name: torch.full_like(part, torch.nan) for name, part in learner.state.items()}
    with pytest.raises(ValueError, match="nothing was learned from this vector"):
        learner.learn([2, 2])
    assert all(map(torch.equal, weights, learner.model.parameters())) and learner.vectors_read == 1
    with pytest.raises(ValueError, match="`optimizer` is 'adam'; it must be one of adamw, rmsprop, sgd"):
        hf.VectorLearner.new(1, optimizer="adam")
    model = hf.MemoraForCausalLM(hf.config_from_preset("memora-tiny", hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match="`model` is a MemoraForCausalLM that reads no vectors"):
        hf.VectorLearner(model)
    config = hf.LruConfig(hidden_size=8, state_size=8, num_hidden_layers=1, input_size=2, num_labels=3)
    with pytest.raises(ValueError, match="`model` gives 3 values; it must give `input_size`, 2"):
        hf.VectorLearner(hf.LruForSequenceClassification(config))
