"""An alphabet tokenizer as one of the `tokenizers` library, for clients that need that.

Ids are the same for all text that is valid Unicode. There are no bytes as input and no exact bytes as output: decoding
replaces bytes that are not UTF-8 by U+FFFD.
"""

from typing import Any

from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SETTINGS = ("model_input_names", "model_max_length", "padding_side", "truncation_side", "chat_template")


_VISIBLE = bytes_to_unicode()  # as in GPT-2 and `tokenizers`


def token_string(byte: int) -> str:
    """The string of the token of a byte."""
    # Byte 0 is its own string: special tokens are searched for in texts, where it must mean byte 0.
    return _VISIBLE[byte] if byte else "\x00"


def to_tokenizers(tokenizer: PreTrainedTokenizer) -> Any:
    """An `AlphabetTokenizer` as a `tokenizers.Tokenizer`: byte-level BPE without merges, with all added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    symbols, aliases = tokenizer.symbols, tokenizer.aliases
    vocab = {token_string(byte): index for index, byte in enumerate(symbols)}
    other = None if tokenizer.other_symbol is None else token_string(tokenizer.other_symbol[0])
    result = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=other, fuse_unk=False))
    if aliases:
        result.normalizer = normalizers.Sequence(
            [normalizers.Replace(old.decode("ascii"), new.decode("ascii")) for old, new in aliases.items()]
        )
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    if 0 in symbols:
        zero = AddedToken("\x00", special="\x00" in tokenizer.all_special_tokens, normalized=False)
        result.add_tokens([zero])
    # An added token with an id of the alphabet would replace the bytes of its characters.
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if index >= tokenizer.vocab_size:
            result.add_tokens([token])
    return result


def to_fast(tokenizer: PreTrainedTokenizer) -> PreTrainedTokenizerFast:
    """An `AlphabetTokenizer` as a `PreTrainedTokenizerFast`, with its special tokens, settings and chat template."""
    named = {name: getattr(tokenizer, name) for name in _NAMED_TOKENS}
    named = {name: token for name, token in named.items() if token is not None}
    others = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    settings = {name: getattr(tokenizer, name) for name in _SETTINGS}
    return PreTrainedTokenizerFast(
        tokenizer_object=to_tokenizers(tokenizer),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=others,
        **named,
        **settings,
    )
