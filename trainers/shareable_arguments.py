"""The training arguments in a checkpoint, without tokens and local paths: checkpoints may be uploaded."""

import json
import os
from typing import Any

from transformers import TrainingArguments

_LOCAL = {"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "local_rank"}


def shareable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """JSON values of the arguments, without tokens, directories and other local paths."""
    values = json.loads(json.dumps(args.to_dict(), default=str))
    return {
        name: value
        for name, value in values.items()
        if name not in _LOCAL and not name.endswith("_token") and not _is_local_path(value)
    }


def _is_local_path(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith(("~", ".")) or os.path.isabs(value))
