"""Small tokenizers of the three kinds that text meets: whole words, byte-level BPE, BPE over blanks."""

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(50)]
BOS, UNKNOWN = 0, 2
_TEXT = Path(__file__).with_name("test_documents.py")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One id per word; adds BOS when asked for special tokens; believes that 512 tokens are its limit."""
    extra = ["Question:", "Answer:", "why"]
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORDS, *extra])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def piece_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as the Llama 3, Qwen and SmolLM families have it; adds BOS if it has one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[*special.values()]
    )
    core.train_from_iterator([_TEXT.read_text()], trainer)
    return _with_bos(core, special)


def unsplit_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE over the whole text at once, as Llama 2 has it: no step splits words before the merges."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=list(string.ascii_letters), special_tokens=["<unk>", *special.values()]
    )
    core.train_from_iterator([_TEXT.read_text()], trainer)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _with_bos(core, {"unk_token": "<unk>", **special})


def _with_bos(core: Tokenizer, special: dict[str, str]) -> PreTrainedTokenizerFast:
    if "bos_token" in special:
        bos = special["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)
