"""`trainer_state.json` and `training_args.json`: checked before use, and written without anything of this machine."""

import json
import os
from typing import Any

from transformers import TrainerState, TrainingArguments

from hf_recurrent.checkpoints.files import reading_checkpoint

TRAINER_STATE_FILE = "trainer_state.json"
_LOCAL = {"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "local_rank"}
_COUNTS = ("global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen")


def check_trainer_state(checkpoint: str) -> None:
    """Raise a ValueError if a checkpoint has no usable `trainer_state.json`."""
    with reading_checkpoint(os.path.join(checkpoint, TRAINER_STATE_FILE)) as path:
        state = TrainerState.load_from_json(path)
        for name in _COUNTS:
            value = getattr(state, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise ValueError(f"`{path}` is damaged: `{name}` is {value!r}.")
        if not isinstance(state.log_history, list) or not all(isinstance(entry, dict) for entry in state.log_history):
            raise ValueError(f"`{path}` is damaged: `log_history` must be a list of dictionaries.")
        if not isinstance(state.stateful_callbacks, dict) or "TrainerControl" not in state.stateful_callbacks:
            raise ValueError(f"`{path}` is damaged: `stateful_callbacks` must have a `TrainerControl`.")


def shareable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """JSON values of the arguments, without tokens, directories and other local paths: checkpoints may be uploaded."""
    values = json.loads(json.dumps(args.to_dict(), default=str))
    return {
        name: value
        for name, value in values.items()
        if name not in _LOCAL and not name.endswith("_token") and not _is_local_path(value)
    }


def _is_local_path(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith(("~", ".")) or os.path.isabs(value))
