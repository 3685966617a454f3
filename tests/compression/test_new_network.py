"""The new networks of archives that need no model file: each number names one for good."""

import pytest

from hf_recurrent.compression import agreement, files
from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
from hf_recurrent.compression.agreement import new_network
from hf_recurrent.compression.archive import ArchiveError, Header, NetworkRecord
from hf_recurrent.compression.byte_coding import counts_version
from hf_recurrent.compression.files import compress, decompress


def test_archives_of_the_first_new_network_open(monkeypatch):
    """It had no tables of n-grams; the number in the settings tells."""
    data = b"a small text, a small text; " * 12
    monkeypatch.setattr(agreement, "NEWEST", 1)
    monkeypatch.setattr(files, "new_network", lambda: new_network(1))
    archive = compress(data, adaptive=AdaptiveSettings())
    monkeypatch.undo()
    assert archive != compress(data, adaptive=AdaptiveSettings())
    assert decompress(archive) == data


@pytest.mark.parametrize("number", [3, "1", -1])
def test_an_unknown_new_network_is_refused(number):
    header = Header(10, counts_version(), NetworkRecord("0", "0", "0"), {"new": number, "adaptive": {}})
    with pytest.raises(ArchiveError, match="new network"):
        agreement.model_of(header, None)
