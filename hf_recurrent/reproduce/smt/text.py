"""Text byte by byte: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.3)."""

from typing import Any

from hf_recurrent.reproduce.engine.experiment import Settings
from hf_recurrent.reproduce.engine.training import split_corpus
from hf_recurrent.reproduce.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, build_pair
from hf_recurrent.reproduce.smt.training import (
    TRAINING_NOTE,
    MethodComparison,
    method_values,
    train_bptt,
    train_smt_dmt,
)


class TextMethods(MethodComparison):
    name = "smt-text"
    source = "SMT, section 3.3, text"
    claim = (
        "At equal optimizer steps, with fewer sequential operations, an RNN after SMT→DMT predicts text about as well "
        "as one after BPTT; its teacher's first prediction is what it can reach."
    )
    note = (
        "`{corpus}`, " + TRAINING_NOTE + ", {bptt_learning_rate:g} (BPTT); Tc = {context_length}, Tf = "
        "{future_length}. DMT unrolls {rollout_length} bytes, BPTT Tc + Tf bytes with the memory carried on. The RNNs "
        "read {eval_bytes:,} bytes of whole files, the teacher has the last Tc bytes at each of some places. "
        "Sequential operations and tokens are those of the whole training."
    )
    metric = "held-out bits per byte"
    part_label = "{part}"
    sizes = {
        "small": {
            "sizes": SMALL_MODEL | {"hidden_size": 64}, "corpus": "python", "eval_bytes": 100_000,
            "steps": 1500, "dmt_steps": 200, "batch_size": 32,
            "learning_rate": 3e-3, "dmt_learning_rate": 1e-3, "bptt_learning_rate": 3e-3,
            "context_length": 32, "future_length": 16, "rollout_length": 32,
            "timesteps": 1, "dmt_timesteps": 8, "eval_windows": 128,
        },
        "paper": {
            "sizes": PAPER_MODEL, "corpus": "hub:roneneldan/TinyStories", "eval_bytes": 1_000_000,
            "steps": 151_500, "dmt_steps": 1500, "batch_size": 128, "dmt_batch_size": 32,
            "learning_rate": 3e-4, "dmt_learning_rate": 3e-5, "bptt_learning_rate": 3e-4,
            "context_length": 256, "future_length": 64, "rollout_length": 256,
            "timesteps": 1, "dmt_timesteps": 16, "eval_windows": 512,
        },
    }  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        corpus, held_out = split_corpus(settings)
        rnn, teacher = build_pair(settings["sizes"], corpus.vocab_size, settings["seed"])
        lengths = {key: settings[key] for key in ("context_length", "future_length", "rollout_length")}
        if settings["method"] == BPTT:
            # As many bytes of each sequence as a step of SMT reads.
            block_size = settings["context_length"] + settings["future_length"]
            results = train_bptt(rnn, corpus, held_out, settings, block_size=block_size)
        else:
            results = train_smt_dmt(rnn, teacher, corpus, held_out, settings, **lengths)
        return {**results, "value": method_values(results, "bits_per_byte")}
