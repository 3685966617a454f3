"""A run whose steps are compiled kernels: any number of threads gives the same bits."""

import pytest
import torch
from tiny_run import tiny_model, tiny_trainer

from hf_recurrent.modeling.block.training_kernels import training_module

SIZES = {"hidden_size": 48, "state_size": 64, "intermediate_size": 80}
TABLES = {"ngram_orders": [2, 3], "ngram_rows": 64, "count_memory_slots": 256}


@pytest.mark.long
@pytest.mark.skipif(training_module() is None, reason="the kernel was not built")
@pytest.mark.parametrize(("preset", "fields"), [("memora-tiny", TABLES), ("hawk-tiny", {})])
def test_training_does_not_depend_on_the_number_of_threads(preset, fields, tmp_path):
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            model = tiny_model(preset, **SIZES, **fields)
            trainer = tiny_trainer(
                tmp_path / str(threads), model, per_device_train_batch_size=16, block_size=32, max_steps=6
            )
            trainer.train()
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        results.append(trainer.model.state_dict())
    for found in results[1:]:
        assert all(torch.equal(found[name], results[0][name]) for name in results[0])
