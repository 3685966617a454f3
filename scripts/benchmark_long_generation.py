"""Memory and time per byte over one long call of `generate()`; neither grows.

python scripts/benchmark_long_generation.py                      # a fresh Memora of the default size
python scripts/benchmark_long_generation.py --model runs/memora-tiny-python --bytes 100000
"""

import os
import resource
import statistics
import sys
import time

import torch
from benchmarking import build_model, option_parser
from transformers import AutoModelForCausalLM, set_seed
from transformers.generation import BaseStreamer

from hf_recurrent import preset_names

WINDOW = 1000


class Stopwatch(BaseStreamer):
    """Records CPU time after every byte, and resident memory of the process after every thousand."""

    def __init__(self):
        self.seconds: list[float] = []
        self.resident: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.process_time())
        if len(self.seconds) % WINDOW == 1:
            self.resident.append(resident_bytes())

    def end(self) -> None:
        self.resident.append(resident_bytes())


def resident_bytes() -> int:
    """Resident memory now on Linux, elsewhere the process's peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Generate, and print time and memory at the beginning and at the end."""
    parser = option_parser(__doc__, threads=1)
    parser.add_argument("--model", default="memora-tiny", help="preset, directory or owner/name on the Hub")
    parser.add_argument("--bytes", type=int, default=100_000, help="number of bytes to generate")
    arguments = parser.parse_args()
    if arguments.bytes < 3 * WINDOW:
        parser.error(f"--bytes is {arguments.bytes}; it must be at least {3 * WINDOW}.")
    torch.set_num_threads(arguments.threads)
    set_seed(0)
    if arguments.model in preset_names():
        model = build_model(arguments.model)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
    watch = Stopwatch()
    prompt = torch.tensor([list(b"def ")])
    model.eval().generate(
        prompt, do_sample=True, max_new_tokens=arguments.bytes, eos_token_id=None, pad_token_id=0, streamer=watch
    )
    steps = [end - begin for begin, end in zip(watch.seconds[1:], watch.seconds[2:], strict=False)]
    # The first thousand bytes warm up caches.
    first, last = (statistics.median(part) * 1e6 for part in (steps[WINDOW : 2 * WINDOW], steps[-WINDOW:]))
    before, after = watch.resident[1] / 2**20, watch.resident[-1] / 2**20
    print(f"{arguments.bytes:,} bytes in {watch.seconds[-1] - watch.seconds[0]:.1f} s")
    ratio = last / first
    print(f"median CPU time per byte: {first:.0f} µs at the beginning, {last:.0f} µs at the end, ratio {ratio:.3f}")
    print(f"resident memory: {before:.1f} MiB at byte {WINDOW:,}, {after:.1f} MiB at the end")


if __name__ == "__main__":
    main()
