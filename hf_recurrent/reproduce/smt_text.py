"""Text byte by byte: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.3)."""

from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import BPTT, PAPER_MODEL, SMALL_MODEL, SMT, SMT_DMT, TEACHER

SIZES: dict[str, Settings] = {
    "small": {
        "sizes": SMALL_MODEL | {"hidden_size": 64},
        "corpus": "python",
        "steps": 1500,
        "dmt_steps": 200,
        "batch_size": 32,
        "learning_rate": 3e-3,
        "dmt_learning_rate": 1e-3,
        "bptt_learning_rate": 3e-3,
        "context_length": 32,
        "future_length": 16,
        "rollout_length": 32,
        "timesteps": 1,
        "dmt_timesteps": 8,
        "eval_windows": 128,
        "eval_bytes": 100_000,
    },
    "paper": {
        "sizes": PAPER_MODEL,
        "corpus": "hub:roneneldan/TinyStories",
        "steps": 151_500,
        "dmt_steps": 1500,
        "batch_size": 128,
        "learning_rate": 3e-4,
        "dmt_learning_rate": 3e-5,
        "bptt_learning_rate": 3e-4,
        "context_length": 256,
        "future_length": 64,
        "rollout_length": 256,
        "timesteps": 1,
        "dmt_timesteps": 16,
        "eval_windows": 512,
        "eval_bytes": 1_000_000,
    },
}


class TextMethods(Experiment):
    name = "smt-text"
    source = "SMT, section 3.3, text"
    claim = (
        "At equal optimizer steps, with fewer operations one after another, an RNN after SMT→DMT predicts text about "
        "as well as one after BPTT; its teacher's first prediction is what it can reach."
    )
    metric = "held-out bits per byte"

    def rows(self, size: str) -> list[Settings]:
        return [{"label": method, "method": method, **SIZES[size]} for method in (BPTT, SMT_DMT)]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import load_corpus
        from hf_recurrent.cli.evaluate import limit_bytes
        from hf_recurrent.reproduce.smt_training import build_pair, train_bptt, train_smt_dmt

        corpus, held_out = load_corpus(settings["corpus"]).split()
        held_out = limit_bytes(held_out, settings["eval_bytes"])
        rnn, teacher = build_pair(settings["sizes"], corpus.vocab_size, settings["seed"])
        lengths = {key: settings[key] for key in ("context_length", "future_length", "rollout_length")}
        if settings["method"] == BPTT:
            # As many bytes of each sequence as a step of SMT reads.
            block_size = settings["context_length"] + settings["future_length"]
            results = train_bptt(rnn, corpus, held_out, settings, block_size=block_size)
            return {**results, "value": {BPTT: results["measured"]["bits_per_byte"]}}
        results = train_smt_dmt(rnn, teacher, corpus, held_out, settings, **lengths)
        value = {
            SMT_DMT: results["measured"]["bits_per_byte"],
            SMT: results["measured_smt"]["bits_per_byte"],
            TEACHER: results["measured"]["teacher_bits_per_byte"],
        }
        return {**results, "value": value}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, value in row["value"].items():
            yield kind, None, value

    def note(self, rows: Sequence[Settings]) -> str:
        from hf_recurrent.reproduce.smt_training import cost_words, training_words

        row = rows[0]
        return (
            f"`{row['corpus']}`, {training_words(row)}; Tc = {row['context_length']}, Tf = {row['future_length']}, "
            f"DMT unrolls {row['rollout_length']} bytes, BPTT {row['context_length'] + row['future_length']} with the "
            f"memory carried on. The RNNs read {row['eval_bytes']:,} bytes of whole files, the teacher has the last "
            f"Tc bytes at each of some places. {cost_words(rows)}"
        )


EXPERIMENT = TextMethods()
