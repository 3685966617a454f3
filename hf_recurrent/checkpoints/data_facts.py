"""Facts of training data."""

from typing import Any

from hf_recurrent.checkpoints.privacy import public_data_name
from hf_recurrent.checkpoints.records import Data


def describe_data(source: Any) -> Data:
    """Facts of a source of episodes (`EpisodeSource`)."""
    size = source.tokens_per_epoch
    return Data(
        name=public_data_name(source.name),
        fingerprint=source.fingerprint,
        unit=source.unit,
        size=int(size) if size < float("inf") else None,
        documents=len(source) if hasattr(source, "__len__") else None,
    )
