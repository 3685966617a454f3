"""A Space: the page of `hf-recurrent serve`, for a checkpoint that the variable MODEL names.

MODEL=../../model_cards/memora-s0-python python app.py
"""

import os
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_recurrent  # noqa: F401  the Auto classes know its models then, and run no code of a repository
from hf_recurrent.server.routes.app import run_server
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.settings import ServerSettings
from hf_recurrent.server.serving import serving_scheduler


def main() -> None:
    name = os.environ.get("MODEL")
    if not name:
        raise SystemExit("Set the variable MODEL to a checkpoint: its name on the Hub, or a directory.")
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    # Visitors do not know each other: the page alone, without the API, whose users may see all sessions.
    settings = ServerSettings(
        name=Path(name).name, hosts=None, has_api=False, max_body=1 << 20, max_new_tokens=2000, seconds=120
    )
    with serving_scheduler(model, tokenizer, max_states=5000, max_rows=16, max_jobs=128) as scheduler:
        # Spaces ask for these two.
        port = int(os.environ.get("GRADIO_SERVER_PORT", "7860"))
        run_server(ServedModel(scheduler, tokenizer, settings), "0.0.0.0", port, partial(print, flush=True))


if __name__ == "__main__":
    main()
