"""Draw the memory of an SMT-RNN while it reads an image, as colours over the image and as a path.

    python scripts/picture_memory.py runs/smt-mnist mnist:data/mnist
    python scripts/picture_memory.py runs/smt-mnist mnist:data/mnist --split test --images 3 5 --projection tsne

A row of the figure shows the image, the memory after each token projected to three numbers (as red, green and blue at
the token's place), and its path projected to two (SMT, appendix, figures of memory evolution).
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import load_corpus, tokens_to_images
from hf_recurrent.data.pixel_readers import pixel_format
from hf_recurrent.plotting import require_pyplot
from papers.engine.projections import as_colours, project


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory or Hub id of an SMT-RNN")
    parser.add_argument("corpus", help="mnist:FOLDER or images:FOLDER")
    parser.add_argument("--split", default="train", choices=["train", "test"])
    parser.add_argument("--images", type=int, nargs="+", default=[0, 1, 2], metavar="NUMBER")
    parser.add_argument("--projection", default="pca", choices=["pca", "tsne"], help="tsne needs scikit-learn")
    parser.add_argument("--output", type=Path, default=Path("memory.png"))
    return parser


@torch.no_grad()
def memories(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """The memory after each token, (T, Z·D)."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model.unroll(model.init_state(1)["memory"], ids)[0].flatten(1).float().numpy()


def main() -> None:
    """Save the figure. Bad input ends it with one sentence."""
    parser = build_parser()
    options = parser.parse_args()
    try:
        if pixel_format([options.corpus]) is None:
            raise ValueError(f"corpus is {options.corpus!r}, allowed is mnist:FOLDER or images:FOLDER")
        corpus = load_corpus(options.corpus, split=options.split)
        for number in options.images:
            if not 0 <= number < len(corpus):
                raise ValueError(f"--images has {number}, allowed is 0 to {len(corpus) - 1}")
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint).eval()
        if not hasattr(model, "unroll"):
            raise ValueError(f"checkpoint `{options.checkpoint}` is {model.config.model_type}, allowed is smt_rnn")
        draw(model, corpus, options)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def draw(model: torch.nn.Module, corpus, options: argparse.Namespace) -> None:
    """Draw a row of three panels for each image."""
    pyplot = require_pyplot()
    count = len(options.images)
    figure, axes = pyplot.subplots(count, 3, figsize=(9, 3 * count), layout="constrained", squeeze=False)
    for (image, colours, path), number in zip(axes, options.images, strict=True):
        tokens = np.asarray(corpus[number])
        states = memories(model, tokens)
        side = math.isqrt(len(tokens))
        image.imshow(tokens_to_images(tokens, corpus.vocab_size), cmap="gray")
        shades = as_colours(project(states, 3, options.projection))
        colours.imshow(shades.reshape(side, side, 3))
        track = project(states, 2, options.projection)
        path.plot(*track.T, color="lightgray", linewidth=0.5, zorder=0)
        path.scatter(*track.T, c=shades, s=4)
        for panel in (image, colours):
            panel.axis("off")
    for panel, title in zip(axes[0], ("image", f"memory, {options.projection}", "its path"), strict=True):
        panel.set_title(title)
    figure.savefig(options.output, dpi=150)
    pyplot.close(figure)
    print(f"Saved {options.output}")


if __name__ == "__main__":
    main()
