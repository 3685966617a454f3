"""Images that a model draws: the pixels of a corpus of images, sampled one after another."""

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.data.pixel_images import GREY_LEVELS, PATCHES, tokens_to_images

_LENGTHS = {GREY_LEVELS: 28 * 28, PATCHES: 32 * 32}


def sample_images(
    model: PreTrainedModel,
    num_images: int = 64,
    *,
    vocab_size: int = GREY_LEVELS,
    temperature: float = 1.0,
    batch_size: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """Draw images of the kind of `mnist:` (V = 256) or `images:` (V = 16) corpora.

    The first token, which no model predicts, is 0: the empty corner where nearly all of these images begin. All others
    are sampled from the model's distribution. Random states and the mode of the model are left as they were.

    Args:
        model: a causal language model that was trained on such a corpus; it runs where it is.
        num_images: n.
        vocab_size: which of the two kinds.
        temperature: below 1 for likelier images.
        batch_size: images drawn side by side.
        seed: of the samples.

    Returns:
        (n, H, W) uint8, for [`save_image_sheet`].

    Raises:
        ValueError: another vocabulary, or a number below 1.
    """
    if vocab_size not in _LENGTHS:
        raise ValueError(f"vocab_size is {vocab_size}, allowed is one of {', '.join(map(str, _LENGTHS))}")
    for name, value in (("num_images", num_images), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, allowed is at least 1")
    pieces = []
    with evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for first in range(0, num_images, batch_size):
            begin = torch.zeros(min(batch_size, num_images - first), 1, dtype=torch.long, device=model.device)
            tokens = model.generate(
                input_ids=begin,
                attention_mask=torch.ones_like(begin),  # otherwise a first token 0 may be taken for padding
                max_new_tokens=_LENGTHS[vocab_size] - 1,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                eos_token_id=None,  # nor does it end an image
            )
            pieces.append(tokens_to_images(tokens, vocab_size))
    return np.concatenate(pieces)
