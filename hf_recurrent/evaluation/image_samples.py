"""Sample images from a model, pixel by pixel."""

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
    """Sample images like those of a `mnist:` (V = 256) or `images:` (V = 16) corpus.

    The first token, which no model predicts, is 0: nearly all of these images begin with an empty corner. The others
    are sampled from the model. Random states and the model's mode are restored.

    Args:
        model: a causal language model trained on such a corpus.
        num_images: number of images.
        vocab_size: V of the corpus.
        temperature: divides the logits.
        batch_size: B, images sampled in parallel.
        seed: seed of the samples.

    Returns:
        Images (num_images, height, width) uint8, for [`save_image_sheet`].

    Raises:
        ValueError: another vocabulary, or a number below 1.
    """
    if vocab_size not in _LENGTHS:
        raise ValueError(f"`vocab_size` is {vocab_size}; it must be one of {', '.join(map(str, _LENGTHS))}.")
    for name, value in (("num_images", num_images), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    pieces = []
    with evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for first in range(0, num_images, batch_size):
            begin = torch.zeros(min(batch_size, num_images - first), 1, dtype=torch.long, device=model.device)
            tokens = model.generate(
                input_ids=begin,
                attention_mask=torch.ones_like(begin),  # the first token 0 is not padding
                max_new_tokens=_LENGTHS[vocab_size] - 1,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                eos_token_id=None,  # and no token ends an image
            )
            pieces.append(tokens_to_images(tokens, vocab_size))
    return np.concatenate(pieces)
