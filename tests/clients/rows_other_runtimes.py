"""Rows: other runtimes and frameworks around models."""

import numpy as np
import torch
from client_rows import row
from tiny_checkpoints import TEXTS, batch, save_checkpoint, tiny_model
from transformers import AutoModel, pipeline


class Step(torch.nn.Module):
    """One step with the state as a list: ids (B, 1) and state in, logits (B, 1, V) and state out."""

    def __init__(self, model):
        super().__init__()
        self.model, self.names = model, list(model.init_state(1))

    def forward(self, ids, *state):
        output = self.model(ids, state=dict(zip(self.names, state, strict=True)))
        return output.logits, *(output.state[name] for name in self.names)


@row("onnxruntime", "one step by `torch.onnx.export`, a text read step by step", "onnxscript")
def onnx_step(folder):
    import onnxruntime

    model = tiny_model()
    state = list(model.init_state(1).values())
    path = str(folder / "step.onnx")
    torch.onnx.export(Step(model), (torch.tensor([[1]]), *state), path, dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    values, logits = [tensor.numpy() for tensor in state], []
    text = "café".encode()
    for byte in text:
        output, *values = session.run(None, dict(zip(names, [np.array([[byte]]), *values], strict=True)))
        logits.append(output)
    expected = model(torch.tensor([list(text)])).logits
    torch.testing.assert_close(torch.from_numpy(np.concatenate(logits, 1)), expected, atol=1e-4, rtol=1e-3)


@row("executorch", "one step by `torch.export` and `to_edge`")
def executorch_step(folder):
    from executorch.exir import to_edge

    model = tiny_model()
    state = list(model.init_state(1).values())
    ids = torch.tensor([[97]])
    program = to_edge(torch.export.export(Step(model), (ids, *state))).to_executorch()
    (folder / "step.pte").write_bytes(program.buffer)
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(folder / "step.pte").load_method("forward")
    torch.testing.assert_close(method.execute([ids, *state])[0], model(ids).logits, atol=1e-4, rtol=1e-3)


@row("sentence-transformers", "`SentenceTransformer` with mean pooling")
def sentence_embeddings(folder):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    words = Transformer(str(save_checkpoint(folder)))
    model = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension(), "mean")], device="cpu")
    embeddings = torch.from_numpy(model.encode(TEXTS))
    inputs = batch()
    hidden = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
    mask = inputs.attention_mask[..., None]
    torch.testing.assert_close(embeddings, (hidden * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-4)


@row("langchain-huggingface", "`HuggingFacePipeline`")
def langchain_pipeline(folder):
    from langchain_huggingface import HuggingFacePipeline

    generator = pipeline("text-generation", model=str(save_checkpoint(folder)), max_new_tokens=4, do_sample=False)
    chain = HuggingFacePipeline(pipeline=generator)
    assert chain.invoke("def ").startswith("def ")
    assert len("".join(chain.stream("def "))) > 0
