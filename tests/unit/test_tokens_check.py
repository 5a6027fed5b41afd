"""What the tokenizer tells before any model is loaded: document lengths, and a drafter of another tokenizer."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bdcore.config import ConfigError, load_config
from bdcore.models.loading import load_tokenizer
from bdcore.preflight import check_tokens, inputs
from bdcore.runtime import seed_for
from bdcore.targets.prompts import distinct_prompts
from tests.conftest import tiny_llama
from tests.tiny import byte_tokenizer, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def refusal(study, *overrides) -> str:
    config = load_config(study, list(overrides))
    found = inputs(config)
    with pytest.raises(ConfigError) as caught:
        check_tokens(config, found, load_tokenizer(config.verifier.source))
    text = str(caught.value)
    assert "\n" not in text
    return text


def drafter_folder(path, tokenizer, vocab=260):
    tiny_llama(vocab=vocab).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return f"drafter={{kind: pretrained, source: {path}}}"


def shuffled_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_a_study_that_fits_passes(study):
    config = load_config(study)
    check_tokens(config, inputs(config), load_tokenizer(config.verifier.source))


def test_validation_that_leaves_no_generated_sequence_is_refused_before_any_model_is_loaded(study):
    """One continuation, and seven of eight forced documents held out: the draw decides whether it is of one of them."""
    few = ("targets.generated=1", "targets.forced=8", "training.validation.sequences=7")
    few = (*few, "training.mixture={forced: 0.5, generated: 0.5}")
    told = []
    for seed in range(12):
        config = load_config(study, [*few, f"seed={seed}"])
        found, tokenizer = inputs(config), load_tokenizer(config.verifier.source)
        forced, generated = (
            distinct_prompts(found.training, tokenizer, length=n, count=c, seed=seed_for(seed, mode)).prompts
            for mode, n, c in (("forced", 160, 8), ("generated", 96, 1))
        )
        if generated[0].doc_id in {prompt.doc_id for prompt in forced[1:]}:
            told.append(refusal(study, *few, f"seed={seed}"))
        else:
            check_tokens(config, found, tokenizer)
    assert 0 < len(told) < 12
    assert all(text.startswith("training.mixture.generated = 0.5: no generated sequence is left") for text in told)
    assert "raise targets.generated, lower validation.sequences, or set" in told[0]


def test_a_drafter_of_another_tokenizer_is_refused_with_the_first_differing_id(study, tmp_path):
    text = refusal(study, "base=null", drafter_folder(tmp_path / "other", shuffled_tokenizer()))
    assert "differs from the verifier's at id 3" in text


def test_a_drafter_that_lacks_ids_of_the_verifier_is_refused(study, tmp_path):
    text = refusal(study, "base=null", drafter_folder(tmp_path / "small", byte_tokenizer(), vocab=200))
    assert "200 ids do not cover" in text


def test_a_drafter_of_the_same_tokenizer_passes(study, tmp_path):
    config = load_config(study, ["base=null", drafter_folder(tmp_path / "same", byte_tokenizer())])
    check_tokens(config, inputs(config), load_tokenizer(config.verifier.source))
