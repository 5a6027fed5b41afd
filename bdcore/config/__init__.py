"""The one configuration: a frozen pydantic tree, read from YAML, changed by dotted overrides, checked at once.

Defaults are the paper's (arXiv 2606.00144 and its authors' code); small sizes live in `configs/*.yaml`.
"""

from bdcore.config.corpus import ASKING, FRAMED, Chat, CorpusConfig, FrameName
from bdcore.config.files import load_config
from bdcore.config.grid import OWN_DRAFTERS, Exclusion, GridConfig
from bdcore.config.models import DrafterConfig, DtypeName, ModelConfig, RuntimeConfig
from bdcore.config.section import ConfigError
from bdcore.config.sparse import SparseConfig
from bdcore.config.study import Config
from bdcore.config.training import (
    LossConfig,
    MixtureConfig,
    TargetsConfig,
    TrainingConfig,
    ValidationConfig,
    ViewsConfig,
)

__all__ = [
    "ASKING",
    "FRAMED",
    "OWN_DRAFTERS",
    "Chat",
    "Config",
    "ConfigError",
    "CorpusConfig",
    "DrafterConfig",
    "DtypeName",
    "Exclusion",
    "FrameName",
    "GridConfig",
    "LossConfig",
    "MixtureConfig",
    "ModelConfig",
    "RuntimeConfig",
    "SparseConfig",
    "TargetsConfig",
    "TrainingConfig",
    "ValidationConfig",
    "ViewsConfig",
    "load_config",
]
