"""The script that tries settings scores them on training documents that it sets aside."""

import math

from scripts.tune_recipe import main

ARGUMENTS = [
    "--train_bytes", "500", "--block_size", "16", "--per_device_train_batch_size", "4", "--max_corpus_bytes", "6e5",
    "--max_eval_bytes", "1e4", "--config_overrides", "hidden_size=16", "state_size=16", "--matrix_optimizer", "muon",
    "--threads", "1",
]  # fmt: skip


def test_settings_are_scored_on_documents_that_judge_nothing(monkeypatch):
    result = main(ARGUMENTS)
    assert 4 < result["tuning"] < 9 and "held_out" not in result and result["arguments"] == ARGUMENTS
    monkeypatch.setenv("TUNE_HELD_OUT", "1")
    again = main(ARGUMENTS)
    assert again["tuning"] == result["tuning"] and math.isfinite(again["held_out"])
