"""Sample texts and images from a model."""

import itertools

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.data.pixel_readers import GREY_LEVELS, PATCHES, tokens_to_images

# Of a prompt in characters, and of the beginning of a document that is read for it.
_PROMPT_LENGTH, _BYTES_READ, _DOCUMENTS_READ = 24, 120, 20
_IMAGE_LENGTHS = {GREY_LEVELS: 28 * 28, PATCHES: 32 * 32}
_QUOTES = frozenset("'\"`\\$!")


def prompt_from(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first words of a document of a corpus, if possible without quotes, which a shell would need escaped.

    None if no beginning of a document can be printed.
    """
    quoted = None
    for episode in itertools.islice(corpus, _DOCUMENTS_READ):
        beginning = tokenizer.decode_bytes(episode[:_BYTES_READ]).decode("utf-8", "ignore")
        for line in beginning.split("\n"):
            words = "".join(character for character in line if character.isprintable())
            if len(words) > _PROMPT_LENGTH:
                words = words[:_PROMPT_LENGTH].rpartition(" ")[0] or words[:8]
            if words.strip() and not set(words) & _QUOTES:
                return words
            quoted = quoted or (words if words.strip() else None)
    return quoted


def check_prompts(prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError that names the first of `sample_prompts` that is empty or cannot be encoded."""
    for prompt in prompts:
        try:
            empty = not len(tokenizer(prompt)["input_ids"])
        except ValueError as error:
            raise ValueError(f"`sample_prompts` has {prompt!r}, which cannot be encoded: {error}") from error
        if empty:
            raise ValueError(f"`sample_prompts` has {prompt!r}; a prompt must have at least one byte.")


def generate_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    length: int,
    *,
    temperature: float = 0.8,
) -> list[str]:
    """One continuation of at most `length` bytes per prompt; torch's random state and the mode are restored."""
    samples = []
    with evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=length,
                do_sample=True,
                temperature=temperature,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                synced_gpus=False,  # of several processes, one may generate alone
            )
            new = output[0, inputs["input_ids"].shape[1] :]
            samples.append(tokenizer.decode(new, skip_special_tokens=True))
    return samples


def sample_images(
    model: PreTrainedModel,
    num_images: int = 64,
    *,
    vocab_size: int = GREY_LEVELS,
    temperature: float = 1.0,
    batch_size: int = 64,
    seed: int = 0,
) -> np.ndarray:
    """Sample images like the images of a `mnist:` (V = 256) or `images:` (V = 16) corpus.

    The first token, which no model predicts, is 0: nearly all of these images begin with an empty corner. The others
    are sampled from the model. torch's random state and the model's mode are restored.

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
    if vocab_size not in _IMAGE_LENGTHS:
        raise ValueError(f"`vocab_size` is {vocab_size}; it must be one of {', '.join(map(str, _IMAGE_LENGTHS))}.")
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
                max_new_tokens=_IMAGE_LENGTHS[vocab_size] - 1,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                eos_token_id=None,  # and no token ends an image
            )
            pieces.append(tokens_to_images(tokens, vocab_size))
    return np.concatenate(pieces)
