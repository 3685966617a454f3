"""Lorenz attractor from one noisy dimension: mGRADE against minGRU, and principal components of their hidden states
(mGRADE, section 4.1, appendix A.2, figures 2 and S1)."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel

from hf_recurrent import MgradeConfig
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import pack, principal_components, split_axes, unpack
from papers.engine.supervised import Wrapper, train_supervised
from papers.engine.training import new_model
from papers.mgrade.lorenz_system import LorenzTrajectories, scaled_error

# Section 4: without MLP and LayerNorm, ten hidden states.
SIZES = {"input_size": 1, "hidden_size": 10, "mlp_layers": 0, "layer_norm": False}
# Label → fields of the configuration.
MODELS: dict[str, Settings] = {
    "mGRADE-L, one layer": {"num_hidden_layers": 1, "spacing": "learned", "conv_kernel": 8, "receptive_field": 16},
    "minGRU, two layers": {"num_hidden_layers": 2, "spacing": None},
}
# Steps of the integration. The paper prints none, and the result depends on it.
TIME_STEPS = (0.01, 0.02, 0.05, 0.1)
# Longest delay Γ of mGRADE where it is scaled, in the attractor's time: 16 steps of 0.05.
_SPAN = 0.8
OBSERVED = "observed dimension"
LINEAR, QUADRATIC = "unobserved dimensions, linear readout", "unobserved dimensions, quadratic readout"
_NEIGHBOURS, _POINTS = 20, 2000
# The smallest and the largest step with three recorded seeds in the experiment on figure 2.
COMPONENT_STEPS = (0.02, 0.1)
_COMPONENTS, _DRAWN = 3, 3
# Dimensions of the attractor, to be compared with the components.
_AXES = "xyz"


def _models(dt: float) -> dict[str, Settings]:
    """Models for a step of the integration: also with Γ scaled, where that is another one."""
    mgrade = MODELS["mGRADE-L, one layer"]
    scaled = {**mgrade, "receptive_field": round(_SPAN / dt)}
    return MODELS if scaled == mgrade else {**MODELS, "mGRADE-L, Γ scaled": scaled}


class LorenzReconstruction(Experiment):
    paper = {
        f"{label}, dt {dt}: {LINEAR}": printed
        for dt in TIME_STEPS
        for label, printed in (
            ("mGRADE-L, one layer", "below 1"), ("mGRADE-L, Γ scaled", "below 1"), ("minGRU, two layers", "above 1")
        )
    }  # fmt: skip
    lines = {
        f"{label}, dt {dt}": {"options": SIZES | options, "dt": dt}
        for dt in TIME_STEPS
        for label, options in _models(dt).items()
    }
    shared = {"num_trajectories": 2000, "noise": 0.05, "batch_size": 32, "learning_rate": 1e-2}
    sizes = {
        "small": {"num_steps": 200, "epochs": 10, "num_tested": 200},
        "paper": {"num_steps": 500, "epochs": 100, "num_tested": 500},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        model, train, test, results = train_regressor(settings)
        return {**results, **measure(model, train, test)}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        overlap = statistics.fmean(100 * row["neighbour_overlap"] for row in rows)
        return {**super().details(rows), "neighbours kept, %": f"{overlap:.1f}"}


def trajectories(settings: Settings, count: int, split: str) -> LorenzTrajectories:
    """The first `count` trajectories of a row's split."""
    options = {key: settings[key] for key in ("seed", "dt", "noise")}
    return LorenzTrajectories(count, settings["num_steps"], split, **options)


def train_regressor(
    settings: Settings,
) -> tuple["NextStepRegressor", LorenzTrajectories, LorenzTrajectories, dict[str, Any]]:
    """Train a row's model. Returns it, its trajectories, the test's trajectories, and the results of the training."""
    train = trajectories(settings, settings["num_trajectories"], "train")
    test = trajectories(settings, settings["num_tested"], "test")
    model = NextStepRegressor(new_model(AutoModel, MgradeConfig(**settings["options"]), settings["seed"]))
    return model, train, test, train_supervised(model, train, settings, warmup_share=0.1)


class NextStepRegressor(Wrapper):
    """A model of real values and a linear map from its hidden states to the next observed value."""

    def __init__(self, backbone: Any):
        super().__init__()
        self.backbone = backbone
        self.readout = nn.Linear(backbone.config.hidden_size, backbone.config.input_size)

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor, **kwargs) -> dict[str, torch.Tensor]:
        """Mean absolute scaled error of the predictions from inputs (B, T, I), with the next inputs as labels."""
        return {"loss": scaled_error(self.readout(self.hidden_states(input_values)), labels)}

    def hidden_states(self, input_values: torch.Tensor) -> torch.Tensor:
        """Map inputs (B, T, I) to hidden states (B, T, M)."""
        return self.backbone(input_values=input_values, use_cache=False).last_hidden_state


@torch.no_grad()
def measure(model: NextStepRegressor, train: Any, test: Any) -> dict[str, Any]:
    """Errors on the observed dimension and, by readouts fitted to the training states, on the others; and the share
    of nearest neighbours that the hidden states keep."""
    model.eval()
    states, targets, _ = states_and_targets(model, train)
    fits = {kind: fit_readout(features(states), targets) for kind, features in FEATURES.items()}
    states, targets, observed = states_and_targets(model, test)
    labels = torch.from_numpy(test.clean[:, 1:, :1])
    overlap = neighbour_overlap(torch.from_numpy(test.clean[:, :-1]).flatten(0, 1), states.flatten(0, 1))
    errors = {OBSERVED: scaled_error(observed, labels).item()}
    for kind, features in FEATURES.items():
        errors[kind] = scaled_error(features(states) @ fits[kind], targets).item()
    return {"value": errors, "neighbour_overlap": overlap}


@torch.no_grad()
def states_and_targets(model: NextStepRegressor, data: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the unobserved dimensions one step later and the predicted observed one, in float64."""
    device = model.readout.weight.device
    items = [data[index] for index in range(len(data))]
    states, predictions = [], []
    for first in range(0, len(items), 100):
        inputs = torch.stack([item["input_values"] for item in items[first : first + 100]])
        hidden = model.hidden_states(inputs.to(device))
        states.append(hidden.double().cpu())
        predictions.append(model.readout(hidden).double().cpu())
    targets = torch.stack([item["unobserved"] for item in items]).double()
    return torch.cat(states), targets, torch.cat(predictions)


def linear_features(states: torch.Tensor) -> torch.Tensor:
    """Append a one: (…, M) → (…, M + 1)."""
    return torch.cat([states, torch.ones_like(states[..., :1])], dim=-1)


def quadratic_features(states: torch.Tensor) -> torch.Tensor:
    """Append a one and the products of all pairs: (…, M) → (…, (M + 1)(M + 2) / 2)."""
    features = linear_features(states)
    first, second = torch.triu_indices(features.shape[-1], features.shape[-1])
    return features[..., first] * features[..., second]


FEATURES = {LINEAR: linear_features, QUADRATIC: quadratic_features}


def fit_readout(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Least-squares weights (features, outputs) from features (…, features) to targets (…, outputs), by the normal
    equations."""
    features, targets = features.flatten(0, -2), targets.flatten(0, -2)
    # "gelsd" because states may be linearly dependent.
    return torch.linalg.lstsq(features.T @ features, features.T @ targets, driver="gelsd").solution


def neighbour_overlap(original: torch.Tensor, hidden: torch.Tensor) -> float:
    """Share of the nearest neighbours of points (points, 3) that are also nearest in the hidden states (points, M)."""
    chosen = torch.linspace(0, len(original) - 1, min(_POINTS, len(original))).long()
    count = min(_NEIGHBOURS, len(chosen) - 1)
    nearest = []
    for points in (original[chosen], hidden[chosen]):
        distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
        nearest.append(distances.topk(count, largest=False).indices)
    same = nearest[0].unsqueeze(2) == nearest[1].unsqueeze(1)
    return same.any(2).double().mean().item()


class LorenzComponents(LorenzReconstruction):
    paper = {}
    lines = {
        f"{label}, dt {dt}": {"options": SIZES | options, "dt": dt}
        for dt in COMPONENT_STEPS
        for label, options in MODELS.items()
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        model, _, test, results = train_regressor(settings)
        states = states_and_targets(model.eval(), test)[0].numpy()
        components = principal_components(states.reshape(-1, states.shape[-1]), _COMPONENTS)
        drawn = components.reshape(*states.shape[:2], _COMPONENTS)[:_DRAWN]
        points = torch.from_numpy(test.clean[:, :-1]).flatten(0, 1)
        return {
            **results,
            "value": explained_variance(components, states),
            "neighbour_overlap": neighbour_overlap(points, torch.from_numpy(components)),
            "components": pack(drawn),
        }

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """A row of panels for the attractor and one for each model, three columns for each time step."""
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        steps = list(dict.fromkeys(row["dt"] for row in rows))
        columns = [[row for row in rows if row["dt"] == step] for step in steps]
        height = 1 + max(map(len, columns))
        panels = split_axes(axes, height, 3 * len(steps), (5.5 * len(steps), 2.1 * height))
        for panel in panels:
            panel.axis("off")
        for place, same in enumerate(columns):
            own = [panels[number * 3 * len(steps) + 3 * place :][:3] for number in range(height)]
            attractor = trajectories(same[0], _DRAWN, "test").clean[:, :-1]
            _draw_pairs(own[0], attractor, list(_AXES), f"attractor, dt {same[0]['dt']}")
            for row, triple in zip(same, own[1:], strict=False):
                names = [f"PC{number} ({100 * share:.0f} %)" for number, share in row["value"].items()]
                _draw_pairs(triple, unpack(row["components"]).astype(np.float64), names, row["label"])


def explained_variance(components: np.ndarray, states: np.ndarray) -> dict[str, float]:
    """Number of a component → its share of the variance of states (…, M), from their projections (points, numbers)."""
    whole = states.reshape(-1, states.shape[-1]).var(0).sum()
    return {str(number): float(variance / whole) for number, variance in enumerate(components.var(0), start=1)}


def _draw_pairs(panels: Sequence[Any], tracks: np.ndarray, names: Sequence[str], title: str) -> None:
    """Draw tracks (trajectories, T, 3), one pair of their numbers in each panel."""
    for panel, (first, second) in zip(panels, itertools.combinations(range(3), 2), strict=True):
        panel.axis("on")
        for track in tracks:
            # Smooth lines would make the file four times as large.
            panel.plot(track[:, first], track[:, second], linewidth=0.5, antialiased=False)
        panel.set(xlabel=names[first], ylabel=names[second], xticks=[], yticks=[])
    panels[1].set_title(title, fontsize="medium")
