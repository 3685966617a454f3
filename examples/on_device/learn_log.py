"""Learn a log in 256 KB of RAM and flash, from nothing, by a network and counts; beside gzip and plain counts.

python learn_log.py /var/log/syslog
python learn_log.py                     # lines as of a small server, which the script makes
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
from compiled_learner import CompiledLearner
from count_model import CountModel

from hf_recurrent.evaluation.compressors import COMPRESSORS
from hf_recurrent.plotting import require_pyplot

SIZES = ("hidden_size=8", "state_size=8", "num_hidden_layers=1")
COUNTS = {"slots": 64, "text": 1024, "window": 8192, "rows": 0, "small": "true"}
OVERRIDES = (*SIZES, *(f"count_memory_{name}={value}" for name, value in COUNTS.items()))
EXPORT = ("memora-tiny", "--optim", "sgd", "--learning_rate", "0.1", "--config_overrides", *OVERRIDES)
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "results" / "on_device_log.png"
WINDOW = 20_000  # bytes of a mean in the picture


def generated_log(size: int, seed: int = 0) -> bytes:
    """Lines of a server: logins, jobs, a disk and a network."""
    draw, moment, lines, written = random.Random(seed), 1_700_000_000, [], 0
    users = ["root", "admin", "backup", "deploy", "www-data"]
    while written < size:
        moment += int(draw.expovariate(0.2))
        port, device = draw.randrange(30_000, 60_000), "Device: /dev/sda"
        address = f"10.{draw.randrange(4)}.{draw.randrange(20)}.{draw.randrange(256)}"
        process, user = draw.randrange(300, 32_000), draw.choice(users)
        text = draw.choices(
            [
                f"sshd[{process}]: Failed password for {user} from {address} port {port} ssh2",
                f"sshd[{process}]: Accepted publickey for {user} from {address} port {port}",
                f"CRON[{process}]: ({user}) CMD (/usr/local/bin/rotate --keep {draw.randrange(3, 9)})",
                f"kernel: [{moment % 100_000}.{draw.randrange(10**6):06}] eth0: link is up, 1000 Mbps, full duplex",
                f"smartd[812]: {device}, Temperature changed to {draw.randrange(28, 44)} Celsius",
            ],
            weights=[30, 20, 25, 5, 20],
        )[0]
        stamp = time.strftime("%b %d %H:%M:%S", time.gmtime(moment))
        lines.append(f"{stamp} gateway {text}\n".encode())
        written += len(lines[-1])
    return b"".join(lines)[:size]


def bits(model, data: bytes) -> np.ndarray:
    """Bits of every byte, each before it is learned."""
    return np.array([model.learn(byte) for byte in data]) / np.log(2)


def draw(picture: Path, lines: dict[str, np.ndarray], levels: dict[str, float]) -> None:
    """Means of windows over the bytes read, and compressors as horizontal lines."""
    pyplot = require_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for label, values in lines.items():
        size = min(WINDOW, len(values))
        means = values[: len(values) // size * size].reshape(-1, size).mean(1)
        axes.plot((np.arange(len(means)) + 1) * size / 1000, means, label=label)
    for style, (label, value) in zip(("--", ":"), levels.items(), strict=True):
        axes.axhline(value, color="gray", linestyle=style, linewidth=1, label=label)
    axes.set(xlabel="kB read", ylabel="bits per byte", ylim=(0, None), xlim=(0, len(values) / 1000))
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=2, loc="upper center", fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(picture, dpi=90)


def main(argv=None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="?", type=Path, help="a log; by default lines that the script makes")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of the log (default: 1,000,000)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="PNG (default: in docs/results)")
    arguments = parser.parse_args(argv)
    data = arguments.log.read_bytes()[: arguments.bytes] if arguments.log else generated_log(arguments.bytes)
    data = data.replace(b"\0", b"")  # would end an episode
    learner = CompiledLearner(*EXPORT)
    before = time.process_time()
    lines = {f"learner in C, {learner.memory / 1000:.0f} kB": bits(learner, data)}
    seconds = time.process_time() - before
    lines[f"order-2 counts, {learner.memory / 1000:.0f} kB"] = bits(CountModel(learner.memory), data)
    levels = {f"{name}, all at once": 8 * COMPRESSORS[name](data) / len(data) for name in ("gzip -9", "xz -9")}
    print(f"{len(data):,} bytes; {len(data) / seconds:,.0f} bytes per second of one core, through ctypes")
    print(f"{'bits per byte':<28}{'all':>8}{'last tenth':>12}")
    for label, values in lines.items():
        print(f"{label:<28}{values.mean():>8.3f}{values[-len(values) // 10 :].mean():>12.3f}")
    for label, value in levels.items():
        print(f"{label:<28}{value:>8.3f}")
    draw(arguments.picture, lines, levels)


if __name__ == "__main__":
    main()
