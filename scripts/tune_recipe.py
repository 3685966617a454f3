"""Try settings of a recipe on documents that judge nothing: a share of the training documents is set aside and scored.

    python scripts/tune_recipe.py --train_bytes 5e5 --matrix_optimizer muon --table_learning_rate 0.05

All arguments belong to `hf-recurrent pretrain`. The held-out documents of the corpus are not read, unless
TUNE_HELD_OUT=1 is in the environment. Prints one line of JSON: bits per byte, seconds of CPU time and of the clock.
"""

import json
import os
import sys
import tempfile
import time

from transformers import set_seed

from hf_recurrent import MultiStreamTrainer
from hf_recurrent.cli.data_arguments import load_training_sources
from hf_recurrent.cli.pretrain import build_model
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.cli.threads import use_threads

_SHARE, _SEED = 0.012, 7  # 20 documents of the standard library
_MOST_BYTES = 400_000


def main(argv: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--save_strategy", "no", "--sample_every", "0", "--disable_tqdm", "true", "--report_to", "none"]
        arguments = parse_arguments([*argv, *quiet, "--output_dir", folder])
        set_seed(arguments.training.seed)
        model, tokenizer = build_model(arguments.model)
        corpus, held_out = load_training_sources(arguments.data, tokenizer, [])
        train, tuning = corpus.split(_SHARE, _SEED)
        use_threads(arguments.threads)
        trainer = MultiStreamTrainer(
            model, arguments.training, train, tuning.limit(_MOST_BYTES), processing_class=tokenizer
        )
        cpu, clock = time.process_time(), time.perf_counter()
        trainer.train()
        result = {
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "seconds": round(time.perf_counter() - clock, 1),
            "tuning": round(trainer.evaluate()["eval_bits_per_byte"], 4),
        }
        if os.environ.get("TUNE_HELD_OUT") == "1":
            result["held_out"] = round(trainer.evaluate(held_out)["eval_bits_per_byte"], 4)
    return result | {"arguments": argv}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
