"""Rows: tokenizers and collators."""

import torch
import torch.nn.functional as F
from client_rows import row
from tiny_checkpoints import TEXTS, tiny_model, token_rows
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

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
    model = tiny_model()
    nats = count = 0.0
    for row_ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True):
        ids = row_ids[mask == 1]
        # As in stock models, padding on the left predicts the first byte: here from the zero state.
        padded = torch.cat([torch.zeros(1, dtype=torch.long), ids])[int(mask.all()) :]
        mask = torch.ones(1, len(padded), dtype=torch.long)
        mask[0, : len(padded) - len(ids)] = 0
        logits = model(padded[None], attention_mask=mask).logits[0, :-1]
        nats += F.cross_entropy(logits, padded[1:], reduction="sum")
        count += len(padded) - 1
    torch.testing.assert_close(model(**rows).loss, nats / count)
    return (
        "ignores the labels of byte 0, which is the padding: to learn the end, give the tokenizer another `pad_token`"
    )


@row("transformers", "`DataCollatorWithFlattening`: packed rows")
def flattening_collator(folder):
    rows = DataCollatorWithFlattening()(token_rows())
    logits = tiny_model()(**rows).logits[0]
    expected = [tiny_model()(torch.tensor([row["input_ids"]])).logits[0] for row in token_rows()]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-4)
    return "each row starts from a zero state (`position_ids`, `seq_idx`, `cu_seq_lens_q`)"
