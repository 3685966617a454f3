"""Rows: tokenizers and collators."""

import torch
from client_rows import row
from tiny_checkpoints import TEXTS, tiny_model, token_rows
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, DataCollatorWithFlattening

from hf_recurrent import ByteTokenizer


@row("tokenizers", "the checkpoint's `tokenizer.json` in `tokenizers.Tokenizer`")
def tokenizers_file(folder):
    from tokenizers import Tokenizer

    ByteTokenizer().save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == ByteTokenizer()(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@row("datasets", "`Dataset.map(tokenizer, batched=True)`, `set_format('torch')`")
def mapped_dataset(folder):
    from datasets import Dataset

    data = Dataset.from_dict({"text": TEXTS}).map(lambda rows: ByteTokenizer()(rows["text"]), batched=True)
    data.set_format("torch", columns=["input_ids"])
    assert data[2]["input_ids"].tolist() == list("café".encode())


@row("transformers", "`DataCollatorForLanguageModeling(tokenizer, mlm=False)`")
def language_modeling_collator(folder):
    rows = DataCollatorForLanguageModeling(ByteTokenizer(), mlm=False)(token_rows())
    assert (rows["labels"][rows["attention_mask"] == 0] == -100).all()
    loss = tiny_model()(**rows).loss
    parts = [tiny_model()(ids := torch.tensor([row["input_ids"]]), labels=ids).loss for row in token_rows()]
    counts = [len(row["input_ids"]) - 1 for row in token_rows()]
    expected = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(loss, expected)
    return "padding is ignored: the same loss as row by row. Byte 0 inside a text is a label only if it is not the padding id"


@row("transformers", "`DataCollatorWithFlattening`: packed rows")
def flattening_collator(folder):
    rows = DataCollatorWithFlattening()(token_rows())
    logits = tiny_model()(**rows).logits[0]
    expected = [tiny_model()(torch.tensor([row["input_ids"]])).logits[0] for row in token_rows()]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-4)
    return "each row starts from a zero state (`position_ids`, `seq_idx`, `cu_seq_lens_q`)"
