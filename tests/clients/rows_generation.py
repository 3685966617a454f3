"""Rows: `generate` and what belongs to it."""

import threading

import torch
from client_rows import refusal, row
from tiny_checkpoints import TEXTS, batch, save_checkpoint, tiny_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from hf_recurrent import ByteTokenizer

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@row("transformers", "`generate`, greedy, a padded batch")
def greedy_generation(folder):
    model, inputs = tiny_model(), batch()
    together = model.generate(**inputs, **GREEDY)[:, inputs.input_ids.shape[1] :]
    for text, expected in zip(TEXTS, together, strict=True):
        alone = ByteTokenizer()(text, return_tensors="pt")
        assert torch.equal(model.generate(**alone, **GREEDY)[0, -6:], expected)
    return "each row as alone"


@row("transformers", "`generate`, sampling: temperature, top-k, top-p, repetition penalty, several sequences")
def sampled_generation(folder):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    output = tiny_model().generate(**batch(), **options, max_new_tokens=5, min_new_tokens=5, num_return_sequences=2)
    assert len(output) == 2 * len(TEXTS)


@row("transformers", "`generate`, beam search")
def beam_search(folder):
    model, inputs = tiny_model(), batch(TEXTS[:1])
    output = model.generate(
        **inputs, **GREEDY, num_beams=3, output_scores=True, return_dict_in_generate=True, length_penalty=0.0
    )
    ids = output.sequences
    logits = model(ids).logits[:, inputs.input_ids.shape[1] - 1 : -1].log_softmax(-1)
    logits[..., 0] = float("-inf")
    total = logits.gather(-1, ids[:, inputs.input_ids.shape[1] :, None]).sum()
    torch.testing.assert_close(output.sequences_scores[0], total, atol=1e-3, rtol=1e-3)
    return "the state is reordered with the beams"


@row("transformers", "`StoppingCriteria`, `stop_strings`")
def stopping(folder):
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 6, dtype=torch.bool)

    model, inputs = tiny_model(), ByteTokenizer()("def", return_tensors="pt")
    criteria = StoppingCriteriaList([AfterThree()])
    assert model.generate(**inputs, max_new_tokens=20, stopping_criteria=criteria, do_sample=False).shape[1] <= 6
    free = model.generate(**inputs, **GREEDY)[0]
    word = ByteTokenizer().decode(free[4:5])
    stopped = model.generate(
        **inputs, max_new_tokens=6, do_sample=False, stop_strings=[word], tokenizer=ByteTokenizer()
    )
    assert word in ByteTokenizer().decode(stopped[0, 3:]) and stopped.shape[1] <= 5


@row("transformers", "a `LogitsProcessor`, `bad_words_ids`, `output_logits`")
def logits_processor(folder):
    class OnlyA(LogitsProcessor):
        def __call__(self, input_ids, scores):
            masked = torch.full_like(scores, float("-inf"))
            masked[:, ord("a")] = scores[:, ord("a")]
            return masked

    output = tiny_model().generate(
        **batch(), **GREEDY, logits_processor=[OnlyA()], output_logits=True, return_dict_in_generate=True
    )
    assert (output.sequences[:, -6:] == ord("a")).all() and len(output.logits) == 6


@row("transformers", "classifier-free guidance, `guidance_scale`")
def guided_generation(folder):
    model, inputs = tiny_model(), ByteTokenizer()("def", return_tensors="pt")
    output = model.generate(**inputs, **GREEDY, guidance_scale=3.0)
    ids, scale = inputs.input_ids, 3.0
    for _ in range(6):  # log p(unconditional) + scale · (log p - log p(unconditional)); no prompt but its last byte
        conditional, free = (model(each).logits[:, -1].log_softmax(-1) for each in (ids, ids[:, 2:]))
        scores = free + scale * (conditional - free)
        scores[:, 0] = float("-inf")
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(output, ids)
    return "the state of the unconditional text is carried, too"


@row("transformers", "`GenerationConfig` saved with the checkpoint")
def generation_config(folder):
    model = tiny_model()
    model.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=0, pad_token_id=0, do_sample=False)
    save_checkpoint(folder, model)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generation_config.max_new_tokens == 3
    assert loaded.generate(**batch()).shape[1] <= batch().input_ids.shape[1] + 3


@row("transformers", "`TextStreamer`, `TextIteratorStreamer`")
def streamers(folder):
    model, tokenizer = tiny_model(), ByteTokenizer()
    inputs = tokenizer("def", return_tensors="pt")
    expected = tokenizer.decode(model.generate(**inputs, **GREEDY)[0, 3:])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()
    model.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer))
    return "our `ByteStreamer` and `ByteIteratorStreamer` never print half a character"


@row("transformers", "`generate(inputs_embeds=...)`")
def embedded_prompt(folder):
    model, inputs = tiny_model(), ByteTokenizer()("def", return_tensors="pt")
    expected = model.generate(**inputs, **GREEDY)[:, 3:]
    embeddings = model.get_input_embeddings()(inputs.input_ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY), expected)


@row("transformers", "`torch.compile(model.forward)` in `generate`", slow=True)
def compiled_generation(folder):
    model, inputs = tiny_model(), ByteTokenizer()("def", return_tensors="pt")
    expected = model.generate(**inputs, **GREEDY)
    model.forward = torch.compile(model.forward)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


@row("transformers", "assisted generation, `assistant_model`")
def assisted_generation(folder):
    reason = "transformers cuts a cache back to the accepted tokens, which a state does not allow; "
    reason += "`generate_speculative` does it"
    with refusal(ValueError, "use `hf_recurrent.generate_speculative", reason):
        tiny_model().generate(**batch(TEXTS[:1]), **GREEDY, assistant_model=tiny_model())


@row("transformers", "prompt lookup, `prompt_lookup_num_tokens`")
def prompt_lookup(folder):
    with refusal(ValueError, "use `hf_recurrent.generate_speculative", "as assisted generation"):
        tiny_model().generate(**batch(TEXTS[:1]), **GREEDY, prompt_lookup_num_tokens=2)


@row("transformers", "continuous batching, `generate_batch`")
def continuous_batching(folder):
    inputs = [row.tolist() for row in batch(TEXTS[:1]).input_ids]
    with refusal(ValueError, "num_attention_heads", "needs a paged KV cache, which a recurrent model does not have"):
        tiny_model().generate_batch(inputs, generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=0))
