"""Tokenizers of words, built here: byte-level BPE, SentencePiece with bytes, and WordPiece."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The state of a recurrent model is its memory of the text that it has read. A server for it never reads the same "
    "text twice: not in the next turn, not after a restart, not for the second user. Der Zustand, größer als nötig. "
) * 3
END, START_OF_TURN, END_OF_TURN = range(3)
SPECIAL = ["<|end|>", "<|turn|>", "<|end_of_turn|>"]
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}<|end_of_turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
VOCAB_SIZE = 300


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As of GPT-2, with a chat template; every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 5, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[END], chat_template=TEMPLATE
    )


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """As of Gemma and Mistral: spaces are letters, and what is unknown becomes bytes; a text begins with <s>."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({*TEXT.replace(" ", "\u2581"), "\u2581"})
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("e", "r"), ("\u2581", "s"), ("\u2581s", "t")]
    vocabulary = {name: number for number, name in enumerate([*names, *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """As of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[END]"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")
