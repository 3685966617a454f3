"""The page of the metric as a Space: losses and documents as JSON in, bits per byte out."""

import json
from pathlib import Path

import evaluate
import gradio

_METRIC = evaluate.load(str(Path(__file__).parent))
_EXAMPLE = ["[[2.1, 0.4, 0.3, 1.2]]", '["word"]', False]


def compute(predictions: str, references: str, byte_level: bool) -> dict[str, float | int]:
    """The metric of JSON texts; a gradio.Error for input that it refuses."""
    try:
        values = json.loads(predictions), json.loads(references)
        return _METRIC.compute(predictions=values[0], references=values[1], byte_level=byte_level)
    except (ValueError, TypeError) as error:
        raise gradio.Error(str(error)) from error


demo = gradio.Interface(
    compute,
    [
        gradio.Code(language="json", label="predictions: nats of each token of each document"),
        gradio.Code(language="json", label="references: the documents"),
        gradio.Checkbox(label="byte_level: tokens are bytes"),
    ],
    gradio.JSON(label="result"),
    examples=[_EXAMPLE],
    title="Bits per byte",
    description="Bits that a language model needs per byte of a document, whatever its tokenizer.",
    cache_examples=False,
)

if __name__ == "__main__":
    demo.launch()
