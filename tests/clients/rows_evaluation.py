"""Rows: programs that measure models."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from client_rows import row
from tiny_checkpoints import TEXTS, save_checkpoint, tiny_model

from hf_recurrent import Corpus, evaluate_bits_per_byte, load_corpus

METRIC = Path(__file__).resolve().parents[2] / "metrics" / "bits_per_byte"
TASK = """\
task: own_text
dataset_path: text
dataset_kwargs:
  data_files: {test: FILE}
  sample_by: document
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
"""
DOCUMENT = "It was a dark night, and the café was closed.\n\n  Nobody came. " * 40


def bits_per_byte(corpus: Corpus) -> float:
    """Of the tiny model."""
    return evaluate_bits_per_byte(tiny_model(), corpus, progress=False)["bits_per_byte"]


@row("lm-eval", "`bits_per_byte` of a text file, `loglikelihood_rolling`", "datasets")
def lm_eval_bits_per_byte(folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    text = DOCUMENT.encode()
    (folder / "book.txt").write_bytes(text)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "own_text.yaml").write_text(TASK.replace("FILE", str(folder / "book.txt")))
    checkpoint = save_checkpoint(folder / "model")
    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={checkpoint},trust_remote_code=True,max_length=1000000",
        tasks=["own_text"],
        task_manager=TaskManager(include_path=str(folder / "tasks")),
        device="cpu",
        bootstrap_iters=0,
    )
    theirs = results["results"]["own_text"]["bits_per_byte,none"]

    # It reads byte 0 first, predicts every byte of the document, and no end byte: a binary episode that begins with 0.
    (folder / "after-zero.bin").write_bytes(b"\0" + text)
    read_alike = load_corpus(folder / "after-zero.bin", binary=True, cache_dir=folder / "cache")
    assert theirs * len(text) == pytest.approx(bits_per_byte(read_alike) * (len(text) + 1), rel=1e-5)
    ours = bits_per_byte(load_corpus(folder / "book.txt", cache_dir=folder / "cache"))
    assert theirs == pytest.approx(ours, rel=0.01) and theirs != pytest.approx(ours, rel=1e-5)
    return "with `max_length` above the longest document; [how it differs from `hf-recurrent evaluate`](#lm-eval)"


@row("lm-eval", "`hf-recurrent lm-eval run --model hf-recurrent`: documents of any length", "datasets")
def lm_eval_carried(folder):
    from lm_eval.api.instance import Instance

    from hf_recurrent.cli.lm_eval import main
    from hf_recurrent.evaluation.lm_eval_model import RecurrentLM

    documents = [DOCUMENT * 3, "Nobody.", "x", DOCUMENT[:1500]]  # longer and shorter than a block, and one byte
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "tasks").mkdir()
    task = TASK.replace("dataset_path: text", "dataset_path: json").replace("  sample_by: document\n", "")
    (folder / "tasks" / "own_text.yaml").write_text(task.replace("FILE", str(folder / "books.jsonl")))
    checkpoint, output = save_checkpoint(folder / "model"), folder / "results.json"
    words = f"run --model hf-recurrent --model_args pretrained={checkpoint},block_size=128 --tasks own_text"
    main([*words.split(), "--include_path", str(folder / "tasks"), "--device", "cpu", "--output_path", str(output)])
    (written,) = folder.glob("results*.json")
    theirs = json.loads(written.read_text())["results"]["own_text"]["bits_per_byte,none"]
    ours = bits_per_byte(Corpus.from_documents([text.encode() for text in documents]))
    assert theirs == pytest.approx(ours, rel=1e-6)

    # Multiple choice and generation are those of "hf", with contexts that are never cut.
    model = RecurrentLM(str(checkpoint), device="cpu")
    pair = (DOCUMENT.rstrip(), " Nobody came.")
    (likelihood, _), *_ = model.loglikelihood([Instance("loglikelihood", {}, pair, 0)])
    ids = torch.tensor([list("".join(pair).encode())])
    expected = tiny_model()(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])
    assert likelihood == pytest.approx(expected[-len(pair[1]) :].sum().item(), rel=1e-5)
    arguments = (DOCUMENT, {"until": ["\n"], "max_gen_toks": 4, "do_sample": False})
    (text,) = model.generate_until([Instance("generate_until", {}, arguments, 0)])
    assert isinstance(text, str)
    with pytest.raises(ValueError, match="byte 0"):
        model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a\0b",), 0)])
    with pytest.raises(ValueError, match=r"`batch_size` is 'auto'"):
        RecurrentLM(str(checkpoint), batch_size="auto")
    return "the number of `hf-recurrent evaluate`, to 1e-6"


@row("evaluate", "`evaluate.load('metrics/bits_per_byte')`")
def evaluate_metric(folder):
    import evaluate

    nats = []
    for text in TEXTS:  # every byte after the first, and the end byte
        ids = torch.tensor([[*text.encode(), 0]])
        logits = tiny_model()(ids[:, :-1]).logits
        nats.append(F.cross_entropy(logits[0], ids[0, 1:], reduction="none").tolist())
    result = evaluate.load(str(METRIC)).compute(predictions=nats, references=TEXTS, byte_level=True)
    episodes = Corpus.from_documents([text.encode() for text in TEXTS])
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte(episodes), rel=1e-5)
    return "the metric in this repository, `metrics/bits_per_byte`"


@row("gradio", "the metric's page as a Space, asked by `gradio_client`", "gradio-client", "evaluate")
def metric_space(folder):
    from gradio_client import Client

    page = runpy.run_path(str(METRIC / "app.py"))["demo"]
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True)
    try:
        client = Client(address, verbose=False)
        result = client.predict("[[2.1, 0.4, 0.3, 1.2]]", '["word"]', False, api_name="/compute")
    finally:
        page.close()
    assert result["bits_per_byte"] == pytest.approx(4 / math.log(2) / 4)
