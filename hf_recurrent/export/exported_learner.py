"""Folders with a learner in C: header, source, weights, tokenizer, checksums and a card."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCardData

from hf_recurrent.export.c_footprint import Footprint
from hf_recurrent.export.c_learner import c_learner, c_vector_learner
from hf_recurrent.export.c_learner_plan import learner_setting
from hf_recurrent.export.new_folder import check_new, new_folder
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.vector_learner import VectorLearner

_KIND, _NAME = "exported_learner", "model"
_CARD = """---
{metadata}
---

# {title}, in C99

`{name}.c` predicts and learns from every {item}: exact real-time recurrent learning with {optimizer} and gradient
clipping. NaN and infinite losses and gradients change no weight. Nothing is allocated: all memory is in one struct.
Compile with `-O2 -fno-math-errno`, which vectorizes the optimizer; link with `-lm`.

{example}

All functions but `{name}_reset` and `{name}_save` return 0 or one of the errors in `{name}.h`.
"""
_EXAMPLE = """```c
#include "NAME.h"

static struct NAME_learner learner;  /* MACRO_LEARNER_BYTES */
static unsigned char saved[MACRO_SAVED_SIZE];
VARIABLES

NAME_init(&learner, file, size);  /* the bytes of NAME.weights; not needed afterwards */
CALLS
NAME_reset(&learner);  /* another UNIT begins; what was learned stays */
NAME_save(&learner, saved);
NAME_load(&learner, saved, sizeof saved);
```"""
_TOKENS = {
    "VARIABLES": "static float logits[MACRO_VOCAB_SIZE];\nfloat nats;",
    "CALLS": "NAME_learn(&learner, 'd', &nats);  /* a token of the stream; nats is its loss before */\n"
    "NAME_predict(&learner, logits);  /* of the next token */",
    "UNIT": "stream",
}
_VECTORS = {
    "VARIABLES": "float values[MACRO_INPUTS], next[MACRO_INPUTS], score;",
    "CALLS": "NAME_learn(&learner, values, &score);"
    "  /* a measurement; score is about 1 if it was expected, more for anomalies */\n"
    "NAME_predict(&learner, next);  /* the next measurement */",
    "UNIT": "series",
}
_TARGETS = {
    "VARIABLES": "float values[MACRO_INPUTS], target[MACRO_TARGETS], score;",
    "CALLS": "NAME_predict(&learner, values, target);  /* the target of a vector that was not read */\n"
    "NAME_learn(&learner, values, target, &score);  /* score is about 1 if it was expected, more for anomalies */",
    "UNIT": "series",
}


def save_c_learner(
    learner: OnlineLearner | VectorLearner, folder: str | os.PathLike, *, numbers: str = "float32"
) -> Footprint:
    """Export a learner in C into a new folder; returns its memory and arithmetic.

    It begins with the present weights; [`save_c_state`] gives the rest of what was learned.

    Args:
        learner: of float32 weights on the CPU, by the rule "rtrl" with stride 1; the learner in C has its optimizer,
            gradient clipping and tokenizer.
        folder: must not exist, or be empty.
        numbers: "float32"; "bfloat16" for the optimizer's moments and the sensitivities in memory; or "int16" for the
            trained matrices too, in fixed point from -8 to 8. Both round stochastically. The rest is float32.

    Raises:
        FileExistsError: the folder has files.
        ValueError: the model, its units or the optimizer are not supported.
    """
    folder = Path(folder)
    check_new(folder)
    metadata = ModelCardData(library_name="hf_recurrent", tags=["recurrent", "c"])
    if isinstance(learner, VectorLearner):
        text, optimizer, tokenizer = c_vector_learner(learner, _NAME, numbers), learner.optimizer, None
        title, item, example = "A model that learns from measurements", "vector", _VECTORS
        if learner.has_targets:
            title, item, example = "A model that learns a regression", "vector and its target", _TARGETS
    else:
        optimizer, tokenizer = learner.step.optimizer, learner.tokenizer
        text = c_learner(learner.model, learner_setting(learner, numbers), _NAME)
        title, item, example = f"A {learner.model.config.model_type} model that learns from a stream", "token", _TOKENS
    card = _CARD.format(
        metadata=metadata.to_yaml(),
        title=title,
        item=item,
        name=_NAME,
        optimizer=type(optimizer).__name__,
        example=_example(example),
    )
    with new_folder(folder, _KIND, card, tokenizer) as staging:
        (staging / f"{_NAME}.h").write_text(text.header, encoding="utf-8")
        (staging / f"{_NAME}.c").write_text(text.source, encoding="utf-8")
        (staging / f"{_NAME}.weights").write_bytes(text.weights)
    return text.footprint


def _example(parts: Mapping[str, str]) -> str:
    text = re.sub("|".join(parts), lambda match: parts[match[0]], _EXAMPLE)
    return text.replace("NAME", _NAME).replace("MACRO", _NAME.upper())
