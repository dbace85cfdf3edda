"""The vLLM engine, the real one, against transformers and PEFT on a tiny random Qwen2 with shared key-value heads."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.trainer.config.schema import ActorRolloutRefConfig, Config, RolloutConfig
from verl.workers import rollout
from verl.workers.rollout import build_engine, vllm_problem
from verl.workers.rollout.base import Completion, SamplingParams

needs_vllm = pytest.mark.skipif(
    vllm_problem() is not None or torch.cuda.is_available(), reason="needs the CPU build of vLLM"
)
pytestmark = pytest.mark.timeout(900)
VOCAB, RANK, ROOM = 61, 4, 300
PROMPTS = [[1, 2, 3, 4, 5] * 30, [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [1, 2, 3, 4, 5] * 30, [30, 31]]


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide, so that the distributions are far from uniform
        eos_token_id=5,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_adapter(seed: int):
    """A PEFT model whose adapter changes every distribution, and what the actor would export of it."""
    model = get_peft_model(
        make_model(), LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    ).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    weights = {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}
    return model, {"weights": weights, "peft_config": config | {"bias": "none", "use_rslora": False}}


def reference(model, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


class Served:
    """An engine on an event loop of its own, to ask from a test."""

    def __init__(self, folder: Path, lora_rank: int | None) -> None:
        from verl.workers.rollout.vllm_rollout import VLLMEngine

        make_model().save_pretrained(folder)
        self._runner = asyncio.Runner()

        async def build() -> VLLMEngine:
            return VLLMEngine(str(folder), dtype="float32", device="cpu", max_model_len=ROOM, lora_rank=lora_rank)

        before = {process.pid for process in psutil.Process().children(recursive=True)}
        self.engine = self._runner.run(build())
        names = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
        self.processes = {pid for pid, name in names.items() if pid not in before and "EngineCore" in name}

    def ask(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        async def together() -> list[Completion]:
            asked = (self.engine.generate(p, s) for p, s in zip(prompts, params, strict=True))
            return await asyncio.gather(*asked)

        return self._runner.run(together())

    def do(self, what: Callable):
        return self._runner.run(what())

    def update(self, weights: dict, version: int) -> None:
        self._runner.run(self.engine.update_weights(weights, version))

    def close(self) -> None:
        async def close() -> None:
            self.engine.close()

        self._runner.run(close())
        self._runner.close()


@contextlib.contextmanager
def served(tmp_path_factory, lora_rank: int | None) -> Iterator[Served]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = Served(tmp_path_factory.mktemp("policy"), lora_rank)
    yield one
    one.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    with served(tmp_path_factory, RANK) as one:
        yield one


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    with served(tmp_path_factory, None) as one:
        yield one


def sampling(n: int = 12, **changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, **({"temperature": 1.0, "seed": 1} | changes))


def gap(model, prompts: list[list[int]], completions: list[Completion], temperature: float = 1.0) -> float:
    """Largest difference between the engine's and transformers' log-probs."""
    return max(
        float((torch.tensor(c.logprobs) - reference(model, p, c.token_ids, temperature)).abs().max())
        for p, c in zip(prompts, completions, strict=True)
    )


@needs_vllm
def test_greedy_is_what_transformers_generates(full):
    full.update({"weights": dict(make_model().named_parameters()), "peft_config": None}, 1)
    completions = full.ask(PROMPTS, [sampling(temperature=0.0)] * len(PROMPTS))
    model = make_model()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        assert completion.token_ids == out[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"
    assert gap(model, PROMPTS, completions) < 1e-4


@needs_vllm
def test_logprobs_are_at_each_requests_temperature(full):
    full.update({"weights": dict(make_model().named_parameters()), "peft_config": None}, 1)
    for temperature in (0.5, 2.0):
        completions = full.ask(PROMPTS, [sampling(temperature=temperature, seed=i) for i in range(len(PROMPTS))])
        assert gap(make_model(), PROMPTS, completions, temperature) < 1e-4


@needs_vllm
def test_a_stop_token_ends_it_is_part_of_it_and_nothing_else_stops(full):
    """5 is the model's own end token; only what is asked for counts."""
    full.update({"weights": dict(make_model().named_parameters()), "peft_config": None}, 1)
    free = full.ask(PROMPTS[1:2] * 20, [sampling(60, seed=i) for i in range(20)])
    assert any(5 in completion.token_ids[:-1] for completion in free), "the seeds should draw the end token"
    assert {len(completion.token_ids) for completion in free} == {60}
    seed = next(i for i, completion in enumerate(free) if 5 in completion.token_ids)
    (stopped,) = full.ask(PROMPTS[1:2], [sampling(60, seed=seed, stop_token_ids=(5,))])
    end = free[seed].token_ids.index(5) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (free[seed].token_ids[:end], "stop")


@needs_vllm
def test_a_seed_gives_the_same_tokens_in_any_batch_and_none_gives_others(lora):
    params = [sampling(30, seed=100 + i) for i in range(len(PROMPTS))]
    alone = [lora.ask([prompt], [p])[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    together = lora.ask(PROMPTS, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert alone[0].token_ids != alone[3].token_ids  # the same prompt, another seed
    a, b = lora.ask([PROMPTS[0]] * 2, [sampling(40, seed=None)] * 2)
    assert a.token_ids != b.token_ids


@needs_vllm
def test_seeds_hold_where_more_prompts_come_than_one_pass_computes(full):
    """vLLM would compute a prompt in parts, and die of its seed on a CPU."""
    full.update({"weights": dict(make_model().named_parameters()), "peft_config": None}, 1)
    prompts = [[(i * 7 + j * (i + 1)) % VOCAB for j in range(200)] for i in range(45)]  # 9,000 tokens
    params = [sampling(4, seed=i) for i in range(len(prompts))]
    together = full.ask(prompts, params)
    assert gap(make_model(), prompts, together) < 1e-4
    (alone,) = full.ask(prompts[-1:], params[-1:])
    assert alone.token_ids == together[-1].token_ids


@needs_vllm
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_right_after_an_update_it_generates_from_the_new_weights_and_none_but_those(kind, request):
    """Same prompts before and after, long enough to lie in the prefix cache: old keys and values would show."""
    one = request.getfixturevalue(kind)
    params = [sampling(20, seed=i) for i in range(len(PROMPTS))]
    before = []
    for version in (11, 12, 13):
        if kind == "lora":
            model, weights = make_adapter(version)
        else:
            model = make_model(version)
            weights = {"weights": dict(model.named_parameters()), "peft_config": None}
        one.update(weights, version)
        assert one.engine.version == version
        completions = one.ask(PROMPTS, params)
        assert {completion.version for completion in completions} == {version}
        assert gap(model, PROMPTS, completions) < 1e-4
        ids = [completion.token_ids for completion in completions]
        assert ids not in before, "the weights should matter"
        before.append(ids)
    assert gap(make_model(), PROMPTS, completions) > 0.1, "else this test could not tell weights apart"


@needs_vllm
def test_an_update_under_way_mixes_no_completion(lora):
    """What was being generated ends with the old weights, the rest begins with the new, and each says which."""
    models = {}
    for version in (21, 22):
        models[version], weights = make_adapter(version)
        if version == 21:
            lora.update(weights, version)

    async def mixed() -> list[Completion]:
        asked = [asyncio.ensure_future(lora.engine.generate(p, sampling(150, seed=i))) for i, p in enumerate(PROMPTS)]
        began = lora.engine.metrics()["rollout/busy_s"]
        while lora.engine.metrics()["rollout/busy_s"] < began + 0.2:  # so that some of them are under way
            await asyncio.sleep(0.01)
        update = asyncio.ensure_future(lora.engine.update_weights(weights, 22))
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(lora.engine.generate(p, sampling(20, seed=3))) for p in PROMPTS]
        await update
        return await asyncio.gather(*asked, *late, lora.engine.generate(PROMPTS[0], sampling(20)))

    completions = lora.do(mixed)
    for prompt, completion in zip(PROMPTS * 2 + PROMPTS[:1], completions, strict=True):
        assert gap(models[completion.version], [prompt], [completion]) < 1e-4
    assert completions[-1].version == 22


@needs_vllm
def test_a_later_turn_finds_its_prefix_cached_and_max_model_len_is_kept(lora):
    lora.update(make_adapter(31)[1], 31)
    prompt = [i % VOCAB for i in range(200)]
    before = lora.engine.metrics()
    (first,) = lora.ask([prompt], [sampling(8)])
    (second,) = lora.ask([prompt + first.token_ids + [3] * 10], [sampling(8)])
    after = lora.engine.metrics()
    assert after["rollout/prompt"] - before["rollout/prompt"] == 200 + 218
    assert after["rollout/computed"] - before["rollout/computed"] < 200 + 218 - 128
    assert after["rollout/completions"] - before["rollout/completions"] == 2
    assert after["rollout/sampled"] - before["rollout/sampled"] == 16
    with pytest.raises(Exception, match="(?i)max.*(model|context).*len"):
        lora.ask([[1] * (ROOM + 1)], [sampling(8)])
    (whole,) = lora.ask([[1] * (ROOM - 8)], [sampling(8)])
    assert len(whole.token_ids) == 8
    assert not lora.engine.failed


@needs_vllm
def test_weights_of_another_model_are_refused_and_leave_no_file(lora):
    _, weights = make_adapter(1)
    shm = Path("/dev/shm")
    shorter = {name: tensor[..., :-1] for name, tensor in weights["weights"].items()}
    with pytest.raises(ValueError, match="lora_A.weight is .*: the adapter was trained on another model"):
        lora.update(weights | {"weights": shorter}, 99)
    (whole,) = lora.ask([[1, 2, 3]], [sampling(2)])  # it was refused before anything was paused
    assert len(whole.token_ids) == 2
    renamed = {name.replace("q_proj", "qkv"): tensor for name, tensor in weights["weights"].items()}
    with pytest.raises(Exception, match="expected target modules"):
        lora.update(weights | {"weights": renamed}, 99)
    assert lora.engine.version != 99
    assert not list(shm.glob("miniresearcher-*"))


@needs_vllm
def test_an_engine_that_is_killed_fails_what_is_under_way_and_an_update(tmp_path_factory):
    with served(tmp_path_factory, None) as one:
        (engine,) = [p for p in psutil.Process().children(recursive=True) if p.pid in one.processes]
        engine.suspend()  # it has taken what it is asked for, and will never answer

        async def kill() -> None:
            weights = {"weights": dict(make_model().named_parameters()), "peft_config": None}
            asked = asyncio.ensure_future(one.engine.generate(PROMPTS[0], sampling(100)))
            update = asyncio.ensure_future(one.engine.update_weights(weights, 5))
            await asyncio.sleep(0.5)
            assert not asked.done() and not update.done() and not one.engine.failed
            engine.kill()
            for lost in (asked, update):
                with pytest.raises(Exception, match="(?i)died|EngineCore|gave up"):
                    await asyncio.wait_for(lost, 30)

        one.do(kill)
        assert one.engine.failed and one.engine.version == 0


ORPHAN = """
import asyncio, sys
from verl.workers.rollout.vllm_rollout import VLLMEngine

async def main():
    engine = VLLMEngine(sys.argv[1], dtype="float32", device="cpu", max_model_len=300, lora_rank=None)
    print("READY", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@needs_vllm
def test_a_killed_worker_takes_its_engine_with_it(tmp_path):
    make_model().save_pretrained(tmp_path / "policy")
    script = tmp_path / "main.py"
    script.write_text(ORPHAN, encoding="utf-8")
    root = Path(__file__).resolve().parents[5]
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "policy"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert any(line == "READY\n" for line in process.stdout), "the engine did not start"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "else this test would see nothing"
        os.kill(process.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(children, timeout=20)
        assert not left
    finally:
        process.kill()
        process.wait(30)


def test_other_versions_are_refused_with_the_range_that_works(monkeypatch):
    config = Config(actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(name="vllm")))
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(rollout.metadata, "version", lambda name: "0.33.1")
    with pytest.raises(ValueError, match=r"vllm 0\.33\.1 is installed.*0\.32\.x is what works.*rollout\.name=hf"):
        build_engine(config, "cpu")
    monkeypatch.setattr(rollout.metadata, "version", lambda name: "0.32.4")
    assert vllm_problem() is None
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vllm isn't installed; pip install vllm==0\.32\.0"):
        build_engine(config, "cpu")


def test_auto_takes_vllm_only_on_a_gpu_and_only_where_it_works(monkeypatch):
    config = Config()
    monkeypatch.setattr(rollout, "vllm_problem", lambda: None)
    assert [rollout.engine_name(config, device) for device in ("cpu", "cuda", "cuda:1")] == ["hf", "vllm", "vllm"]
    monkeypatch.setattr(rollout, "vllm_problem", lambda: "not here")
    assert rollout.engine_name(config, "cuda") == "hf"


@needs_vllm
def test_a_rank_is_rounded_up_to_what_vllm_serves():
    from verl.workers.rollout.vllm_rollout import _lora_rank

    assert [_lora_rank(rank) for rank in (1, 4, 16, 60, 512)] == [1, 8, 16, 64, 512]
    with pytest.raises(ValueError, match="lora_rank=600 is more than vLLM serves; lower it to 512"):
        _lora_rank(600)
