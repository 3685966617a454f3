"""FalconMamba with a state."""

from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaForCausalLM, FalconMambaMixer

from hf_recurrent.stock_models.selective_scan import SelectiveScanPart
from hf_recurrent.stock_models.stock_model import StockModelWithState


class FalconMambaMixerWithState(SelectiveScanPart, FalconMambaMixer):
    """[`SelectiveScanPart`] with the norms and weights of a stock mixer."""

    def normalize(self, time_step, to_state, from_state):
        return self.dt_layernorm(time_step), self.b_layernorm(to_state), self.c_layernorm(from_state)


class FalconMambaWithState(StockModelWithState, FalconMambaForCausalLM):
    """A stock FalconMamba that takes and returns a state."""


MODEL = FalconMambaWithState
CLASSES = {FalconMambaForCausalLM: FalconMambaWithState, FalconMambaMixer: FalconMambaMixerWithState}
