"""A Space of a checkpoint: the model reads what you write, continues it, and keeps its state until you forget it.

Variables of the Space: MODEL, owner/name on the Hub or a directory (default: the directory `model` next to this file);
TRUST_REMOTE_CODE=1 runs the code in that repository, which is needed where `hf-recurrent` is not installed.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if os.environ.get("TRUST_REMOTE_CODE") != "1":
    import hf_recurrent  # noqa: F401 (its classes are registered with transformers)

PIECE = 16  # bytes between two updates of the page
LONGEST, MOST = 20_000, 500  # bytes of a text that a visitor may send, and that the model writes
STYLE = [(4, "expected"), (8, "unexpected"), (math.inf, "surprising")]  # below this many bits
COLORS = {"unexpected": "#fdbe85", "surprising": "#fd8d3c"}


def load() -> tuple:
    """Model and tokenizer."""
    name = os.environ.get("MODEL") or str(Path(__file__).with_name("model"))
    if "MODEL" not in os.environ and not Path(name).is_dir():
        raise SystemExit("Set the variable MODEL to a checkpoint: owner/name on the Hub, or a directory.")
    options = {"trust_remote_code": os.environ.get("TRUST_REMOTE_CODE") == "1"}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options).eval(), tokenizer


MODEL, TOKENIZER = load()


def decode(ids: list[int]) -> str:
    """Text of some bytes, without end bytes."""
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@torch.inference_mode()
def surprise(text: str, memory: dict | None) -> list[tuple[str, str | None]]:
    """Pieces of the text, each with how unexpected it was after all that the model has read."""
    ids = TOKENIZER(text, return_tensors="pt").input_ids[:, :LONGEST]
    if ids.shape[1] == 0:
        return []
    start = MODEL.init_state(1) if memory is None else memory["state"]
    previous = ids if memory is None else torch.cat([memory["last"], ids[:, :-1]], 1)
    log_probabilities = MODEL(previous, state=start, use_cache=True).logits[0].log_softmax(-1)
    targets = ids[0, 1:] if memory is None else ids[0]
    nats = -log_probabilities[: len(targets)].gather(1, targets[:, None])[:, 0]
    bits = [0.0] * (memory is None) + (nats / math.log(2)).tolist()
    shown, waiting, highest = [], [], 0.0
    for byte, value in zip(ids[0].tolist(), bits, strict=True):
        waiting, highest = [*waiting, byte], max(highest, value)
        if "\ufffd" in (character := decode(waiting)) and len(waiting) < 4:  # inside a character
            continue
        shown.append((character, next(name for limit, name in STYLE if highest < limit)))
        waiting, highest = [], 0.0
    return [(character, None if name == "expected" else name) for character, name in shown]


def continue_text(text: str, count: float, temperature: float, memory: dict | None) -> Iterator[tuple]:
    """Read a text after everything before it, and continue it; yields the continuation so far and the memory."""
    if not text and memory is None:
        raise gr.Error("Write a text first.")
    ids = TOKENIZER(text, return_tensors="pt").input_ids[:, :LONGEST]
    state = MODEL.init_state(1) if memory is None else memory["state"]
    if memory is not None:
        ids = torch.cat([memory["last"], ids], 1)
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
    written: list[int] = []
    while len(written) < min(count, MOST):
        size = min(PIECE, math.ceil(min(count, MOST)) - len(written))
        output = MODEL.generate(ids, state=state, max_new_tokens=size, return_dict_in_generate=True, **sampling)
        new = output.sequences[0, ids.shape[1] :].tolist()
        written += new
        ids, state = output.sequences[:, -1:], output.pending_state
        yield decode(written), {"state": state, "last": ids}
        if new[-1] == TOKENIZER.eos_token_id:
            yield decode(written), None  # the text has ended: the next one begins anew
            return


def forget() -> tuple:
    """An empty memory."""
    return "", [], None


with gr.Blocks(title="A model that remembers") as demo:
    gr.Markdown(
        "# A model that remembers\nIt reads byte by byte. Its memory has "
        f"**{sum(part.nbytes for part in MODEL.init_state(1).values()):,} bytes**, however long the text is. It stays "
        "until you forget it: the next text is read after all that was read and written."
    )
    memory = gr.State(None)
    text = gr.Textbox(label="Text to read", lines=4, max_length=LONGEST)
    with gr.Row():
        count = gr.Slider(1, MOST, value=200, step=1, label="Bytes to write")
        temperature = gr.Slider(0, 1.5, value=0.7, label="Temperature")
    with gr.Row():
        go = gr.Button("Read and continue", variant="primary")
        clear = gr.Button("Forget")
    colored = gr.HighlightedText(label="Surprise of the text", color_map=COLORS)
    answer = gr.Textbox(label="Continuation", lines=6)
    go.click(surprise, [text, memory], colored, api_name="surprise").then(
        continue_text, [text, count, temperature, memory], [answer, memory], api_name="continue_text"
    )
    clear.click(forget, None, [answer, colored, memory], api_name="forget")

if __name__ == "__main__":
    demo.queue(default_concurrency_limit=2).launch()
