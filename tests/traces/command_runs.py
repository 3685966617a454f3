"""Runs of the command line on files of their own: what they print, write, and leave to go on with."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from fixed_text import PASSAGES
from measure_runs import write_digits, write_texts
from trace_values import Printed, Trace, of_bytes, of_directory, of_json, of_tensors
from trainer_runs import build_model

from hf_recurrent import ByteTokenizer
from hf_recurrent.cli.main import main

SHORT = ["--use_cpu", "--max_steps", "6", "--logging_steps", "2", "--disable_tqdm", "true", "--report_to", "none"]
SAMPLES = ["--sample_every", "0", "--sample_bytes", "16", "--sample_prompts", "def ", "class "]
STREAMS = ["--per_device_train_batch_size", "4", "--save_steps", "4", "--validation_fraction", "0.2"]
SMALL = [*STREAMS, "--block_size", "16", "--lr_scheduler_type", "cosine"]
DEFAULT = [*SMALL, "--learning_rate", "4e-3"]  # of the default recipe when the traces were recorded
TINY = ["--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1"]
TINY_SMT = ["--config_overrides", "hidden_size=16", "num_attention_heads=2", "num_memory_tokens=2"]
LENGTHS = ["--context_length", "8", "--future_length", "4", "--max_eval_bytes", "120", "--eval_windows", "4"]
# Begins the names of what a second part of commands gives.
CONTINUED = "continued/"
LEARN = ["--learning_rate", "3e-3", "--window", "40", "--report_every", "50", "--quiet"]


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """Relative names, and a cache of its own."""
    home = str(folder / "home")
    cache = mock.patch.dict(os.environ, {"HF_HOME": home})
    with contextlib.chdir(folder), cache, mock.patch("huggingface_hub.constants.HF_HOME", home):
        yield


def run(*arguments: str) -> str:
    """Standard output of a command."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        main(list(arguments))
    return printed.buffer.getvalue().decode("utf-8", "surrogateescape")


def _read_json(path: str) -> dict:
    return json.loads(Path(path).read_text())


def of_output(directory: str = "run") -> Trace:
    """Files and numbers that `pretrain` leaves."""
    path = Path(directory)
    trace = {f"weights/{name.parent.name}": of_tensors_of(name) for name in sorted(path.rglob("model.safetensors"))
             if "checkpoint" not in str(name)}  # fmt: skip
    trace |= of_json("eval", _read_json(path / "eval_results.json"))
    trace |= of_json("train", _read_json(path / "train_results.json"))
    config = _read_json(path / "config.json")
    return trace | of_json("config", {name: value for name, value in config.items() if name != "dtype"})


def of_tensors_of(path: Path) -> str:
    from safetensors.torch import load_file

    return of_tensors(load_file(path))


def pretrain(*arguments: str, corpus: str = "notes", directory: str = "run") -> Trace:
    write = write_digits if corpus.startswith("mnist:") else write_texts
    if not corpus.startswith("task:"):
        write(Path(corpus.removeprefix("mnist:")))
    printed = run("pretrain", "--corpus", corpus, "--output_dir", directory, *SHORT, *SAMPLES, *arguments)
    trace = of_output(directory) | {"printed": Printed(printed)}
    last = max(Path(directory).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return trace | of_directory("checkpoint/", last)


# The recipe with which the trace was recorded.
EARLIER = (
    "--config_overrides", "ngram_orders=[2,3,4,5,6]", "ngram_rows=65536", "count_memory_slots=262144",
    "count_memory_text=8388608", "--block_size", "16", "--learning_rate", "4e-3", "--count_discount", "0",
    "--count_bytes", "0", "--bf16_products", "false",
)  # fmt: skip


def default_recipe() -> Trace:
    return pretrain(*EARLIER, "--validation_fraction", "0.2", "--max_steps", "4")


def small() -> Trace:
    return pretrain(*DEFAULT, *TINY)


def small_again() -> Trace:
    """From what a run has left: the same by its recipe, and training of its model."""
    if not Path("notes").exists():
        write_texts(Path("notes"))
    common = ["pretrain", "--corpus", "notes", *SHORT, *SAMPLES, *DEFAULT]
    run("pretrain", "--recipe", "run/_recipe.yaml", "--output_dir", "again", "--use_cpu")
    run(*common, "--model", "run", "--output_dir", "more")
    return {name: of_tensors_of(Path(name, "model.safetensors")) for name in ("again", "more")}


def rtrl() -> Trace:
    return pretrain("--method", "rtrl", "--stride", "8", *DEFAULT, *TINY)


def smt() -> Trace:
    second_phase = ["--dmt_steps", "3", "--dmt_rollout_length", "6"]
    return pretrain("--method", "smt", *STREAMS, *LENGTHS, *second_phase, *TINY_SMT, "--max_steps", "4")


def smt_again() -> Trace:
    """The second phase by itself, of an RNN and its teacher that were saved."""
    if not Path("notes").exists():
        write_texts(Path("notes"))
    lengths = ["--context_length", "8", "--rollout_length", "6", "--max_eval_bytes", "120", "--max_steps", "3"]
    what = ["--method", "dmt", "--model", "run", "--corpus", "notes", "--output_dir", "again"]
    run("pretrain", *what, *SHORT, *SAMPLES, *STREAMS, *lengths)
    return {"again": of_tensors_of(Path("again/model.safetensors"))}


def task() -> Trace:
    options = ["--block_size", "12", "--gradient_accumulation_steps", "2", "--max_eval_bytes", "240"]
    return pretrain(*DEFAULT, *TINY, *options, corpus="task:selective_copying,length=24,num_tokens=3,vocab_size=8")


def digits() -> Trace:
    return pretrain(*DEFAULT, *TINY, "--block_size", "49", corpus="mnist:digits")


def llama() -> Trace:
    tiny = ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "num_key_value_heads=2"]
    return pretrain("--recipe", "llama-s0", *SMALL, "--eval_block_size", "16", "--config_overrides", *tiny)


def _saved_model() -> None:
    model = build_model()
    model.save_pretrained("model")
    ByteTokenizer().save_pretrained("model")


def evaluate() -> Trace:
    write_texts(Path("notes"))
    _saved_model()
    trace: Trace = {}
    cases = {
        "carried": ["--corpus", "notes", "--validation_fraction", "0.3"],
        "windows": ["--corpus", "notes", "--no_carry", "--block_size", "20", "--split", "all", "--max_bytes", "900"],
        "task": ["--corpus", "task:retrieval,length=12", "--max_bytes", "360"],
    }
    for name, arguments in cases.items():
        run("evaluate", "model", *arguments, "--quiet", "--no_compressors", "--output", "result.json")
        results = _read_json("result.json")
        trace |= of_json(name, {field: value for field, value in results.items() if field != "fingerprint"})
    return trace


def generate() -> Trace:
    _saved_model()
    Path("book.txt").write_text(PASSAGES[2])

    trace = {
        "greedy": _text("--prompt", "The river", "--greedy", "--save_state", "state"),
        "file": _text("--prompt_file", "book.txt", "--prompt", " And", "--seed", "3", "--save_state", "sampled"),
        "two": _text("--prompt", "one", "twenty", "--seed", "4", "--top_k", "40", "--top_p", "0.9"),
        "beams": _text("--prompt", "one", "--num_beams", "3"),
    }
    return trace | {"state": of_tensors_of(Path("state")), "sampled": of_tensors_of(Path("sampled"))}


def generate_again() -> Trace:
    """From a state that was saved."""
    trace = {
        "one": _text("--state", "state", "--greedy", "--save_state", "later"),
        "two": _text("--state", "sampled", "--prompt", "x", " y", "--greedy"),
    }
    return trace | {"later": of_tensors_of(Path("later"))}


def _text(*arguments: str) -> str:
    printed = run("generate", "model", "--quiet", "--max_new_tokens", "20", *arguments)
    return of_bytes(printed.encode("utf-8", "surrogateescape"))


def learn() -> Trace:
    _saved_model()
    source = "\n".join(PASSAGES[6:9]).encode()
    Path("log.txt").write_bytes(source[:170])
    command = ["learn", "model", "--source", "log.txt", "--output_dir", "out", *LEARN, "--stride", "4"]
    run(*command, "--held_out", "log.txt", "--save_every", "100")
    Path("log.txt").write_bytes(source[:260])
    run(*command, "--resume")
    run("learn", "memora-tiny", "--source", "log.txt", "--output_dir", "new", *LEARN, "--stride", "26", "--seed", "5")
    trace: Trace = {}
    for name in ("out", "new"):
        for line in Path(name, "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            trace |= of_json(f"{name}/{record['bytes_read']}", record)
    trace["state"] = of_tensors_of(Path("out/state.safetensors"))
    return trace | {name: of_tensors_of(Path(name, "model.safetensors")) for name in ("out", "new")}


class CommandRun:
    """A command, or a few, in a folder of their own.

    Args:
        commands: run first.
        continued: run in the same folder, or later in one that holds what the first have left.
    """

    def __init__(self, commands: Callable[[], Trace], continued: Callable[[], Trace] | None = None):
        self.commands, self.continued = commands, continued

    def __call__(self, folder: Path) -> Trace:
        folder.mkdir(parents=True)
        with working_folder(folder):
            trace = self.commands()
            return trace | self._continue() if self.continued else trace

    def resumed(self, folder: Path, whole: Path) -> Trace:
        """Continued from what is in `whole`."""
        shutil.copytree(whole, folder)
        with working_folder(folder):
            return self._continue()

    def _continue(self) -> Trace:
        return {f"{CONTINUED}{name}": value for name, value in self.continued().items()}


COMMAND_RUNS = {
    "pretrain": CommandRun(default_recipe),
    "pretrain small": CommandRun(small, small_again),
    "pretrain rtrl": CommandRun(rtrl),
    "pretrain smt": CommandRun(smt, smt_again),
    "pretrain task": CommandRun(task),
    "pretrain digits": CommandRun(digits),
    "pretrain llama": CommandRun(llama),
    "evaluate": CommandRun(evaluate),
    "generate": CommandRun(generate, generate_again),
    "learn": CommandRun(learn),
}
