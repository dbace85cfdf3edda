"""Command line -> YAML (defaults, profile, overrides) -> one typed, checked, frozen ``Config``."""

import dataclasses
import difflib
import logging
from pathlib import Path
from typing import Any

import yaml

from verl.trainer.config import family
from verl.trainer.config.convert import from_dict, known_keys, unknown_key
from verl.trainer.config.paths import locate
from verl.trainer.config.schema import Config
from verl.trainer.config.validation import validate, warnings_of
from verl.utils.hub import settle_name

CONFIG_DIR = Path(__file__).resolve().parent
log = logging.getLogger(__name__)


def load_config(overrides: list[str] | None = None) -> Config:
    """The configuration for a command line of ``key=value`` overrides.

    Order: ``ppo_trainer.yaml``, then the profile (``profile=cpu_demo``), then the overrides, wherever the profile
    stands among them. Paths come back absolute. What works but is odd (a retired key, a shaping that cancels) is one
    warning each, on this module's logger.

    Raises ValueError, one sentence, for an unknown key, a value that doesn't fit, or an impossible combination.
    """
    data = _compose(_translate(overrides or []))
    _replace_loggers(data)
    _take_thresholds(data, overrides or [])
    config = _cut_mini_batch(_absolute(from_dict(data)))
    validate(config)
    for warning in warnings_of(config):
        log.warning(warning)
    return config


def load_run_config(file: Path, overrides: list[str] | None = None) -> Config:
    """The configuration that a run wrote down (its ``config.yaml``), with ``overrides`` over it.

    Raises ValueError as ``load_config`` does, and for a file that can't be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    try:
        tree = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file} can't be read as YAML ({error}); give a run's config.yaml") from None
    parser = OverridesParser.create()
    for text in _translate(overrides or []):
        try:
            parsed = parser.parse_override(text)
        except HydraException:
            raise _unreadable(text) from None
        OmegaConf.update(tree, parsed.key_or_group, parsed.value(), force_add=True)
    config = _absolute(from_dict(OmegaConf.to_container(tree, resolve=True)))
    validate(config)
    return config


def profiles() -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / "profile").glob("*.yaml"))


def key_table() -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, read from ``ppo_trainer.yaml`` and its comments."""
    table: list[tuple[str, str, str]] = []
    parents: list[str] = []
    for line in (CONFIG_DIR / "ppo_trainer.yaml").read_text(encoding="utf-8").splitlines():
        setting, _, meaning = line.partition(" # ")
        name, found, value = setting.partition(":")
        if not found or not name.strip().isidentifier() or name == "defaults":
            continue
        depth = (len(name) - len(name.lstrip())) // 2
        parents = [*parents[:depth], name.strip()]
        if value.strip():
            table.append((".".join(parents), value.strip(), meaning.strip()))
    return table


def _translate(overrides: list[str]) -> list[str]:
    """The overrides in our own names: aliases and values replaced, retired ones dropped, unknown ones refused."""
    given: dict[str, str] = {}
    aliased: dict[str, str] = {}
    for text in overrides:
        typed, found, value = text.partition("=")
        key = typed.strip().lstrip("+").removeprefix("/")
        if not found or key.startswith(("-", "~")):
            raise ValueError(f"{text!r} is not an override; write key=value, such as trainer.total_training_steps=10")
        target = family.ALIASES.get(key, key)
        if target in known_keys():
            (aliased if target != key else given)[target] = family.VALUES.get((target, value.strip()), value)
        elif why := family.replacement(key):
            log.warning(f"{key} is retired and has no effect: {why}")
        else:
            raise unknown_key(key)
    return [f"{key}={value}" for key, value in ({**aliased, **given}).items()]


def _compose(overrides: list[str]) -> dict[str, Any]:
    # Imported here: workers import this package for its types and don't need hydra.
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    overrides = _check_profile(overrides)
    parser = OverridesParser.create()
    for text in overrides:
        try:
            several = parser.parse_override(text).is_sweep_override()
        except HydraException:
            raise _unreadable(text) from None
        if several:
            raise ValueError(f"{text!r} holds several values; a list is written key=[a,b], and a run takes one setting")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return OmegaConf.to_container(compose("ppo_trainer", overrides=overrides), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, KeyError | AttributeError):  # inside a dictionary given for a section
            raise unknown_key(error.__cause__.full_key) from None
        raise ValueError(f"the configuration doesn't resolve: {str(error).strip().splitlines()[0]}") from error


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"can't read {text!r}; quote a value that holds a comma, a bracket, = or a quote: 'key=\"value\"'"
    )


def _check_profile(overrides: list[str]) -> list[str]:
    """Refuse an unknown profile by name (hydra would list search paths); an empty one means none."""
    names = [text.partition("=")[2].strip() for text in overrides if text.startswith("profile=")]
    overrides = [text for text in overrides if not text.startswith("profile=")]
    if not names or names[-1] in ("", "null", "''", '""'):
        return overrides
    if names[-1] not in profiles():
        near = difflib.get_close_matches(names[-1], profiles(), n=1)
        hint = f"did you mean {near[0]}? known: " if near else "known: "
        raise ValueError(f"profile={names[-1]} is unknown; {hint}{', '.join(profiles())}")
    return [f"profile={names[-1]}", *overrides]


def _replace_loggers(data: dict[str, Any]) -> None:
    trainer = data["trainer"]
    names = trainer.get("logger") if isinstance(trainer, dict) else None
    if not isinstance(names, list):
        return
    for name in sorted(set(names) & set(family.LOGGERS)):
        log.warning(f"trainer.logger={name} is not supported; {family.LOGGERS[name]} records the same metrics")
    trainer["logger"] = list(dict.fromkeys(family.LOGGERS.get(name, name) for name in names))


def _absolute(config: Config) -> Config:
    """Paths that exist become absolute: Ray workers run in another directory."""
    data, trainer, search, reward = config.data, config.trainer, config.search, config.reward_model
    model = config.actor_rollout_ref.model
    resume = trainer.resume_mode
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data,
            train_files=tuple(map(locate, data.train_files)),
            val_files=tuple(map(locate, data.val_files)),
        ),
        actor_rollout_ref=dataclasses.replace(
            config.actor_rollout_ref,
            model=dataclasses.replace(model, path=settle_name(locate(model.path)) if model.path else ""),
        ),
        reward_model=dataclasses.replace(reward, custom=_locate_function(reward.custom)),
        search=dataclasses.replace(
            search,
            index_corpus=locate(search.index_corpus) if search.index_corpus else "",
            index_dir=str(Path(search.index_dir).expanduser().absolute()) if search.index_dir else "",
            cache_path=str(Path(search.cache_path).expanduser().absolute()) if search.cache_path else "",
        ),
        trainer=dataclasses.replace(
            trainer,
            resume_mode=resume if resume in ("auto", "disable") else locate(resume),
            default_local_dir=str(Path(trainer.default_local_dir).expanduser().absolute())
            if trainer.default_local_dir
            else "",
        ),
    )


def _locate_function(spec: str) -> str:
    """``path.py:function`` with the path made absolute; what has no colon is left for the loader to refuse."""
    path, colon, name = spec.rpartition(":")
    return f"{locate(path)}{colon}{name}" if path else spec


def _take_thresholds(data: dict[str, Any], overrides: list[str]) -> None:
    """Put what ``monitor.thresholds_file`` holds into the monitor's section, except keys that the overrides give."""
    monitor = data["monitor"]
    name = monitor.get("thresholds_file") if isinstance(monitor, dict) else None
    if not name:
        return
    path = Path(locate(str(name)))
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))["monitor"]
        thresholds = {key: float(value) for key, value in held.items()}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"monitor.thresholds_file={name} can't be read as thresholds; make it with scripts/calibrate_monitor.py"
        ) from None
    given = {text.partition("=")[0].strip().lstrip("+") for text in overrides}
    monitor |= {key: value for key, value in thresholds.items() if f"monitor.{key}" not in given}
    monitor["thresholds_file"] = str(path.absolute())


def _cut_mini_batch(config: Config) -> Config:
    """A mini-batch larger than the batch (verl's default is 256) means one optimizer step a batch."""
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    if actor.ppo_mini_batch_size <= batch:
        return config
    log.warning(
        f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} is more than "
        f"data.train_batch_size={batch}; taking {batch}"
    )
    actor = dataclasses.replace(actor, ppo_mini_batch_size=batch)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, actor=actor))
