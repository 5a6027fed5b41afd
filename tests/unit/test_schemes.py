"""benchmarks/training.py: what the compared schemes have in common."""

import argparse

import pytest

from bdcore.config import load_config
from bdcore.workspace import REPOSITORY
from benchmarks.training import SCHEMES, _spec, scheme

STUDY = load_config(REPOSITORY / "configs/cpu.yaml").training
"""160 steps, 12 of warmup, rate 1e-3."""


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("steps", "warmup"), [(3, 0), (18, 1), (94, 7), (320, 24)])
def test_a_run_has_the_studys_share_of_warmup_whatever_its_steps(name, steps, warmup):
    config = scheme(STUDY, name, 4096, steps, 2.0)
    assert (config.steps, config.warmup, config.learning_rate) == (steps, warmup, 2e-3)
    assert config.longest == 4096


def test_a_scheme_may_have_sequences_of_its_own_length():
    assert _spec("dense:1024") == "dense:1024" and _spec("paper") == "paper"
    for wrong in ("sparse", "dense:1k", ":1024"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            _spec(wrong)
