"""Budgets of BPTT against SMT→DMT."""

from papers import load_experiment
from papers.engine.tuning import tuned

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_bptt_has_the_steps_that_smt_has_sequential_operations_for(tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time. " * 90)
    small = {
        "sizes": SHAPE, "steps": 6, "dmt_steps": 2, "batch_size": 2, "eval_windows": 2, "eval_bytes": 100, "seed": 0,
        "corpus": str(tmp_path / "text.txt"), "context_length": 4, "future_length": 2, "rollout_length": 4,
    }  # fmt: skip
    experiment = load_experiment("smt-text")
    rows = {row["label"]: row for row in experiment.rows("small")}
    smt, bptt = (
        experiment.run({**tuned(experiment, rows[label], []), **small})
        for label in ("SMT→DMT", "BPTT, equal sequential operations")
    )
    one_step = bptt["sequential_operations"] / bptt["bptt_steps"]
    assert 0 <= smt["sequential_operations"] - bptt["sequential_operations"] < one_step
    assert rows["BPTT, equal steps"]["bptt_share"] == 1
    assert experiment.tuning_loss({**rows["SMT→DMT"], "value": {"SMT→DMT": 2.0, "SMT": 5.0, "teacher": 1.0}}) == 2.0
