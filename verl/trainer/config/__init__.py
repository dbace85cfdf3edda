"""Configuration: ``load_config(overrides) -> Config``, checked and frozen. Keys and defaults: ``ppo_trainer.yaml``."""

from verl.trainer.config.convert import config_to_yaml, from_dict, to_dict
from verl.trainer.config.loading import load_config
from verl.trainer.config.paths import REPO_ROOT, locate, run_dir
from verl.trainer.config.schema import Config

__all__ = ["REPO_ROOT", "Config", "config_to_yaml", "from_dict", "load_config", "locate", "run_dir", "to_dict"]
