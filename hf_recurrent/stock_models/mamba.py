"""Mamba with a state."""

from transformers.models.mamba.modeling_mamba import MambaForCausalLM, MambaMixer

from hf_recurrent.stock_models.selective_scan import SelectiveScanPart
from hf_recurrent.stock_models.stock_model import StockModelWithState


class MambaMixerWithState(SelectiveScanPart, MambaMixer):
    """[`SelectiveScanPart`] with the weights of a stock mixer."""


class MambaWithState(StockModelWithState, MambaForCausalLM):
    """A stock Mamba that takes and returns a state."""


MODEL = MambaWithState
CLASSES = {MambaForCausalLM: MambaWithState, MambaMixer: MambaMixerWithState}
