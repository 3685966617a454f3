"""Folders with a learner in C: header, source, weights, tokenizer, checksums and a card."""

import os
from pathlib import Path

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent.checkpoints.manifest import write_manifest
from hf_recurrent.export.c_learner import c_learner
from hf_recurrent.export.c_learner_plan import LearnerSetting
from hf_recurrent.export.new_folder import check_new, new_folder

_KIND, _NAME = "exported_learner", "model"
_CARD = """---
{metadata}
---

# A {model_type} model that learns from a stream, in C99

`{name}.c` predicts and learns from every token: exact real-time recurrent learning with {optimizer} and gradient
clipping. NaN and infinite losses and gradients change no weight. Nothing is allocated: all memory is in one struct.
Compile with `-O2 -fno-math-errno`, which vectorizes the optimizer; link with `-lm`.

```c
#include "{name}.h"

static struct {name}_learner learner;  /* {macro}_LEARNER_BYTES */
static unsigned char saved[{macro}_SAVED_SIZE];
static float logits[{macro}_VOCAB_SIZE];
float nats;

{name}_init(&learner, file, size);  /* the bytes of {name}.weights; not needed afterwards */
{name}_learn(&learner, 'd', &nats);  /* a token of the stream; nats is its loss before */
{name}_predict(&learner, logits);  /* of the next token */
{name}_save(&learner, saved);
{name}_load(&learner, saved, sizeof saved);
```

All functions but `{name}_save` return 0 or one of the errors in `{name}.h`.
"""


def save_c_learner(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    setting: LearnerSetting,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Export a learner in C into a new folder.

    Args:
        model: a language model with float32 weights and diagonal recurrent units, on the CPU.
        folder: must not exist, or be empty.
        setting: how it learns.
        tokenizer: saved with it.

    Raises:
        FileExistsError: the folder has files.
        ValueError: the model, its units or the optimizer are not supported.
    """
    folder = Path(folder)
    check_new(folder)
    learner = c_learner(model, setting, _NAME)
    kind, metadata = model.config.model_type, ModelCardData(library_name="hf_recurrent", tags=["recurrent", "c"])
    card = _CARD.format(
        metadata=metadata.to_yaml(),
        model_type=kind,
        name=_NAME,
        macro=_NAME.upper(),
        optimizer=type(setting.optimizer).__name__,
    )
    with new_folder(folder) as staging:
        (staging / f"{_NAME}.h").write_text(learner.header, encoding="utf-8")
        (staging / f"{_NAME}.c").write_text(learner.source, encoding="utf-8")
        (staging / f"{_NAME}.weights").write_bytes(learner.weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        write_manifest(staging, kind=_KIND)
        # After the manifest: a card may be edited.
        (staging / "README.md").write_text(card, encoding="utf-8")
