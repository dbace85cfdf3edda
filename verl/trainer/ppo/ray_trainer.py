"""The training loop. ``RayPPOTrainer.fit`` reads as one step does: generate, score, weigh, update, hand over, learn."""

import dataclasses
import gc
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from scrl.types import Episode, SearchNoise
from verl.protocol import DataProto
from verl.single_controller import connect
from verl.trainer.config.convert import config_to_yaml
from verl.trainer.config.paths import run_dir
from verl.trainer.config.schema import Config
from verl.trainer.ppo.batch import assemble, episode_rows, group_requests
from verl.trainer.ppo.core_algos import ADVANTAGE_ESTIMATORS, entropy_coefficient, silent_rows, zero_variance_groups
from verl.trainer.ppo.curriculum_scheduler import CurriculumScheduler, noise_probability
from verl.trainer.ppo.dynamic_sampling import Sample, fill, join_info
from verl.trainer.ppo.metrics import (
    batch_metrics,
    episode_metrics,
    noise_metrics,
    reward_metrics,
    rollout_gap_metrics,
    rollout_gaps,
    throughput_metrics,
    timing_metrics,
    validation_metrics,
)
from verl.trainer.ppo.placement import start_workers
from verl.trainer.ppo.run_control import Interrupt, StopNow, Stopwatch, in_background
from verl.utils.behavior_monitor import BehaviorMonitor
from verl.utils.checkpoint import (
    CheckpointManager,
    load_json,
    lock_folder,
    rng_state,
    save_json,
    save_rows,
    set_rng_state,
)
from verl.utils.dataset import Question, QuestionStream, RLHFDataset
from verl.utils.tokenizer import load_tokenizer
from verl.utils.tracking import Tracking
from verl.workers.reward_manager.naive import NaiveRewardManager

log = logging.getLogger(__name__)
GENERATE_TIMEOUT_S = 3600.0
NOISE_QUERIES = 16
EXPORT_TIMEOUT_S = 600.0
ACTOR_CHECK_S = 10.0


def run(config: Config) -> None:
    """Train (or, with ``trainer.val_only``, validate) as the configuration says, on a Ray that runs or on our own."""
    with connect(config.ray):
        RayPPOTrainer(config).fit()


class RayPPOTrainer:
    """One run: its data, its workers, and what it has learned so far.

    Raises ValueError, before anything is started, for data or settings that can't work.
    """

    def __init__(self, config: Config) -> None:
        if config.trainer.val_only:  # its one line is for people; the run's records are those of its training
            config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, logger=("console",)))
        # A step's episodes are millions of objects without a cycle: Python's looks for some cost a fifth of its time.
        gc.set_threshold(50_000, 20, 50)
        self.config = config
        self.dir = run_dir(config)
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        self.train_set = None if config.trainer.val_only else self._dataset(config.data.train_files)
        files, limit = config.data.val_files, config.data.val_max_samples
        self.val_set = self._dataset(files, limit) if files or config.trainer.val_only else None
        self.rewards = NaiveRewardManager(config.reward_model)
        self.curriculum = CurriculumScheduler(config.curriculum, config.max_turns, config.reward_model.min_turns)
        self.monitor = BehaviorMonitor(config.monitor, self.dir / "behavior_alerts.jsonl")
        self.lock = None if config.trainer.val_only else lock_folder(self.dir)  # held until the process ends
        self.dir.mkdir(parents=True, exist_ok=True)
        self.checkpoints = CheckpointManager(
            self.dir / "checkpoints", config.trainer.max_ckpt_to_keep, clean=not config.trainer.val_only
        )
        self.step = self._saved = 0
        self.interrupt, self._updating = Interrupt(), False
        self._healthy, self._rollbacks = True, 0
        self._ahead: futures.Future | None = None  # with trainer.async_rollout: the next step's episodes
        if self.train_set:
            self.stream = QuestionStream(
                self.train_set,
                config.data.train_batch_size,
                shuffle=config.data.shuffle,
                seed=config.trainer.seed,
            )
            self._stream_state = self.stream.state_dict()

    def _dataset(self, files: Sequence[str], limit: int | None = None) -> RLHFDataset:
        data = self.config.data
        return RLHFDataset(
            files,
            self.tokenizer,
            max_prompt_length=data.max_prompt_length,
            max_samples=limit,
            tools=self.config.tools,
        )

    # ------------------------------------------------------------------------------------------------------- the loop
    def fit(self) -> None:
        """Train from where the last checkpoint stands to the last step; validate and save on the way."""
        trainer = self.config.trainer
        found = self.checkpoints.find(trainer.resume_mode)
        print("starting actor and rollout workers", flush=True)
        self.actor, self.rollouts, self.parameters = start_workers(self.config)
        self.resume(found)
        name = "val_config.yaml" if trainer.val_only else "config.yaml"
        (self.dir / name).write_text(config_to_yaml(self.config), encoding="utf-8")
        total = self.step if trainer.val_only else self.total_steps
        with Tracking(self.config, self.dir, total_steps=total, resume_step=self.step) as self.tracking:
            with self.interrupt():
                self._announce(found)
                try:
                    if self._goes_back and not self._healthy_checkpoint():
                        self._saved = -1  # the start is a place to go back to, as long as there is no better one
                        self.save()
                    self._loop(total)
                except StopNow:
                    raise
                except KeyboardInterrupt:
                    if trainer.val_only or not self.step:
                        raise KeyboardInterrupt("stopped before the first step was done") from None
                    self.save()
                    raise KeyboardInterrupt(
                        f"step {self.step} is saved; trainer.resume_mode=auto goes on there"
                    ) from None
                except Exception:
                    self._rescue()
                    raise

    def _rescue(self) -> None:
        """After a failure outside of the update: whole steps that no checkpoint holds yet are saved if they can be."""
        if self.config.trainer.val_only or self._updating or self._saved == self.step or self.actor.broken:
            return
        try:
            self.save()
            self.tracking.say(f"step {self.step} is saved", warn=True)
        except Exception as error:  # the failure that brought us here is the one to show
            log.warning(f"step {self.step} could not be saved: {error}")

    def _announce(self, found: Path | None) -> None:
        """What is about to run, in a few lines."""
        config, data = self.config, self.config.data
        say = self.tracking.say
        trained, total = self.parameters["trainable_parameters"], self.parameters["parameters"]
        say(f"policy {config.actor_rollout_ref.model.path}: {total:,} parameters, {trained:,} of them trained")
        if self.train_set:
            episodes = f"{data.train_batch_size} x {config.agent_grpo.n} episodes a step"
            say(f"{len(self.train_set)} training questions, {episodes}")
        search = f"search_engine={','.join(config.search_engine)}"
        if config.search.mode == "http":
            search = f"search by the server at {config.search.server_url}, as that is set up"
        say(f"{len(self.val_set or ())} validation questions; {search}")
        say(f"writing to {self.dir}" + (f", going on from {found.name}" if found else ""))

    def _loop(self, total: int) -> None:
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            self.tracking.log(self.step, self.validate())
        elif self.step >= total:
            self.tracking.say(
                f"all {total} steps are done; trainer.total_training_steps={total + 20} goes on from here"
            )
        while self.step < total:
            metrics = self.train_step(self.step + 1)
            try:
                if self._due(trainer.test_freq, total):
                    metrics |= self.validate()
            finally:  # what a step was is written down even if its validation is cut short
                self.tracking.log(self.step, metrics)
            complaint = self.monitor.complaint
            self._healthy = self._healthy and not complaint
            if complaint and self._goes_back:
                if not self._roll_back():
                    return
            elif complaint and self.config.monitor.on_alert == "halt":
                self.save()
                self.tracking.say(f"halted, as monitor.on_alert=halt asks: {complaint}", warn=True)
                return
            elif self._due(trainer.save_freq, total):
                self.save()
            self.interrupt.heed()

    @property
    def _goes_back(self) -> bool:
        monitor = self.config.monitor
        return monitor.enable and monitor.on_alert == "rollback" and not self.config.trainer.val_only

    def _healthy_checkpoint(self) -> Path | None:
        """The newest one before which no step had raised an alert since the checkpoint before it."""
        folders = self.checkpoints.newest_first(self.step)
        return next((f for f in folders if load_json(f / "trainer.json").get("healthy", True)), None)

    def _roll_back(self) -> bool:
        """Take weights, optimizer and curriculum back from the last healthy checkpoint; False where the run ends here.

        The steps' count and the order of the questions go on, so that the run meets other questions than those that
        led into the alert, and comes to its end however often this happens. The result is saved at once: a run that is
        killed afterwards doesn't resume before the alert.
        """
        folder, limit = self._healthy_checkpoint(), self.config.monitor.max_rollbacks
        if folder is None or self._rollbacks >= limit:
            why = f"after {limit} rollbacks (monitor.max_rollbacks)" if folder else "without a healthy checkpoint"
            best = f"; the last healthy checkpoint is {folder}" if folder else ""
            self.tracking.say(f"halted {why}: {self.monitor.complaint}{best}", warn=True)
            return False
        self._updating = True
        self._drop_ahead()  # what the rejected weights have generated goes with them
        self.actor.load_checkpoint(str(folder))
        self.curriculum.load_state_dict(load_json(folder / "trainer.json")["curriculum"])
        self.sync(self.step)
        self._updating = False
        self._healthy, self._rollbacks = True, self._rollbacks + 1
        self.save()
        self.tracking.say(
            f"rolled back to {folder.name} ({self._rollbacks} of at most {limit}), on with other questions", warn=True
        )
        return True

    def _drop_ahead(self) -> None:
        """Without the batch generated ahead; its questions come again, as they do in a run that resumes."""
        if self._ahead is not None:
            self._ahead = None
            self.stream.load_state_dict(self._stream_state)

    def _due(self, every: int, total: int) -> bool:
        return self.step == total or bool(every and self.step % every == 0)

    def train_step(self, step: int) -> dict[str, float]:
        """One step, from questions to new weights in every engine. Returns its metrics."""
        watch = Stopwatch(self.tracking.status)
        with watch("step"):
            if self._ahead is None:
                made = self._make(step, watch)
            else:
                made, self._ahead = self._ahead.result(), None
            (sample, left_out, filtered), worked, gen_s = made
            drawn = self.stream.state_dict()  # a run that resumes after this step draws the next batch again
            if self.config.trainer.async_rollout and step < self.total_steps:
                self._ahead = in_background(lambda: self._make(step + 1, Stopwatch(lambda phase: None)))
            batch = sample.batch
            batch.meta_info |= self._meta(step)
            if not self.on_policy:
                with watch("old_log_prob"):
                    batch = batch.union(self.actor.compute_log_prob(self._inputs(batch)))
            if self.config.actor_rollout_ref.actor.use_kl_loss:
                with watch("ref_log_prob"):
                    batch = batch.union(self.actor.compute_ref_log_prob(self._inputs(batch)))
            if self.config.algorithm.adv_estimator == "remax":
                with watch("gen_max"):
                    batch.batch["baselines"] = self._greedy_returns(sample, step)
            with watch("adv"):
                self.advantage(batch)
            self.interrupt.heed()  # nothing of this step has reached the weights yet
            self._updating = True  # from here to the next whole step the weights belong to none
            with watch("update_actor"):
                updated = self.update(batch)
            if self._ahead is not None:  # its episodes end with the weights that they began with
                with watch("gen"):
                    futures.wait([self._ahead])
            with watch("update_weights"):
                self.sync(step)
            self.step, self._stream_state, self._updating = step, drawn, False
            with watch("monitor"):
                metrics = self.learn(sample, left_out, updated) | updated | filtered
        metrics |= timing_metrics(watch.seconds)
        metrics |= worked
        beside = left_out.batch.batch["response_mask"].sum().item() if left_out else 0.0
        metrics |= throughput_metrics(batch.batch, watch.seconds | {"gen": gen_s}, self.actor.world_size, beside)
        self.write_rollouts(f"rollout_step_{step}.json", sample, left_out)
        return metrics

    # ------------------------------------------------------------------------------------------------ a step's phases
    def _make(
        self, step: int, watch: Stopwatch
    ) -> tuple[tuple[Sample, Sample | None, dict[str, float]], dict[str, float], float]:
        """(what ``sample`` gives, what the rollout workers did for it, seconds of generating)"""
        self.rollouts.take_counts()  # what validation did since is not this step's
        sampled, gen_s = self.sample(step, watch), watch.seconds["gen"]
        return sampled, self.rollouts.step_metrics(gen_s), gen_s

    def sample(self, step: int, watch: Stopwatch) -> tuple[Sample, Sample | None, dict[str, float]]:
        """Episodes to train on; with ``algorithm.filter_groups`` also those left out, and how it went."""

        def play(count: int, first: int) -> Sample:
            questions = self.stream.next_batch(count)
            with watch("gen"):
                episodes = self.generate(questions, step, first)
            with watch("assemble"):
                batch = assemble(episodes, self.tokenizer.pad_token_id)
            with watch("reward"):
                info = self.reward(batch, episodes)
            return Sample(questions, episodes, batch, info)

        wanted, limits = self.config.data.train_batch_size, self.config.algorithm.filter_groups
        if not limits.enable:
            return play(wanted, 0), None, {}
        pad_id = self.tokenizer.pad_token_id
        return fill(play, self._silent, wanted=wanted, max_rounds=limits.max_num_gen_batches, pad_id=pad_id)

    def generate(self, questions: Sequence[Question], step: int, first: int = 0) -> list[Episode]:
        """``agent_grpo.n`` episodes a question, group after group; ``first``: questions of this step before them."""
        rollout, trainer = self.config.actor_rollout_ref.rollout, self.config.trainer
        requests = group_requests(
            questions,
            n=self.config.agent_grpo.n,
            step=step,
            max_turns=self.curriculum.max_turns,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=trainer.seed if trainer.deterministic else None,
            noise=self._search_noise(step),
            first=first,
        )
        episodes = self._play(requests)
        behind = 1 if self.config.trainer.async_rollout else 0
        versions = {turn.version for episode in episodes for turn in episode.turns}
        assert len(versions) <= 1 and versions <= set(range(step - 1 - behind, step)), (
            f"step {step} was generated with the weights of steps {versions}"
        )
        if all(episode.finish == "error" for episode in episodes):
            raise RuntimeError(f"every episode of step {step} failed; the first one: {episodes[0].error}")
        return episodes

    def _search_noise(self, step: int) -> SearchNoise | None:
        """Noisy queries search for some of the training questions instead: of the same world, and off the point."""
        probability = self._noise_probability(step)
        if not probability:
            return None
        seed, size = self.config.trainer.seed, len(self.train_set)
        chosen = random.Random(f"{seed}/noise/{step}").sample(range(size), min(NOISE_QUERIES, size))
        return SearchNoise(probability, tuple(self.train_set[place].question for place in chosen), seed)

    def _noise_probability(self, step: int) -> float:
        return noise_probability(self.config.curriculum.search_noise, step, self.total_steps)

    def _play(self, requests: Sequence[Any]) -> list[Episode]:
        checked, alone = time.monotonic(), threading.current_thread() is threading.main_thread()

        def tick(done: int) -> None:
            nonlocal checked
            self.interrupt.heed()
            if not alone:  # beside an update, which has its own status and calls the actor
                return
            self.tracking.status(f"{done} of {len(requests)} episodes")
            if time.monotonic() - checked > ACTOR_CHECK_S:  # a dead actor shows by itself only when it is called
                self.actor.check()
                checked = time.monotonic()

        return self.rollouts.generate(requests, timeout_s=GENERATE_TIMEOUT_S, tick=tick)

    def reward(self, batch: DataProto, episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        """Put ``token_level_scores`` into the batch; returns every component by episode."""
        scores, info = self.rewards(
            episodes,
            batch.batch["responses"].shape[1],
            min_turns=self.curriculum.min_turns,
            discount=self.config.algorithm.gamma,
        )
        batch.batch["token_level_scores"] = scores
        if self.rewards.custom and not info["valid"].any():
            raise ValueError(
                f"{self.config.reward_model.custom} failed on every episode, so there is nothing to learn from; the "
                f"first time: {self.rewards.custom.first_failure}"
            )
        batch.batch["response_mask"] *= torch.from_numpy(info["valid"])[:, None]  # what has no reward teaches nothing
        return info

    def advantage(self, batch: DataProto) -> None:
        """Put ``advantages`` and ``returns`` into the batch."""
        inputs, options = self._rewarded(batch)
        estimator = ADVANTAGE_ESTIMATORS[self.config.algorithm.adv_estimator]
        options["baselines"] = batch.batch.get("baselines", None)
        batch.batch["advantages"], batch.batch["returns"] = estimator(*inputs, **options)

    def _silent(self, sample: Sample) -> list[bool]:
        """Of each group, whether its episodes teach the estimator nothing."""
        inputs, options = self._rewarded(sample.batch)
        return silent_rows(*inputs, **options).tolist()[:: self.config.agent_grpo.n]

    def _rewarded(self, batch: DataProto) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What estimators and the zero-variance rule look at, and how."""
        algorithm, tensors = self.config.algorithm, batch.batch
        options = {"turn_index": tensors["turn_index"], "gamma": algorithm.gamma}
        options["by_turn"] = algorithm.adv_estimator == "grpo_turn"
        return (tensors["token_level_scores"], tensors["response_mask"], batch.non_tensor_batch["uid"]), options

    def update(self, batch: DataProto) -> dict[str, float]:
        """Optimizer steps on the batch, ``ppo_mini_batch_size`` questions each; puts ``old_log_probs`` into it.

        Rows are dealt out to the ranks one by one, so that each holds its share of every mini-batch; which episodes
        share a step doesn't depend on the number of ranks.
        """
        inputs = self._inputs(batch, *self._training_keys(batch))
        episodes = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.agent_grpo.n
        inputs.batch["mini_batch"] = torch.arange(len(batch)) // episodes
        order = (torch.arange(len(batch)) % self.actor.world_size).argsort(stable=True)
        updated = self.actor.update_actor(inputs.reorder(order))
        batch.batch["old_log_probs"] = updated.batch["old_log_probs"][order.argsort()]
        return updated.meta_info["metrics"]

    def _greedy_returns(self, sample: Sample, step: int) -> torch.Tensor:
        """ReMax's baseline (Li et al. 2023): (B,) the return of the greedy episode of each row's question."""
        batch = sample.batch
        requests = group_requests(
            sample.questions,
            n=1,
            step=step,
            max_turns=self.curriculum.max_turns,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=None,
            noise=self._search_noise(step),
        )
        episodes = self._play(requests)
        longest = max(len(episode.response_ids) for episode in episodes)
        _, info = self.rewards(
            episodes, longest, min_turns=self.curriculum.min_turns, discount=self.config.algorithm.gamma
        )
        by_uid = {episode.uid: value for episode, value in zip(episodes, info["return"], strict=True)}
        for episode, valid in zip(episodes, info["valid"], strict=True):
            if not valid:  # it failed, which says nothing of the question: its group's own mean is the baseline
                log.warning("the greedy episode of %s failed (%s)", episode.uid, episode.error)
                group = sample.info["valid"] & (batch.non_tensor_batch["uid"] == episode.uid)
                by_uid[episode.uid] = float(sample.info["return"][group].mean()) if group.any() else 0.0
        return torch.tensor([by_uid[uid] for uid in batch.non_tensor_batch["uid"]], dtype=torch.float32)

    def sync(self, version: int) -> None:
        """Give the actor's weights to every engine, as those of step ``version``."""

        def export() -> Any:
            exported = self.actor.call("export_weights", blocking=False)[0]
            ray.wait([exported], timeout=EXPORT_TIMEOUT_S, fetch_local=False)
            self.actor.check()  # had it died, the engines' workers would seem to be what failed
            return exported

        self.rollouts.update_weights(export, version)

    def learn(self, sample: Sample, left_out: Sample | None, updated: dict[str, float]) -> dict[str, float]:
        """Metrics of the step, the monitor's look at it, and the curriculum's next stage.

        What the policy does is judged by all it played: without the groups that all fail or all succeed it would look
        better or worse than it is.
        """
        tensors, episodes, info = sample.batch.batch, sample.episodes, sample.info
        if left_out:
            episodes, info = episodes + left_out.episodes, join_info([info, left_out.info])
        metrics = batch_metrics(tensors) | reward_metrics(info) | self.curriculum.metrics()
        metrics |= episode_metrics(episodes)
        played = [episode.version for episode in episodes if episode.version >= 0]
        metrics["rollout/staleness"] = self.step - 1 - float(np.mean(played))
        log_probs = tensors["rollout_log_probs"], tensors["old_log_probs"], tensors["response_mask"]
        metrics |= rollout_gap_metrics(*log_probs, self.config.algorithm.rollout_correction.rollout_is_threshold)
        metrics |= noise_metrics(episodes, self._noise_probability(self.step))
        if "custom_failed" in info:
            metrics["reward/custom_failed"] = float(info["custom_failed"].sum())
        gaps = rollout_gaps(*log_probs).tolist() + [math.nan] * (len(episodes) - len(sample.episodes))  # not measured
        metrics |= self.monitor.observe(self.step, episodes, info["return"].tolist(), metrics | updated, gaps)
        self.tracking.alert(self.step, {alert.metric: alert.message for alert in self.monitor.alerts})
        if self._goes_back:
            metrics["alerts/rollbacks"] = float(self._rollbacks)
        inputs, options = self._rewarded(sample.batch)
        silent, _ = zero_variance_groups(*inputs, **options)
        metrics["adv/zero_variance_groups"] = float(silent)
        valid = info["valid"]
        self.curriculum.update(float(info["f1"][valid].mean()) if valid.any() else math.nan, self.step)
        return metrics

    def validate(self) -> dict[str, float]:
        """Play every validation question once (``val_kwargs.n`` times) and write the episodes down."""
        if self.val_set is None:
            return {}
        kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        trainer = self.config.trainer
        watch = Stopwatch(self.tracking.status)
        episodes: list[Episode] = []
        size = self.config.data.val_batch_size or len(self.val_set)
        with watch("testing"):
            for start in range(0, len(self.val_set), size):
                questions = [self.val_set[i] for i in range(start, min(start + size, len(self.val_set)))]
                requests = group_requests(
                    questions,
                    n=kwargs.n,
                    step=self.step,
                    max_turns=self.config.max_turns,
                    temperature=kwargs.temperature,
                    top_p=kwargs.top_p,
                    top_k=kwargs.top_k,
                    seed=trainer.seed if kwargs.temperature else None,
                )
                episodes += self._play(requests)
        _, info = self.rewards(episodes, max(len(episode.response_ids) for episode in episodes))
        name = "rollout" if trainer.val_only else "val"
        rows = episode_rows(episodes, self.tokenizer, info)
        self._write_rows(f"{name}_step_{0 if trainer.val_only else self.step}.json", rows)
        self.tracking.log_samples(self.step, rows, "val")
        return validation_metrics(episodes, info) | {"timing_s/testing": watch.seconds["testing"]}

    def write_rollouts(self, name: str, sample: Sample, left_out: Sample | None) -> None:
        """Every episode played, one row each; ``filtered`` marks those that were not trained on."""
        rows = episode_rows(sample.episodes, self.tokenizer, sample.info, sample.batch.batch)
        if left_out:
            more = episode_rows(left_out.episodes, self.tokenizer, left_out.info)
            rows += [row | {"filtered": True} for row in more]
        self._write_rows(name, rows)
        self.tracking.log_samples(self.step, rows, "train")

    def _write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        folder = self.dir / "rollout"
        folder.mkdir(parents=True, exist_ok=True)
        save_rows(folder / name, rows)

    def _meta(self, step: int) -> dict[str, Any]:
        actor = self.config.actor_rollout_ref.actor
        coefficient = entropy_coefficient(actor.entropy_coeff, actor.entropy_schedule, step, self.total_steps)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return {"global_step": step, "temperature": temperature, "entropy_coeff": coefficient}

    @staticmethod
    def _inputs(batch: DataProto, *more: str) -> DataProto:
        """Only what a worker reads travels to it."""
        return batch.select(["input_ids", "attention_mask", "response_mask", *more], [])

    def _training_keys(self, batch: DataProto) -> list[str]:
        keys = ["old_log_probs", "entropys", "ref_log_prob", "advantages"]
        if self.config.algorithm.rollout_correction.rollout_is:
            keys.append("rollout_log_probs")
        return [key for key in keys if key in batch.batch.keys()]

    # ------------------------------------------------------------------------------------------ start, save and resume
    @property
    def on_policy(self) -> bool:
        """One optimizer step a batch: its own forward gives the old log-probs, and a pass is saved."""
        actor, data = self.config.actor_rollout_ref.actor, self.config.data
        return actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= data.train_batch_size

    @property
    def total_steps(self) -> int:
        trainer = self.config.trainer
        if trainer.total_training_steps is not None:
            return trainer.total_training_steps
        return self.stream.steps(trainer.total_epochs)

    def resume(self, folder: Path | None) -> None:
        """Take everything back from a checkpoint, and give the engines its weights (or the untrained ones)."""
        if folder:
            state = load_json(folder / "trainer.json")
            self.actor.load_checkpoint(str(folder))
            self.step = self._saved = state["step"]
        if folder and not self.config.trainer.val_only:
            self.stream.load_state_dict(state["stream"])
            self._stream_state = state["stream"]
            self.curriculum.load_state_dict(state["curriculum"])
            set_rng_state(state["rng"])
            self._healthy, self._rollbacks = state.get("healthy", True), state.get("rollbacks", 0)
        if not self.config.trainer.val_only:
            self.monitor.resume(self.step)
        self.sync(self.step)

    def save(self) -> None:
        """Write a checkpoint of the last whole step, unless it was the last thing done. After the step's metrics: a
        run killed in between does the step again, one killed the other way round would lack its line."""
        if self._saved == self.step:
            return

        def write(folder: Path) -> None:
            self.actor.save_checkpoint(str(folder))
            save_json(
                folder / "trainer.json",
                {
                    "step": self.step,
                    "stream": self._stream_state,
                    "curriculum": self.curriculum.state_dict(),
                    "rng": rng_state(),
                    "healthy": self._healthy,
                    "rollbacks": self._rollbacks,
                },
            )

        self.checkpoints.save(self.step, write)
        self._saved, self._healthy = self.step, True
