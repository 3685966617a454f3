"""Our families in transformers' common test suite of models; `try_common_suite.py` runs this file inside of the suite.

The suite is the package `tests` of transformers' source distribution. Its tests of generation are not part of that;
they run too where `--tests` names the folder of a whole repository.
"""

import os
import sys
import unittest
from pathlib import Path

import torch

ROOT = Path(os.environ["OUR_ROOT"])
sys.path += [str(ROOT), str(ROOT / "tests" / "modeling")]
from model_cases import tiny_config  # noqa: E402
from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

import hf_recurrent  # noqa: E402

# Class names of a family begin with this; a variant of `model_cases.VARIANTS` stands for each.
VARIANTS = {
    "Memora": ["memora", "memora+mamba2", "memora+gated_delta", "memora+ngrams"],
    "Hawk": ["hawk"],
    "Mgrade": ["mgrade"],
    "Lru": ["lru"],
    "SmtRnn": ["smt-rnn"],
}
# Tests that a variant cannot pass, and why.
LEFT_OUT = {
    "memora+ngrams": {
        "test_inputs_embeds": "tables are looked up by ids",
        "test_inputs_embeds_matches_input_ids": "tables are looked up by ids",
        "test_training_overfit": "clips and optimizes dense gradients only, and tables have sparse ones",
    }
}
# Ending of a class name → the table in which the suite looks up what inputs and outputs such a class has.
ENDINGS = {
    "Model": modeling_auto.MODEL_MAPPING_NAMES,
    "ForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "ForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
BATCH, STEPS = 3, 7


class TinyFamily:
    """What the suite asks of a model's tester."""

    def __init__(self, variant: str, causal_lm_class: type):
        self.variant, self.causal_lm_class = variant, causal_lm_class
        self.batch_size, self.seq_length, self.is_training = BATCH, STEPS, True
        config = self.get_config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.vocab_size = config.vocab_size

    def get_config(self):
        """A new configuration."""
        return tiny_config(self.variant, pad_token_id=0)

    def prepare_config_and_inputs(self):
        """(configuration, inputs) with random ids and no padding."""
        input_ids = torch.randint(1, self.vocab_size, (BATCH, STEPS))
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    prepare_config_and_inputs_for_common = prepare_config_and_inputs


def suite_of(prefix: str, variant: str) -> type:
    """The suite's test case of a variant."""
    classes = tuple(getattr(hf_recurrent, prefix + ending) for ending in ENDINGS)

    class Suite(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
        all_model_classes = classes
        has_attentions = False

        training_overfit_steps, training_overfit_learning_rate = 600, 5e-3  # models of 16 channels

        def setUp(self):
            if reason := LEFT_OUT.get(variant, {}).get(self._testMethodName):
                self.skipTest(reason)
            self.model_tester = TinyFamily(variant, classes[1])

    Suite.__name__ = Suite.__qualname__ = "Test" + "".join(part.title() for part in variant.split("+"))
    return Suite


for prefix, variants in VARIANTS.items():
    for ending, table in ENDINGS.items():
        table[prefix.lower()] = prefix + ending
    for variant in variants:
        case = suite_of(prefix, variant)
        globals()[case.__name__] = case
del case
