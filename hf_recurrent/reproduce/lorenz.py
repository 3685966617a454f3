"""Lorenz attractor from one noisy dimension: mGRADE against minGRU (mGRADE, section 4.1, figure 2)."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_recurrent.reproduce.experiment import Experiment, Settings

# Section 4: without MLP and LayerNorm, ten hidden states.
_SIZES = {"input_size": 1, "hidden_size": 10, "mlp_layers": 0, "layer_norm": False}
# Label → fields of the configuration.
MODELS: dict[str, Settings] = {
    "mGRADE-L, one layer": _SIZES
    | {"num_hidden_layers": 1, "spacing": "learned", "conv_kernel": 8, "receptive_field": 16},
    "minGRU, two layers": _SIZES | {"num_hidden_layers": 2, "spacing": None},
}
SIZES: dict[str, Settings] = {
    "small": {"num_trajectories": 2000, "num_steps": 200, "epochs": 10, "num_tested": 200},
    "paper": {"num_trajectories": 2000, "num_steps": 500, "epochs": 100, "num_tested": 500},
}
# Steps of the integration: the paper prints none, and the answer depends on it.
TIME_STEPS = (0.02, 0.05, 0.1)
OBSERVED = "observed dimension"
LINEAR, QUADRATIC = "unobserved dimensions, linear readout", "unobserved dimensions, quadratic readout"
_NEIGHBOURS, _POINTS = 20, 2000


class LorenzReconstruction(Experiment):
    name = "lorenz"
    source = "mGRADE, Figure 2"
    claim = (
        "Trained to predict one noisy dimension a step ahead, one layer of mGRADE holds the other two in its hidden "
        "states, so that a readout of them is better than repeating the present value (below 1); two layers of minGRU "
        "do not (above 1), and keep fewer of a point's neighbours."
    )
    metric = "mean absolute scaled error"
    paper = {  # noqa: RUF012 (read only)
        f"{label}, dt {dt}: {LINEAR}": printed
        for dt in TIME_STEPS
        for label, printed in (("mGRADE-L, one layer", "below 1"), ("minGRU, two layers", "above 1"))
    }

    def rows(self, size: str) -> list[Settings]:
        shared = {"noise": 0.05, "batch_size": 32, "learning_rate": 1e-2, **SIZES[size]}
        return [
            {"label": f"{label}, dt {dt}", "options": options, "dt": dt, **shared}
            for dt in TIME_STEPS
            for label, options in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        from transformers import AutoModel

        from hf_recurrent import LorenzTrajectories, MgradeConfig
        from hf_recurrent.reproduce.supervised import build_supervised, train_supervised

        seed = settings["seed"]
        options = {"seed": seed, "dt": settings["dt"], "noise": settings["noise"]}
        train = LorenzTrajectories(settings["num_trajectories"], settings["num_steps"], "train", **options)
        test = LorenzTrajectories(settings["num_tested"], settings["num_steps"], "test", **options)
        model = NextStepRegressor(build_supervised(AutoModel, MgradeConfig(**settings["options"]), seed))
        results = train_supervised(
            model,
            train,
            steps=max(settings["epochs"] * len(train) // settings["batch_size"], 1),
            batch_size=settings["batch_size"],
            learning_rate=settings["learning_rate"],
            warmup_share=0.1,
            seed=seed,
        )
        return {**results, **measure(model, train, test)}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, value in row["value"].items():
            yield f"{row['label']}: {kind}", None, value

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        overlaps: dict[str, list[float]] = {}
        for other in rows:
            overlaps.setdefault(other["label"], []).append(100 * other["neighbour_overlap"])
        shares = "; ".join(f"{label} {statistics.fmean(values):.1f}" for label, values in overlaps.items())
        return (
            f"{row['num_trajectories']:,} trajectories of {row['num_steps']} steps, noise "
            f"{row['noise']:g} of a dimension's deviation, {row['epochs']} epochs of batches of {row['batch_size']}, "
            f"learning rate {row['learning_rate']:g} with warm-up and cosine; {row['num_tested']} other trajectories "
            "to judge, without noise in what is to be predicted. The readouts of the dimensions that training never "
            "showed are least-squares fits to the frozen hidden states; the quadratic one is there because the system "
            "is the same for (x, y, z) and (-x, -y, z), which hides z from linear maps of states that are odd in x. "
            f"Of a point's {_NEIGHBOURS} nearest neighbours on the attractor its hidden state keeps, in %: {shares}."
        )


class NextStepRegressor(nn.Module):
    """A model of real values and a linear map of its hidden states to the next value of what it sees."""

    def __init__(self, backbone: Any):
        super().__init__()
        self.backbone = backbone
        self.readout = nn.Linear(backbone.config.hidden_size, backbone.config.input_size)

    def parameters_without_weight_decay(self) -> set[str]:
        """As the backbone has it."""
        return {f"backbone.{name}" for name in self.backbone.parameters_without_weight_decay()}

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor, **kwargs) -> dict[str, torch.Tensor]:
        """(B, T, D) and the same a step later → the mean absolute scaled error."""
        from hf_recurrent import mean_absolute_scaled_error

        return {"loss": mean_absolute_scaled_error(self.readout(self.hidden_states(input_values)), labels)}

    def hidden_states(self, input_values: torch.Tensor) -> torch.Tensor:
        """(B, T, D) → (B, T, M)."""
        return self.backbone(input_values=input_values, use_cache=False).last_hidden_state


@torch.no_grad()
def measure(model: NextStepRegressor, train: Any, test: Any) -> dict[str, Any]:
    """Errors on the observed dimension and, with a readout fitted to the training states, on the others; the share of
    nearest neighbours that the hidden states keep."""
    from hf_recurrent import mean_absolute_scaled_error

    model.eval()
    states, targets, observed = _states(model, train)
    fits = {kind: fit_readout(features(states), targets) for kind, features in FEATURES.items()}
    states, targets, observed = _states(model, test)
    labels = torch.from_numpy(test.clean[:, 1:, test.observed : test.observed + 1])
    overlap = neighbour_overlap(torch.from_numpy(test.clean[:, :-1]).flatten(0, 1), states.flatten(0, 1))
    return {
        "value": {
            OBSERVED: mean_absolute_scaled_error(observed, labels).item(),
            **{
                kind: mean_absolute_scaled_error(features(states) @ fits[kind], targets).item()
                for kind, features in FEATURES.items()
            },
        },
        "neighbour_overlap": overlap,
    }


def _states(model: NextStepRegressor, data: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the unobserved dimensions a step later and the prediction of the observed one; float64."""
    device = model.readout.weight.device
    items = [data[index] for index in range(len(data))]
    states, predictions = [], []
    for first in range(0, len(items), 100):
        hidden = model.hidden_states(
            torch.stack([item["input_values"] for item in items[first : first + 100]]).to(device)
        )
        states.append(hidden.double().cpu())
        predictions.append(model.readout(hidden).double().cpu())
    targets = torch.stack([item["unobserved"] for item in items]).double()
    return torch.cat(states), targets, torch.cat(predictions)


def linear_features(states: torch.Tensor) -> torch.Tensor:
    """The states and a one: (..., M) → (..., M + 1)."""
    return torch.cat([states, torch.ones_like(states[..., :1])], dim=-1)


def quadratic_features(states: torch.Tensor) -> torch.Tensor:
    """Products of all pairs as well: (..., M) → (..., (M + 1)(M + 2) / 2)."""
    features = linear_features(states)
    first, second = torch.triu_indices(features.shape[-1], features.shape[-1])
    return features[..., first] * features[..., second]


FEATURES = {LINEAR: linear_features, QUADRATIC: quadratic_features}


def fit_readout(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Weights (F, D) of the least squares from (..., F) to (..., D), by the normal equations in float64."""
    features, targets = features.flatten(0, -2), targets.flatten(0, -2)
    # "gelsd" because states may depend on each other.
    return torch.linalg.lstsq(features.T @ features, features.T @ targets, driver="gelsd").solution


def neighbour_overlap(original: torch.Tensor, hidden: torch.Tensor) -> float:
    """Share of the nearest neighbours of some points (n, 3) that are also nearest in the hidden states (n, M)."""
    chosen = torch.linspace(0, len(original) - 1, min(_POINTS, len(original))).long()
    count = min(_NEIGHBOURS, len(chosen) - 1)
    nearest = []
    for points in (original[chosen], hidden[chosen]):
        distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
        nearest.append(distances.topk(count, largest=False).indices)
    same = nearest[0].unsqueeze(2) == nearest[1].unsqueeze(1)
    return same.any(2).double().mean().item()


EXPERIMENT = LorenzReconstruction()
