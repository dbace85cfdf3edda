"""The typed configuration: frozen dataclasses, one per YAML section, under the family's key names.

``ppo_trainer.yaml`` holds the same keys and defaults with the long comments; a test keeps the two equal. What a field
may hold stands in its type: a ``Literal`` lists the names, ``Range`` gives the bounds. What only several fields
together can get wrong is in ``validation.py``.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both included unless ``open_low``."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        if self.low is not None and (value <= self.low if self.open_low else value < self.low):
            return False
        return (self.high is None or value <= self.high) and value == value  # NaN is in no range

    def __str__(self) -> str:
        low = [] if self.low is None else [f"{'more than' if self.open_low else 'at least'} {self.low:g}"]
        return " and ".join(low + ([] if self.high is None else [f"at most {self.high:g}"]))


Positive = Annotated[int, Range(1)]
NonNegative = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, open_low=True)]
Penalty = Annotated[float, Range(high=0)]
Engine = Literal[
    "local",
    "retriever",
    "searxng",
    "google",
    "serpapi",
    "bing",
    "duckduckgo",
    "baidu",
    "tavily",
    "brave",
    "proxy",
    "rag",
    "online_search",
]


@dataclass(frozen=True)
class DataConfig:
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_batch_size: Positive = 16  # questions a step; episodes = this x agent_grpo.n
    val_batch_size: Positive | None = None  # None: the whole validation set at once
    val_max_samples: Positive | None = None  # None: all of them
    max_prompt_length: Positive = 512  # tokens
    max_response_length: Positive = 8192  # tokens of all turns and observations together
    shuffle: bool = True


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    use_lora: bool = True
    lora_rank: Positive = 64
    lora_alpha: Positive = 128
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on GPU, float32 on CPU
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    enable_gradient_checkpointing: bool = False
    use_remove_padding: bool = True


@dataclass(frozen=True)
class OptimConfig:
    lr: PositiveFloat = 1e-6
    lr_warmup_steps: NonNegative = 0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-4


@dataclass(frozen=True)
class FsdpConfig:
    param_offload: bool = False
    optimizer_offload: bool = False


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: Literal["ppo", "gspo", "cispo"] = "ppo"


@dataclass(frozen=True)
class ActorConfig:
    ppo_mini_batch_size: Positive = 16  # questions an optimizer step, over all ranks
    ppo_micro_batch_size_per_gpu: Positive | None = None  # episodes; used where use_dynamic_bsz is false
    use_dynamic_bsz: bool = True
    ppo_max_token_len_per_gpu: Positive = 16384
    ppo_epochs: Positive = 1
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio: Fraction = 0.2
    clip_ratio_low: Fraction | None = None  # None: clip_ratio
    clip_ratio_high: NonNegativeFloat | None = None
    clip_ratio_c: Annotated[float, Range(1, open_low=True)] = 3.0  # dual clip
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    entropy_coeff: float = 0.0
    entropy_schedule: Literal["constant", "cosine", "linear"] = "constant"
    use_kl_loss: bool = True
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"  # low_var_kl is k3
    llds_coef: NonNegativeFloat = 0.0  # weight of the likelihood displacement in the loss
    llds_after_update: bool = False  # measure it by a forward pass after the last optimizer step
    grad_clip: PositiveFloat = 1.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass(frozen=True)
class ValKwargs:
    temperature: NonNegativeFloat = 0.0
    top_p: Share = 1.0
    top_k: NonNegative = 0
    n: Positive = 1


@dataclass(frozen=True)
class RolloutConfig:
    name: Literal["auto", "hf", "vllm"] = "auto"
    num_workers: Positive = 1
    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    top_k: NonNegative = 0
    max_model_len: Positive = 16384
    max_turn_tokens: Positive = 1024  # sampled tokens a turn, at most
    gpu_memory_utilization: Share = 0.4
    tensor_model_parallel_size: Positive = 1
    enforce_eager: bool = False
    max_batch_size: Positive = 256  # sequences an engine generates at once
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = False
    max_num_gen_batches: Positive = 10  # generations a step, the first one among them


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = None  # None: no correction
    rollout_is_threshold: Annotated[float, Range(1)] = 2.0  # largest weight


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: Literal["grpo", "drgrpo", "std_only", "rloo", "reinforce_plus_plus", "remax", "grpo_turn"] = "grpo"
    gamma: Fraction = 1.0  # between turns; 1 between the tokens of a turn
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass(frozen=True)
class AgentGrpoConfig:
    n: Positive = 4  # episodes a question (the group)


@dataclass(frozen=True)
class PbrsConfig:
    gamma: Fraction = 1.0
    terminal: Literal["zero", "carry"] = "zero"


@dataclass(frozen=True)
class ExtrasConfig:
    format: NonNegativeFloat = 0.0
    information_gain: NonNegativeFloat = 0.0
    redundancy: Penalty = 0.0
    no_search: Penalty = 0.0
    no_answer: Penalty = 0.0


@dataclass(frozen=True)
class RewardConfig:
    use_pbrs: bool = False
    pbrs: PbrsConfig = field(default_factory=PbrsConfig)
    format_score: float = -1.0  # the outcome of a broken format
    use_early_stop_penalty: bool = True
    early_stop_penalty: Penalty = -0.5
    min_turns: NonNegative = 1  # tool turns before an answer that cost nothing
    use_repetition_penalty: bool = False
    repetition_penalty: Penalty = -0.2
    repetition_threshold: Fraction = 0.7
    extras: ExtrasConfig = field(default_factory=ExtrasConfig)
    custom: str = ""  # "path.py:function", the outcome of an episode; "": F1 or format_score


@dataclass(frozen=True)
class SearchConfig:
    mode: Literal["inprocess", "http"] = "inprocess"
    server_url: str = "http://127.0.0.1:5004"
    index_corpus: str = ""  # .jsonl or .parquet of {title, url, text} for search_engine=local
    index_dir: str = ""  # "": data/.../index beside the corpus
    topk: Positive = 3  # results a query
    max_queries: Positive = 3  # queries a call
    timeout_s: PositiveFloat = 30.0  # a call, whole
    max_workers: Positive = 16  # threads
    rate_limit: PositiveFloat | None = None  # requests a second to each engine; None: the engine's own default
    region: str = ""  # two letters of a country, for engines that have regions
    language: str = ""  # two letters
    browse_any_url: bool = False  # browse_webpage: also what no search of the episode found
    page_view_port_size: Annotated[int, Range(100)] = 8192  # characters
    max_page_views: Positive = 8
    cache_path: str = ""  # a file that keeps results for every process and run; "": memory only
    cache_mode: Literal["reuse", "record", "replay"] = "reuse"
    cache_ttl_s: PositiveFloat = 604800.0  # 7 days
    cache_empty_ttl_s: NonNegativeFloat = 300.0
    cache_fuzzy_threshold: Fraction = 0.0  # Jaccard of the words; 0: off
    max_obs_length: Positive = 2048  # tokens an observation


@dataclass(frozen=True)
class SearchNoiseConfig:
    start: Fraction = 0.0  # probability as the run begins
    end: Fraction = 0.0  # and at its last step
    base: PositiveFloat = 4.0


@dataclass(frozen=True)
class CurriculumConfig:
    enable: bool = False
    stages: tuple[Positive, ...] = (1, 3, 6)  # max_turns of each stage
    min_turns: tuple[NonNegative, ...] = ()  # per stage, for the early-stop penalty; (): reward_model.min_turns
    thresholds: tuple[Fraction, ...] = (0.2, 0.35)  # moving-average F1 that promotes
    steps: tuple[Positive, ...] = ()  # step-based schedule instead: stage i+1 starts at steps[i]
    window: Positive = 50
    patience: Positive = 10  # steps under the roll-back line before going back
    hysteresis: NonNegativeFloat = 0.05  # roll back only under (threshold - hysteresis)
    search_noise: SearchNoiseConfig = field(default_factory=SearchNoiseConfig)


@dataclass(frozen=True)
class MonitorConfig:
    enable: bool = True
    min_diversity: Fraction | None = 0.15
    min_depth: NonNegativeFloat | None = None
    min_info_gain: Fraction | None = None
    min_reward_deviation: NonNegativeFloat | None = None
    max_zero_variance_share: Fraction | None = None
    max_malformed_share: Fraction | None = None
    max_void_turn_share: Fraction | None = None
    max_answer_avoidance_share: Fraction | None = None
    max_repeated_ngrams: Fraction | None = None
    max_llds: NonNegativeFloat | None = None
    max_rollout_gap: Fraction | None = None
    thresholds_file: str = ""  # written by scripts/calibrate_monitor.py
    on_alert: Literal["log", "halt", "rollback"] = "log"
    max_rollbacks: Positive = 3


@dataclass(frozen=True)
class StabilityConfig:
    clamp_logits: PositiveFloat | None = 1e4  # None switches a guard off
    clamp_advantages: PositiveFloat | None = 1e4
    nan_to_num: bool = True
    skip_nonfinite_grad: bool = True
    max_skipped_steps: Positive = 3


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str = "miniresearcher"
    experiment_name: str = "default"
    logger: tuple[Literal["console", "jsonl", "tensorboard", "swanlab"], ...] = ("console", "jsonl")
    n_gpus_per_node: Positive = 1  # actor ranks a node (CPU processes where there is no GPU)
    nnodes: Positive = 1
    total_epochs: Positive = 1
    total_training_steps: NonNegative | None = None  # None: total_epochs over the training set
    save_freq: NonNegative = 20  # steps; 0: only at the end
    test_freq: NonNegative = 10  # steps; 0: only at the end
    val_before_train: bool = True
    val_only: bool = False
    resume_mode: str = "auto"  # auto | disable | a path to a global_step_N folder
    default_local_dir: str = ""  # "": outputs/{project_name}/{experiment_name} in the repository
    max_ckpt_to_keep: Positive | None = 3
    async_rollout: Annotated[int, Range(0, 1)] = 0  # steps that generation runs ahead of the update
    deterministic: bool = False
    seed: NonNegative = 1


@dataclass(frozen=True)
class RayConfig:
    num_cpus: Positive | None = None  # None: what the machine has (of a local Ray that we start)


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    agent_grpo: AgentGrpoConfig = field(default_factory=AgentGrpoConfig)
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    max_turns: Positive = 4
    search_engine: tuple[Engine, ...] = ("local",)  # several: in order of preference
    tools: tuple[str, ...] = ("web_search",)  # of scrl.llm_agent.prompts.TOOLS
    search: SearchConfig = field(default_factory=SearchConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    profile: str = ""
