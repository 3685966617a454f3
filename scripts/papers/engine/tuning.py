"""Choose between a row's candidates, such as learning rates, on data that does not judge."""

from collections.abc import Collection, Sequence

from papers.engine.experiment import Experiment, Settings

# Generated tasks draw other examples with it; texts and images hold out another part, by `is_tuning`.
TUNING_SEED = 1000


def tuning_rows(experiment: Experiment, size: str, row: Settings, overrides: Collection[str] = ()) -> list[Settings]:
    """One row for each of a row's `candidates`; none if there is nothing to choose.

    Args:
        overrides: names of settings that the user has replaced, also here.
    """
    candidates = row.get("candidates", [])
    if len(candidates) < 2:
        return []
    plain = {key: value for key, value in row.items() if key != "candidates"}
    own = {key: value for key, value in experiment.tuning.get(size, {}).items() if key not in overrides}
    shared = {**plain, **own, "seed": TUNING_SEED, "is_tuning": True}
    return [{**shared, **candidate} for candidate in candidates]


def tuned(experiment: Experiment, row: Settings, finished: Sequence[Settings]) -> Settings:
    """The row with the best of its candidates, by the finished rows of [`tuning_rows`] in their order, or without them
    with the first."""
    candidates = row.get("candidates", [{}])
    best = min(range(len(finished)), key=lambda n: experiment.tuning_loss(finished[n]), default=0)
    return {**row, **candidates[best]}
