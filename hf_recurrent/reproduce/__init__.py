"""The tables and figures of the papers, each as one experiment that `scripts/reproduce.py NAME` runs."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_recurrent.reproduce.experiment import Experiment

# Name → what it reproduces; the code of each is the module of that name and is loaded when it is used.
EXPERIMENTS = {
    "selective-copying": "Memora, Table 2: six models on selective copying",
    "stride-sweep": "Memora, Figure 3: streams against IID over the update stride",
    "glru-alternatives": "Memora, Figure 6: recurrent units on text",
    "parity": "state tracking: eigenvalues that may be negative, on parity beyond the training length",
    "recall": "survey, Table 6: induction heads and associative recall",
    "online-memora": "Memora, Figure 5: a byte at a time, RTRL against one-step BPTT",
    "online-copy": "online learning, Table 1: rules of learning online on the copy task",
    "gradient-alignment": "online learning, Figure 2: online gradients against the true ones, layer by layer",
    "drift": "a stream that changes its language, with learning on and off",
    "mgrade-table1": "mGRADE, Table 1: with TCNs and minGRU of equal parameters on images read pixel by pixel",
    "mgrade-table2": "mGRADE, Table 2: learned positions of the taps against fixed ones",
    "flip-flop": "mGRADE, Figure 3: a bit read long after it was written, against TCNs",
    "lorenz": "mGRADE, Figure 2: unobserved dimensions of the Lorenz attractor, against minGRU",
    "smt-tasks": "SMT, section 3.1: five synthetic tasks, BPTT against SMT→DMT",
    "smt-pixels": "SMT, section 3.2: digits drawn pixel by pixel, BPTT against SMT→DMT",
    "smt-text": "SMT, section 3.3: text byte by byte, BPTT against SMT→DMT",
    "smt-cost": "SMT, Table 1: operations one after another of a step of BPTT, SMT and DMT",
    "smt-drift": "SMT, section 3.6: drift from the teacher before and after DMT",
    "smt-future-length": "SMT, section 3.6: how much future a memory predicts, joint and detached",
    "smt-gradients": "SMT, section 3.7: gradients of the memories over time, BPTT and SMT",
    "smt-length-generalization": "SMT, section 3.7: RNN and teacher beyond the training length",
    "smt-memory-space": "SMT, section 3.7: memories of two numbers, drawn",
}


def load_experiment(name: str) -> "Experiment":
    """The experiment of that name.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"NAME is {name!r}; the experiments are {', '.join(EXPERIMENTS)}.")
    return importlib.import_module(f"hf_recurrent.reproduce.{name.replace('-', '_')}").EXPERIMENT
