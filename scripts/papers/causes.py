"""Studies of causes: why a claim of a paper is not seen at the small size, or only in part."""

from papers.engine.factors import FactorStudy

_LORENZ_SIZES = {"input_size": 1, "hidden_size": 10, "mlp_layers": 0, "layer_norm": False}
_MINGRU = {**_LORENZ_SIZES, "spacing": None}
_MGRADE = {**_LORENZ_SIZES, "spacing": "learned", "conv_kernel": 8, "receptive_field": 16}
_LORENZ = "unobserved dimensions, linear readout"
_REAL, _COMPLEX = "real GLRU", "complex GLRU"
_RATE_OF_UNITS = {"learning_rate": 1e-2}  # the best of three for each at the small size
_HAWK_BYTES = {"bytes": {"2,000,000": {"bytes": 2_000_000}, "4,000,000": {"bytes": 4_000_000}}}
_UNIT_BYTES = {"bytes": {"6,000,000": {"bytes": 6_000_000}}}
_ONLINE_HAWK = "RTRL, B = 64, Hawk"
_STREAMS, _IID, _QUARTER = "Memora, streams", "Memora, IID", "Memora, streams, a quarter of the bytes"
# The paper's stories have 900 bytes, the files of the corpus 18,000 on average.
_SHORT = {"episode_bytes": 1000}
_SHORT_EPISODES = {
    "documents of": {
        "1,000 bytes": _SHORT,
        "1,000 bytes, learning rate 0.01": {**_SHORT, "learning_rate": 1e-2},
    }
}
_EPISODES = {"documents of": {f"{length:,} bytes": {"episode_bytes": length} for length in (32, 100, 300, 1000, 4000)}}
_WITH_BIT = {"begins_with_a_bit": True}
# Of text, a block of Tc + Tf bytes has one place whose memory SMT learns.
_MLP_RATES = {"learning_rate": 1e-3, "dmt_learning_rate": 1e-3 / 3}  # chosen from three
_PLACES = {"memories per block": {"8": {"timesteps": 8, "smt": {"block_size": 32 + 16 + 7}}}}
_NARROW = {
    f"{tokens} memory tokens": {
        "sizes": {
            "hidden_size": 8,
            "num_memory_tokens": tokens,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_readout_layers": 2,
        }
    }
    for tokens in (1, 4)
}
_ARITHMETIC = "modular arithmetic"
_HEADS = "induction heads"
_MAMBA2 = {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "chunk_size": 32}
_IMMEDIATE, _EXACT = (f"flip-flop: GLRU, {rule}, AdamW" for rule in ("immediate derivatives", "RTRL"))

_ALL = (
    FactorStudy(
        "why-not-worse-with-training",
        "gradient-alignment",
        "Gradients learned online get worse with training, in the first of four layers.",
        first=("ours, 4 layers, at first", "1"),
        second=("ours, 4 layers, trained", "1"),
        fixed={"ours, 4 layers": {}},
        factors={
            "learning rate": {"0.001": {"learning_rate": 1e-3}},
            "steps": {"1,200": {"steps": 1200}},
            "sequences that begin with a bit,": {
                "300 steps": _WITH_BIT,
                "1,200 steps": {**_WITH_BIT, "steps": 1200},
                "learning rate 0.001": {**_WITH_BIT, "learning_rate": 1e-3},
            },
        },
        seeds=range(5),
    ),
    FactorStudy(
        "why-complex-units",
        "glru-alternatives",
        "The real GLRU is better than the complex one.",
        first=(_REAL, None),
        second=(_COMPLEX, None),
        fixed={_REAL: _RATE_OF_UNITS, _COMPLEX: _RATE_OF_UNITS},
        factors={
            "learning rate": {"0.03": {"learning_rate": 3e-2}},
            "complex unit": {"without its dense map out": {"recurrent_unit": "complex_glru"}},
            **_UNIT_BYTES,
        },
        affected={"complex unit": [_COMPLEX]},
    ),
    FactorStudy(
        "why-mingru-on-text",
        "glru-alternatives",
        "The real GLRU is better than minGRU.",
        first=(_REAL, None),
        second=("minGRU", None),
        fixed={_REAL: _RATE_OF_UNITS, "minGRU": _RATE_OF_UNITS},
        factors=_UNIT_BYTES,
    ),
    FactorStudy(
        "why-hawk-in-streams",
        "memora-against-hawk",
        "Memora is better than Hawk in streams.",
        first=("Memora", None),
        second=("Hawk", None),
        fixed={"Memora": _RATE_OF_UNITS, "Hawk": _RATE_OF_UNITS},
        factors=_HAWK_BYTES,
    ),
    FactorStudy(
        "why-hawk-without-convolution",
        "memora-against-hawk",
        "Memora is better than Hawk without its convolution in streams.",
        first=("Memora", None),
        second=("Hawk without convolution", None),
        fixed={"Memora": _RATE_OF_UNITS, "Hawk without convolution": _RATE_OF_UNITS},
        factors=_HAWK_BYTES,
    ),
    FactorStudy(
        "why-hawk-byte-by-byte",
        "online-memora",
        "Memora is better than Hawk with RTRL and an update after every byte.",
        first=("RTRL, B = 64", "384"),
        second=(_ONLINE_HAWK, "384"),
        fixed={"RTRL, B = 64": {}, _ONLINE_HAWK: {}},
        factors={"Hawk's taps": {"1": {"fields": {"conv_kernel": 1}}}},
        affected={"Hawk's taps": [_ONLINE_HAWK]},
    ),
    FactorStudy(
        "why-hawk-one-step",
        "online-memora",
        "Memora is better than Hawk with one-step BPTT and an update after every byte.",
        first=("one-step BPTT, B = 64", "384"),
        second=("one-step BPTT, B = 64, Hawk", "384"),
        fixed={"one-step BPTT, B = 64": {}, "one-step BPTT, B = 64, Hawk": {}},
        factors={"Hawk's taps": {"1": {"fields": {"conv_kernel": 1}}}},
        affected={"Hawk's taps": ["one-step BPTT, B = 64, Hawk"]},
    ),
    FactorStudy(
        "why-streams-at-16",
        "stride-sweep",
        "Streams are better than IID at T = 16.",
        first=(f"{_IID}, state zero at each block", "16"),
        second=(_STREAMS, "16"),
        fixed={_IID: {}, _STREAMS: {}},
        where={"stride": 16},
        factors=_EPISODES,
    ),
    FactorStudy(
        "why-a-quarter-at-16",
        "stride-sweep",
        "A quarter of the bytes in streams beats IID at T = 16.",
        first=(f"{_IID}, state zero at each block", "16"),
        second=(_QUARTER, "16"),
        fixed={_IID: {}, _QUARTER: {}},
        where={"stride": 16},
        factors=_SHORT_EPISODES,
    ),
    *(
        FactorStudy(
            f"why-lorenz-{str(dt).replace('.', '')}",
            "lorenz",
            f"mGRADE holds the unobserved dimensions better than minGRU, dt {dt}.",
            first=(f"minGRU, two layers, dt {dt}: {_LORENZ}", None),
            second=(f"mGRADE-L, one layer, dt {dt}: {_LORENZ}", None),
            fixed={f"minGRU, two layers, dt {dt}": {}, f"mGRADE-L, one layer, dt {dt}": {}},
            factors={
                "noise": {"0": {"noise": 0.0}},
                "minGRU's layers": {"1": {"options": {**_MINGRU, "num_hidden_layers": 1}}},
                "mGRADE's layers": {"2": {"options": {**_MGRADE, "num_hidden_layers": 2}}},
            },
            affected={
                "minGRU's layers": [f"minGRU, two layers, dt {dt}"],
                "mGRADE's layers": [f"mGRADE-L, one layer, dt {dt}"],
            },
        )
        for dt in (0.02, 0.05)
    ),
    FactorStudy(
        "why-components",
        "lorenz-components",
        "Three components of mGRADE's states keep more of a point's neighbours than minGRU's, dt 0.1.",
        first=("minGRU, two layers, dt 0.1", None),
        second=("mGRADE-L, one layer, dt 0.1", None),
        fixed={"minGRU, two layers, dt 0.1": {}, "mGRADE-L, one layer, dt 0.1": {}},
        factors={
            "noise": {"0": {"noise": 0.0}},
            "mGRADE's delays up to": {
                f"{steps} steps": {
                    "options": {**_MGRADE, "num_hidden_layers": 1, "conv_kernel": taps, "receptive_field": steps}
                }
                for taps, steps in ((4, 4), (8, 8))
            },
            "minGRU's layers": {"1": {"options": {**_MINGRU, "num_hidden_layers": 1}}},
        },
        affected={
            "mGRADE's delays up to": ["mGRADE-L, one layer, dt 0.1"],
            "minGRU's layers": ["minGRU, two layers, dt 0.1"],
        },
        key="neighbour_overlap",
        metric="neighbours kept",
    ),
    FactorStudy(
        "why-arithmetic",
        "smt-tasks",
        "SMT→DMT answers modular arithmetic as well as BPTT.",
        first=(f"{_ARITHMETIC}, BPTT", "8"),
        second=(f"{_ARITHMETIC}, SMT→DMT", "8"),
        fixed={
            f"{_ARITHMETIC}, BPTT": {"bptt_learning_rate": 3e-3},
            f"{_ARITHMETIC}, SMT→DMT": {"learning_rate": 5e-3, "dmt_learning_rate": 3e-3},
        },
        factors={"steps": {"2,400": {"steps": 2400}, "4,000": {"steps": 4000}}},
    ),
    FactorStudy(
        "why-text-at-equal-steps",
        "smt-text",
        "SMT→DMT predicts text as well as BPTT at equal steps.",
        first=("BPTT, equal steps", None),
        second=("SMT→DMT", None),
        fixed={"BPTT, equal steps": {}, "SMT→DMT": {"learning_rate": 1e-2, "dmt_learning_rate": 1e-2 / 3}},
        factors=_PLACES,
        affected={factor: ["SMT→DMT"] for factor in _PLACES},
    ),
    FactorStudy(
        "why-mlp-as-update",
        "smt-backbones",
        "With an MLP as update SMT→DMT predicts text as well as BPTT at equal sequential operations.",
        first=("MLP: BPTT, equal sequential operations", None),
        second=("MLP: SMT→DMT", None),
        fixed={"MLP: BPTT, equal sequential operations": {}, "MLP: SMT→DMT": _MLP_RATES},
        factors=_PLACES,
        affected={factor: ["MLP: SMT→DMT"] for factor in _PLACES},
    ),
    FactorStudy(
        "why-larger-memories",
        "smt-scaling",
        "SMT→DMT predicts text better with a larger memory.",
        first=("memory tokens 1, SMT→DMT", None),
        second=("memory tokens 8, SMT→DMT", None),
        fixed={"memory tokens 1": {}, "memory tokens 8": {}},
        factors={**_PLACES, "steps of DMT": {"240": {"steps": 580, "dmt_steps": 240}}},
        affected={"steps of DMT": ["memory tokens 8"]},
    ),
    FactorStudy(
        "why-memory-and-training",
        "smt-compression",
        "The teacher predicts better with four memory tokens than with one, after as many steps.",
        first=("1 memory tokens", "400"),
        second=("4 memory tokens", "400"),
        fixed={"1 memory tokens": {}, "4 memory tokens": {}},
        where={"steps": 400},
        factors={**_PLACES, "width": {"8": _NARROW}},
    ),
    FactorStudy(
        "why-deep-stacks",
        "smt-task-sweeps",
        "SMT→DMT answers as well as BPTT with deep stacks.",
        first=("stack operations, depth 4: BPTT", None),
        second=("stack operations, depth 4: SMT→DMT", None),
        fixed={
            "stack operations, depth 4: BPTT": {"bptt_learning_rate": 3e-3},
            "stack operations, depth 4: SMT→DMT": {"learning_rate": 5e-3, "dmt_learning_rate": 3e-3},
        },
        factors={"timesteps of a sequence": {"16": {"timesteps": 16}}, "steps": {"1,200": {"steps": 1200}}},
        affected={"timesteps of a sequence": ["stack operations, depth 4: SMT→DMT"]},
    ),
    FactorStudy(
        "why-pixels",
        "smt-pixels",
        "SMT→DMT needs fewer bits per pixel than BPTT.",
        first=("BPTT", None),
        second=("SMT→DMT", None),
        fixed={"BPTT": {}, "SMT→DMT": {"learning_rate": 5e-3, "dmt_learning_rate": 1e-3}},
        factors={"steps of DMT": {"240": {"steps": 420, "dmt_steps": 240}}},
        affected={"steps of DMT": ["SMT→DMT"]},
    ),
    FactorStudy(
        "why-short-futures",
        "smt-future-length",
        "Detached training with a future of one step fails in retrieval, joint training does not.",
        first=("detached, SMT", "1"),
        second=("joint, SMT", "1"),
        fixed={"detached": {}, "joint": {}},
        where={"x": 1},
        factors={
            "uniformity loss": {"0": {"smt": {"detached": True, "uniformity_weight": 0.0}}},
            "length": {"16": {"task": "retrieval,vocab_size=8,length=16"}},
        },
        affected={"uniformity loss": ["detached"]},
    ),
    FactorStudy(
        "why-exact-on-tasks",
        "task-rules",
        "RTRL learns flip-flop from a stream, immediate derivatives do not.",
        first=(_IMMEDIATE, None),
        second=(_EXACT, None),
        fixed={_IMMEDIATE: {"learning_rate": 3e-3}, _EXACT: {"learning_rate": 3e-3}},  # the best of three for both
        factors={
            "learning rate": {"0.0003": {"learning_rate": 3e-4}},
            "bytes of an update": {"16": {"update_every": 16}},
        },
    ),
    FactorStudy(
        "why-snap1-and-depth",
        "online-copy",
        "GRUs learned by SnAp-1 fall behind BPTT with four layers.",
        first=("GRU: BPTT", "600"),
        second=("GRU: SnAp-1", "600"),
        fixed={"GRU: BPTT": {}, "GRU: SnAp-1": {}},
        factors={},
    ),
    FactorStudy(
        "why-snap1-with-one-layer",
        "online-copy",
        "GRUs learned by SnAp-1 fall less behind BPTT with one layer than with four.",
        first=("GRU, 1 layer: BPTT", "600"),
        second=("GRU, 1 layer: SnAp-1", "600"),
        fixed={"GRU, 1 layer: BPTT": {}, "GRU, 1 layer: SnAp-1": {}},
        factors={},
    ),
    FactorStudy(
        "why-exponential-dilation",
        "mgrade-full-resolution",
        "With exponential dilation mGRADE classifies better than the TCN, at the paper's 784 steps.",
        first=("28 by 28: TCN-EID", None),
        second=("28 by 28: mGRADE-EID", None),
        fixed={"28 by 28: TCN-EID": {}, "28 by 28: mGRADE-EID": {}},
        factors={},
    ),
    FactorStudy(
        "why-strings",
        "string-copying",
        "Attention copies strings of six letters better than Mamba2.",
        first=("Mamba2", "6"),
        second=("Llama, RoPE", "6"),
        fixed={"Mamba2": {}, "Llama, RoPE": {}},
        factors={"Mamba2's state": {f"{n} a channel": {"widths": {**_MAMBA2, "state_size": n}} for n in (1, 4)}},
        affected={"Mamba2's state": ["Mamba2"]},
    ),
    FactorStudy(
        "why-fixed-decay-recalls",
        "recall",
        "Attention recalls in induction heads, a fixed decay does not.",
        first=(f"{_HEADS}: S4D (s5 unit)", None),
        second=(f"{_HEADS}: Transformer (Llama)", None),
        fixed={f"{_HEADS}: S4D (s5 unit)": {}, f"{_HEADS}: Transformer (Llama)": {}},
        factors={
            "length": {"64": {"task_options": {"length": 64, "vocab_size": 16}}},
            "steps": {"3,000": {"steps": 3000}},
        },
    ),
)
STUDIES: dict[str, FactorStudy] = {study.name: study for study in _ALL}
