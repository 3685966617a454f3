"""A saved model that tests of several commands read."""

import pytest
from transformers import AutoModelForCausalLM, set_seed

from hf_recurrent import ByteTokenizer, config_from_preset


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    set_seed(7)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)
