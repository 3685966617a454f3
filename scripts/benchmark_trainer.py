"""Bytes per second of MultiStreamTrainer, compared with a bare PyTorch loop on the same model, optimizer and blocks.

    python scripts/benchmark_trainer.py                       # Memora S0, B 8, T 1024; the bar is 90 %

Both run in turns, several times, and the medians are compared, so that other jobs slow both.
"""

import argparse
import statistics
import tempfile

import numpy as np
import torch
from benchmarking import build_model, conditions, elapsed, option_parser, report
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed

from hf_recurrent import ByteTokenizer, Corpus, MultiStreamDataset, MultiStreamTrainer, MultiStreamTrainingArguments


class StepTimes(TrainerCallback):
    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(elapsed(self.device))


def bare_loop(model, corpus: Corpus, options: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step of a minimal loop that carries the state."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = iter(DataLoader(MultiStreamDataset(corpus, options.streams, options.block_size), batch_size=None))
    state, times = model.init_state(options.streams, device=device), []
    for _ in range(options.steps + 1):
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        inputs = {key: batch[key] for key in ("input_ids", "shift_labels", "reset_mask")}
        output = model(**inputs, state=state, use_cache=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = {name: tensor.detach() for name, tensor in output.state.items()}
        times.append(elapsed(device))
    return np.diff(times).tolist()


def trainer_steps(model, corpus: Corpus, options: argparse.Namespace, directory: str) -> list[float]:
    """Seconds of each step of the trainer, with the default logging."""
    args = MultiStreamTrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=options.streams,
        block_size=options.block_size,
        max_steps=options.steps + 1,
        learning_rate=1e-3,
        save_strategy="no",
        use_cpu=options.cpu,
        log_level="error",
    )
    times = StepTimes(args.device)
    MultiStreamTrainer(model, args, corpus, callbacks=[times]).train()
    return np.diff(times.times).tolist()


def main() -> None:
    parser = option_parser(__doc__, streams=8, block_size=1024)
    parser.add_argument("--model", default="memora-s0", help="a preset")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    generator = np.random.default_rng(0)
    documents = [generator.integers(32, 127, size, dtype=np.uint8).tobytes() for size in (20_000, 3_000, 50_000) * 20]
    corpus = Corpus.from_documents(documents, ByteTokenizer(), name="random")
    seconds = {"bare loop": [], "MultiStreamTrainer": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.turns):
            for name in seconds:
                set_seed(0)
                model = build_model(options.model, device)
                if name == "bare loop":
                    seconds[name] += bare_loop(model, corpus, options, device)
                else:
                    seconds[name] += trainer_steps(model, corpus, options, directory)
    rates = {
        name: options.streams * options.block_size / statistics.median(values) for name, values in seconds.items()
    }
    lines = [[name, f"{rate:,.0f}", f"{rate / rates['bare loop']:.1%}"] for name, rate in rates.items()]
    report(conditions(device), ["loop", "bytes/s", "of the bare loop"], lines)


if __name__ == "__main__":
    main()
