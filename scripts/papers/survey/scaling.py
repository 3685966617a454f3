"""Bits per byte over dense parameters and bytes read, of several families, with power laws fitted (our own)."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from transformers import TrainerCallback

from hf_recurrent import MultiStreamTrainer, MultiStreamTrainingArguments
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.engine.tables import confidence_interval, in_interval, markdown
from papers.engine.training import build_model, logged, run_trainer, split_corpus, steps_of
from papers.smt.models import SMT_DMT, build_pair
from papers.smt.training import method_values, train_smt_dmt

# Millions of dense parameters → layers.
SCALES = {0.1: 2, 0.3: 3, 1.0: 4, 3.0: 6}
_PLAIN, _MIXED = "Memora", "Memora with counts and n-grams"
CONTEXTS: Settings = {
    "ngram_orders": [2, 3, 4, 5, 6], "ngram_rows": 16_384, "count_memory_slots": 65_536, "count_memory_text": 1 << 21,
}  # fmt: skip
_RECURRENT: Settings = {"preset": "memora-tiny", "widths": (48, 72, 120, 176), "block_size": 16}
# With fewer than 64 streams, one file in a few weighs too much. Llama carries no state: its contexts are longer.
FAMILIES: dict[str, Settings] = {
    _PLAIN: _RECURRENT,
    _MIXED: {**_RECURRENT, "fields": CONTEXTS},
    "Hawk": {"preset": "hawk-tiny", "widths": (48, 72, 112, 168), "block_size": 16},
    "mGRADE": {"preset": "mgrade-tiny", "widths": (72, 112, 192, 280), "block_size": 16},
    "Mamba2": {"preset": "mamba2-s0", "widths": (56, 80, 136, 192), "block_size": 16},
    "Llama": {"preset": "llama-s0", "widths": (56, 88, 144, 200), "block_size": 256},
    # Units whose state has four numbers for each of the output, in Memora's block.
    "Memora with mamba2": {"preset": "memora-tiny", "widths": (40,), "block_size": 16, "unit": "mamba2"},
    "Memora with gated_delta": {"preset": "memora-tiny", "widths": (40,), "block_size": 16, "unit": "gated_delta"},
    "Memora with rwkv7": {"preset": "memora-tiny", "widths": (36,), "block_size": 16, "unit": "rwkv7"},
    "SMT": {"preset": "smt-rnn-tiny", "widths": (40, 64, 96, 144), "block_size": 55},
}
# Bytes at which a run is evaluated, as shares of all.
SHARES = (0.125, 0.25, 0.5, 1.0)


class Scaling(Experiment):
    sizes = {
        "small": {"bytes": 524_288, "step_bytes": 1024, "corpus": "python", "eval_bytes": 50_000},
        "paper": {"bytes": 29_360_128, "step_bytes": 2048, "corpus": "python", "eval_bytes": 1_000_000},
    }
    # Candidates of a family are compared once, at the smallest scale.
    tuning = {size: {"scale": 0.1, "label": "0.1 M", "bytes": num_bytes, "eval_bytes": 20_000}
              for size, num_bytes in (("small", 131_072), ("paper", 4_194_304))}  # fmt: skip
    rates = (2e-3, 5e-3, 1.2e-2)

    def rows(self, size: str) -> list[Settings]:
        candidates = [{"learning_rate": rate} for rate in self.rates]
        return [
            {"label": f"{family}, {scale:g} M", "family": family, "scale": scale, "candidates": candidates,
             "block_size": FAMILIES[family]["block_size"], **self.size_settings(size)}
            for scale in SCALES
            for family in FAMILIES
            if list(SCALES).index(scale) < len(FAMILIES[family]["widths"])
        ]  # fmt: skip

    def row_name(self, settings: Settings) -> str:
        return f"{settings['family']}, {settings['scale']:g} M"

    def run(self, settings: Settings) -> dict[str, Any]:
        family, number = FAMILIES[settings["family"]], list(SCALES).index(settings["scale"])
        width, layers = family["widths"][number], SCALES[settings["scale"]]
        rate = settings["learning_rate"] * family["widths"][0] / width
        if settings["family"] == "SMT":
            return _train_smt(settings, width, layers, rate)
        fields = {"hidden_size": width, "num_hidden_layers": layers, **family.get("fields", {})}
        fields |= _shape(family["preset"].partition("-")[0], width, layers)
        if "unit" in family:
            fields |= {"recurrent_unit": family["unit"], "state_size": 4 * fields["state_size"]}
        corpus, held_out = split_corpus(settings)
        model = build_model(family["preset"], corpus.vocab_size, settings["seed"], **fields)
        steps = steps_of(settings, corpus, settings["step_bytes"])
        evaluations = EvaluateAt(max(int(steps * share), 1) for share in SHARES)
        results = run_trainer(
            lambda arguments: MultiStreamTrainer(model, arguments, corpus, held_out, callbacks=[evaluations]),
            MultiStreamTrainingArguments,
            steps=steps,
            measure=lambda trainer: {
                str(step * settings["step_bytes"]): bits
                for step, bits in logged(trainer, "eval_bits_per_byte").items()
            },
            regime="iid" if settings["family"] == "Llama" else "multi_stream",
            block_size=settings["block_size"],
            per_device_train_batch_size=settings["step_bytes"] // settings["block_size"],
            per_device_eval_batch_size=32,
            eval_block_size=256,
            learning_rate=rate,
            lr_scheduler_type="constant_with_warmup",
            seed=settings["seed"],
        )
        dense = sum(weight.numel() for name, weight in model.named_parameters() if "ngram" not in name)
        return {**results, "dense_parameters": dense, "value": results.pop("measured")}

    def points(self, row: Settings) -> Iterable[tuple[str, Any, float]]:
        yield row["family"], row["scale"], last_value(row)

    def tuning_loss(self, row: Settings) -> float:
        return last_value(row)

    def own_table(self, rows: Sequence[Settings]) -> str:
        """Bits per byte of each family at each scale, and its power law; intervals over the seeds."""
        scales = sorted({row["scale"] for row in rows})
        head = ["", *(f"{scale:g} M" for scale in scales)]
        head += ["exponent of parameters", "exponent of bytes", "residual", "seeds"]
        lines = [head]
        for family in dict.fromkeys(row["family"] for row in rows):
            own = [row for row in rows if row["family"] == family]
            at = [[last_value(row) for row in own if row["scale"] == scale] for scale in scales]
            laws = list(laws_of(own).values())
            fitted = [in_interval([law[key] for law in laws]) for key in ("parameters", "bytes", "residual")]
            lines.append([family, *map(in_interval, at), *fitted, str(len(laws))])
        return markdown(lines) + "\n" + _worth_of_contexts(rows)

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        left, right = split_axes(axes, 1, 2, (11, 5))
        for number, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
            own = [row for row in rows if row["family"] == family]
            largest = max(row["scale"] for row in own if row["seed"] == max(row["seed"] for row in own))
            over = [(row["dense_parameters"], last_value(row)) for row in own]
            over_bytes = [(int(b), v) for row in own if row["scale"] == largest for b, v in row["value"].items()]
            for each, points in ((left, over), (right, over_bytes)):
                places = sorted({place for place, _ in points})
                values = [[value for at, value in points if at == place] for place in places]
                means = [statistics.fmean(seeds) for seeds in values]
                bounds = [confidence_interval(seeds) or (seeds[0], seeds[0]) for seeds in values]
                spread = np.abs(np.transpose(bounds) - means)
                each.errorbar(places, means, spread, fmt="o-", color=f"C{number}", capsize=3, label=family)
        for each, text in ((left, "dense parameters"), (right, "bytes read, at the largest size of all seeds")):
            each.set(xscale="log", yscale="log", xlabel=text, ylabel=self.metric)
            each.yaxis.set_major_formatter("{x:g}")
            each.yaxis.set_minor_formatter("{x:g}")
        left.figure.legend(*left.get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=5)


class EvaluateAt(TrainerCallback):
    """Evaluates after the given steps."""

    def __init__(self, steps: Iterable[int]):
        self._steps = set(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate |= state.global_step in self._steps


def _shape(kind: str, width: int, layers: int) -> Settings:
    """Fields of a family's configuration that follow from its width."""
    if kind == "llama":
        return {"intermediate_size": width * 8 // 3, "num_attention_heads": 4}
    if kind == "mamba2":  # two of its layers are a recurrent block and an MLP
        heads = {"num_heads": 4, "head_dim": width // 2, "state_size": 32, "chunk_size": 16}
        return {"num_hidden_layers": 2 * layers, **heads}
    return {} if kind == "mgrade" else {"state_size": width * 3 // 2}


def _train_smt(settings: Settings, width: int, layers: int, rate: float) -> dict[str, Any]:
    """SMT→DMT for each of two numbers of bytes, the last seventh of the steps DMT's."""
    corpus, held_out = split_corpus(settings)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_readout_layers": layers,
             "num_memory_tokens": 4, "num_attention_heads": 4}  # fmt: skip
    batch, value, seconds = 32, {}, 0.0
    for share in SHARES[1::2]:
        steps = max(int(settings["bytes"] * share) // (batch * settings["block_size"]), 7)
        row = {
            "steps": steps, "dmt_steps": steps // 7, "batch_size": batch, "learning_rate": rate,
            "dmt_learning_rate": rate / 3, "timesteps": 8, "dmt_timesteps": 8, "eval_windows": 64,
            "seed": settings["seed"], "smt": {"block_size": settings["block_size"]},
        }  # fmt: skip
        pair = build_pair(sizes, corpus.vocab_size, settings["seed"])
        lengths = {"context_length": 32, "future_length": 16, "rollout_length": 32}
        results = train_smt_dmt(pair, corpus, held_out, row, lengths)
        value[str(int(settings["bytes"] * share))] = method_values(results, "bits_per_byte")[SMT_DMT]
        seconds += results["seconds"]
    kept = {key: results[key] for key in ("num_parameters", "device")}
    return {**kept, "dense_parameters": results["num_parameters"], "seconds": round(seconds, 2), "value": value}


def last_value(row: Settings) -> float:
    """The measurement after the last byte."""
    return list(row["value"].values())[-1]


def fit_power_law(points: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Least squares of log L = log C - p log N - b log D over points (N, D, L).

    Returns:
        `parameters` (p, NaN if all N are equal), `bytes` (b), `log_C`, and `residual`, the root mean square of the
        logarithms' errors.
    """
    parameters, num_bytes, bits = np.log(np.array(points)).T
    varies = np.ptp(parameters) > 0
    terms = np.stack([np.ones_like(bits), -parameters * varies, -num_bytes], 1)
    solution = np.linalg.lstsq(terms, bits, rcond=None)[0]
    residual = np.sqrt(np.mean((terms @ solution - bits) ** 2))
    exponent = solution[1] if varies else np.nan
    return {"log_C": solution[0], "parameters": exponent, "bytes": solution[2], "residual": residual}


def laws_of(rows: Sequence[Settings]) -> dict[int, dict[str, float]]:
    """Seed → the power law of a family's rows, over the scales that all seeds have."""
    by_seed: dict[int, dict[float, Settings]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["scale"]] = row
    shared = set.intersection(*(set(own) for own in by_seed.values()))
    return {
        seed: fit_power_law(
            [(own[s]["dense_parameters"], int(b), v) for s in sorted(shared) for b, v in own[s]["value"].items()]
        )
        for seed, own in by_seed.items()
    }


def _worth_of_contexts(rows: Sequence[Settings]) -> str:
    """Bits per byte that the memory of contexts saves Memora, by scale and bytes, and where a straight line over the
    logarithm of the bytes reaches zero."""
    own = {(row["family"], row["scale"], row["seed"]): row for row in rows if row["family"] in (_PLAIN, _MIXED)}
    saved: dict[float, dict[int, dict[str, float]]] = {}
    for (family, scale, seed), row in own.items():
        if family == _PLAIN and (_MIXED, scale, seed) in own:
            others = own[_MIXED, scale, seed]["value"]
            saved.setdefault(scale, {})[seed] = {n: bits - others[n] for n, bits in row["value"].items()}
    if not saved:
        return ""
    places = list(next(iter(saved[min(saved)].values())))
    head = [f"{_MIXED} saves, after", *(f"{int(place):,}" for place in places)]
    lines = [[*head, "per tenfold bytes", "zero on this line at 10^x bytes"]]
    for scale in sorted(saved):
        seeds = saved[scale].values()
        fits = [np.polyfit(np.log10([int(place) for place in places]), list(each.values()), 1) for each in seeds]
        cells = [[each[place] for each in seeds] for place in places]
        cells += [[slope for slope, _ in fits], [-level / slope if slope < 0 else np.nan for slope, level in fits]]
        lines.append([f"{scale:g} M", *map(in_interval, cells)])
    shared = set.intersection(*(set(each) for each in saved.values()))
    if len(saved) > 1 and shared:
        sizes = np.log10([own[_PLAIN, scale, min(shared)]["dense_parameters"] for scale in sorted(saved)])
        slopes = [
            [
                np.polyfit(sizes, [saved[scale][seed][place] for scale in sorted(saved)], 1)[0]
                for seed in sorted(shared)
            ]
            for place in places
        ]
        lines.append(["per tenfold parameters", *map(in_interval, slopes), "-", "-"])
    return markdown(lines)
