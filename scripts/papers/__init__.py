"""The tables and figures of the papers, each an experiment that `scripts/reproduce.py NAME` runs.

An experiment is one class in a module, and one line of `EXPERIMENTS`. It uses public names of `hf_recurrent` only.
`STUDIES` look for the cause of a result: they run an experiment again with one setting at a time changed.
"""

import importlib
import tomllib
from pathlib import Path

from papers.engine.experiment import Experiment
from papers.engine.factors import FactorStudy

_CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
STUDIES = {each["name"]: FactorStudy(**each) for each in _CAUSES["studies"]}

# Name → module, imported on first use, and description.
EXPERIMENTS = {
    "selective-copying": ("memora.selective_copying", "Memora, Table 2: six models on selective copying"),
    "stride-sweep": ("memora.stride_sweep", "Memora, Figure 3: streams against IID over the update stride"),
    "glru-alternatives": ("memora.glru_alternatives", "Memora, Figure 6: recurrent units on text"),
    "memora-against-hawk": ("memora.hawk_ablation", "Memora, Figure 3: Memora and Hawk, without its convolution"),
    "rolling-window": ("memora.rolling_window", "Memora, section 3: windows that overlap, S < T"),
    "parity": ("survey.parity", "state tracking: parity beyond the training length, with negative eigenvalues"),
    "recall": ("survey.recall", "survey, Table 6: induction heads and associative recall"),
    "string-copying": ("survey.string_copying", "survey, Figure 20: examples needed to copy strings, and longer ones"),
    "scaling": ("survey.scaling", "our own: bits per byte over parameters and bytes, seven families, fitted"),
    "carried-state": ("survey.carried_state", "our own: long documents with the state carried, and passages recalled"),
    "long-range-arena": ("survey.long_range_arena", "survey, Table 7: expressions, texts and images classified"),
    "online-memora": ("memora.online", "Memora, Figure 5: one byte at a time, RTRL against one-step BPTT"),
    "online-copy": ("online_learning.copying", "online learning, Table 1: learning rules on the copy task"),
    "gradient-alignment": ("online_learning.gradient_alignment", "online learning, Figure 2: gradients compared"),
    "online-copy-curves": (
        "online_learning.training_curves",
        "online learning, Figure 2: losses by depth, eigenvalues and rule",
    ),
    "online-long-range": (
        "online_learning.long_range",
        "online learning, Tables 2 and 3: pixels, texts and expressions classified",
    ),
    "drift": ("learner.drift", "a stream that changes its language, with learning on and off"),
    "drift-rules": ("learner.drift", "the same stream by learning rule and optimizer, with their processor time"),
    "task-rules": ("learner.task_rules", "flip-flop and copying as a stream, by learning rule and optimizer"),
    "mgrade-table1": ("mgrade.table1", "mGRADE, Table 1: TCNs and minGRU of equal size, image pixels as sequences"),
    "mgrade-table2": ("mgrade.table2", "mGRADE, Table 2: learned positions of the taps against fixed ones"),
    "mgrade-full-resolution": ("mgrade.full_resolution", "mGRADE, Table 1: digits of 784 and 1,024 steps"),
    "mgrade-memory": ("mgrade.memory", "mGRADE, Figure 4A: parameters and buffers over the size of the kernels"),
    "mgrade-memory-accuracy": (
        "mgrade.memory_accuracy",
        "mGRADE, Figures 4B and S2 to S4: accuracy against memory, over taps and delays",
    ),
    "flip-flop": ("mgrade.flip_flop", "mGRADE, Figure 3: a bit read long after it was written, against TCNs"),
    "lorenz": ("mgrade.lorenz", "mGRADE, Figure 2: unobserved dimensions of the Lorenz attractor, against minGRU"),
    "lorenz-components": ("mgrade.lorenz_components", "mGRADE, Figure S1: principal components of the hidden states"),
    "smt-tasks": ("smt.tasks", "SMT, section 3.1: five synthetic tasks, BPTT against SMT→DMT"),
    "smt-pixels": ("smt.pixels", "SMT, section 3.2: digits drawn pixel by pixel, BPTT against SMT→DMT"),
    "smt-text": ("smt.text", "SMT, section 3.3: text byte by byte, BPTT against SMT→DMT"),
    "smt-task-sweeps": ("smt.task_sweeps", "SMT, Figure 3: noise, memory, depth and length of associations"),
    "smt-sketches": ("smt.sketches", "SMT, Figures 5 and 16 to 19: black and white patches, and memories drawn"),
    "smt-backbones": ("smt.backbones", "SMT, section 3.3: Transformer, MLP and GRU as update, on text"),
    "smt-scaling": ("smt.scaling", "SMT, section 3.4: longer contexts, larger memories and models"),
    "smt-compression": ("smt.compression", "SMT, section 3.5: size of the memory against training"),
    "smt-loss-weights": ("smt.loss_weights", "SMT, section 3.6: heat map of the losses' weights"),
    "smt-cost": ("smt.cost", "SMT, Table 1: sequential operations of a step of BPTT, SMT and DMT"),
    "smt-drift": ("smt.drift", "SMT, section 3.6: drift from the teacher before and after DMT"),
    "smt-future-length": ("smt.future_length", "SMT, section 3.6: length of the future, joint and detached"),
    "smt-gradients": ("smt.gradients", "SMT, section 3.7: gradients of the memories over time, BPTT and SMT"),
    "smt-length-generalization": ("smt.length_generalization", "SMT, section 3.7: beyond the training length"),
    "smt-memory-space": ("smt.memory_space", "SMT, section 3.7: memories of two numbers, drawn"),
}


def load_experiment(name: str) -> Experiment:
    """The experiment or study of that name.

    Raises:
        ValueError: unknown name; the message lists the experiments and studies.
    """
    if name in STUDIES:
        study = STUDIES[name]
        study.base = load_experiment(study.rows_of)
        return study
    if name not in EXPERIMENTS:
        raise ValueError(
            f"NAME is {name!r}; the experiments are {', '.join(EXPERIMENTS)}; studies: {', '.join(STUDIES)}."
        )
    module = importlib.import_module(f"papers.{EXPERIMENTS[name][0]}")
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Experiment))
    return next(kind() for kind in kinds if getattr(kind, "name", None) == name)
