"""Units of a small width, with weights that are larger than at the start."""

import torch

from hf_recurrent.modeling.units.nonlinear_units import SequentialUnit
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS, build_recurrent_unit

WIDTH, STEPS = 8, 9
UNITS = sorted(RECURRENT_UNITS)
LINEAR_UNITS = [name for name in UNITS if not issubclass(RECURRENT_UNITS[name], SequentialUnit)]
REAL_UNITS = [name for name in LINEAR_UNITS if RECURRENT_UNITS[name].has_real_eigenvalues]


def initialised(name, dtype=torch.float64, **options):
    torch.manual_seed(1)
    unit = build_recurrent_unit(name, WIDTH, WIDTH, **options)
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        unit.reset_parameters()
    return unit.to(dtype)
