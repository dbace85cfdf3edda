"""scripts/merge_lora.py on what the real actor saves: the same function merged, adapted, and served by vLLM."""

import asyncio
import importlib.util
import json
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scrl.agent import read_adapter
from tests.tiny import tiny_episodes
from verl.trainer.config.schema import ActorConfig, ActorRolloutRefConfig, Config, ModelConfig, OptimConfig
from verl.utils.checkpoint import CheckpointManager
from verl.workers.fsdp_workers import ActorRefWorker
from verl.workers.rollout import vllm_problem
from verl.workers.rollout.base import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
POLICY = ROOT / "data" / "demo" / "policy"
RANK = 8
PROMPTS = [[1, 2, 3, 4, 5] * 6, [700, 800, 900], [11]]

spec = importlib.util.spec_from_file_location("merge_lora", ROOT / "scripts" / "merge_lora.py")
script = importlib.util.module_from_spec(spec)
sys.modules["merge_lora"] = script
spec.loader.exec_module(script)


def train(run: Path, use_lora: bool) -> None:
    """Two checkpoints of a run on the demo's policy, one optimizer step apart."""
    model = ModelConfig(path=str(POLICY), use_lora=use_lora, lora_rank=RANK, lora_alpha=16)
    actor = ActorConfig(use_kl_loss=False, optim=OptimConfig(lr=5e-3 if use_lora else 1e-4, eps=1e-8))
    worker = ActorRefWorker(replace(Config(), actor_rollout_ref=ActorRolloutRefConfig(model, actor)))
    worker.init_model()
    saver = CheckpointManager(run / "checkpoints")
    for step in (1, 2):
        worker.update_actor(tiny_episodes(4, failed=slice(0, 0)))
        saver.save(step, lambda folder: worker.save_checkpoint(str(folder)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        train(folder / "lora", True)
        train(folder / "full", False)
        dist.destroy_process_group()
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def adapter(runs, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(runs / "lora" / "checkpoints" / "global_step_2" / "adapter", tmp_path / "mine"))


def run(capsys, *arguments) -> tuple[int, str]:
    code = script.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.err if code else shown.out


@torch.no_grad()
def logits(model, prompt: list[int]) -> torch.Tensor:
    return model.eval()(torch.tensor([prompt])).logits[0]


def load(folder: Path):
    """In float64, so that what differs is the weights: a float32 forward is off by 2e-5 at logits of 20."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def adapted(adapter: Path):
    return PeftModel.from_pretrained(load(POLICY), adapter, autocast_adapter_dtype=False).double()


def greedy(model, prompt: list[int], length: int) -> list[int]:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_merged_is_base_and_adapter(runs, tmp_path, capsys):
    code, said = run(capsys, runs / "lora", "--output", tmp_path / "merged")
    assert code == 0 and "global_step_2 merged" in said, said
    merged, base = load(tmp_path / "merged"), load(POLICY)
    wanted = adapted(runs / "lora" / "checkpoints" / "global_step_2" / "adapter")
    for prompt in PROMPTS:
        assert (logits(merged, prompt) - logits(wanted, prompt)).abs().max() < 1e-5
        assert (logits(merged, prompt) - logits(base, prompt)).abs().max() > 0.05, "the adapter says something"
    stored = [load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", POLICY)]
    assert {n: t.dtype for n, t in stored[0].items()} == {n: t.dtype for n, t in stored[1].items()}
    assert sorted(merged.state_dict()) == sorted(base.state_dict())
    text = "Where was Ann born?<|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")(text) == AutoTokenizer.from_pretrained(POLICY)(text)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_base_in_half_precision_stays_so(runs, adapter, tmp_path, capsys):
    AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(tmp_path / "half")
    code, said = run(capsys, adapter, "--base", tmp_path / "half", "--output", tmp_path / "merged")
    assert code == 0, said
    assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/global_step_1", "checkpoints/global_step_1/adapter"])
def test_a_run_means_its_latest_checkpoint(runs, tmp_path, capsys, place):
    code, said = run(capsys, runs / "lora" / place, "--output", tmp_path / "out", "--adapter-only")
    step = 1 if "step_1" in place else 2
    assert code == 0 and f"global_step_{step} exported" in said, said
    source = runs / "lora" / "checkpoints" / f"global_step_{step}" / "adapter"
    for name in script.ADAPTER_FILES:
        assert (tmp_path / "out" / name).stat().st_size > 100
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == json.loads(
        (source / "adapter_config.json").read_text()
    )
    assert torch.equal(logits(adapted(tmp_path / "out"), PROMPTS[0]), logits(adapted(source), PROMPTS[0]))


def test_the_base_can_be_named_anew(adapter, tmp_path, capsys):
    arguments = (adapter, "--adapter-only", "--base", "Qwen/Qwen2.5-3B-Instruct", "--output", tmp_path / "out")
    assert run(capsys, *arguments)[0] == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/Qwen2.5-3B-Instruct"


def test_a_model_trained_whole_is_exported_as_it_is(runs, tmp_path, capsys):
    code, said = run(capsys, runs / "full", "--output", tmp_path / "out")
    assert code == 0 and "nothing to merge" in said, said
    trained = load_file(runs / "full" / "checkpoints" / "global_step_2" / "model" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
    code, said = run(capsys, runs / "full", "--output", tmp_path / "adapter", "--adapter-only")
    assert code == 1 and "without an adapter" in said and not (tmp_path / "adapter").exists()


def test_what_is_wrong_is_one_sentence(runs, adapter, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"

    def refused(*arguments: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, said = run(capsys, *arguments)
        assert code == 1 and len(said.splitlines()) == 1 and said.startswith("merge_lora: "), said
        assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
        return said

    (tmp_path / "empty").mkdir()
    assert "is no folder" in refused(tmp_path / "nowhere", "--output", out)
    assert "holds no checkpoint" in refused(tmp_path / "empty", "--output", out)
    assert "is there already" in refused(adapter, "--output", adapter)
    assert "--base PATH" in refused(adapter, "--base", tmp_path / "gone", "--output", out)
    assert "--base PATH" in refused(adapter, "--base", tmp_path / "empty", "--output", out)
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    tensors = load_file(other / script.ADAPTER_FILES[1])
    save_file(dict(list(tensors.items())[2:]), other / script.ADAPTER_FILES[1])
    assert "in one of them only" in refused(other, "--output", out)
    save_file({n: torch.zeros(RANK, 5) if "lora_A" in n else t for n, t in tensors.items()}, other / "w.safetensors")
    (other / "w.safetensors").replace(other / script.ADAPTER_FILES[1])
    assert "doesn't fit" in refused(other, "--output", out)
    (other / script.ADAPTER_FILES[1]).write_bytes(b"\0" * 20)
    assert "can't be read" in refused(other, "--output", out)
    assert "can't be read" in refused(other, "--output", out, "--adapter-only")
    (other / script.ADAPTER_FILES[0]).write_text('{"peft_type": "IA3"}')
    assert "no LoRA adapter" in refused(other, "--output", out, "--adapter-only")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    for more in ((), ("--adapter-only",)):
        assert "are to be written" in refused(adapter, "--output", out, *more)
    assert "are to be written" in refused(runs / "full", "--output", out)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        with open("/dev/full", "w") as file:  # the kernel's own ENOSPC
            file.write("x" * 100_000)

    with pytest.raises(ValueError, match=r"the disk of .* is full"):
        script.write_whole(write, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
@pytest.mark.skipif(vllm_problem() is not None or torch.cuda.is_available(), reason="needs the CPU build of vLLM")
def test_vllm_generates_with_the_exported_adapter(runs, tmp_path, capsys):
    assert run(capsys, runs / "lora", "--output", tmp_path / "out", "--adapter-only")[0] == 0
    model, length = adapted(tmp_path / "out"), 12
    wanted = [greedy(model, prompt, length) for prompt in PROMPTS]
    with model.disable_adapter():
        assert [greedy(model, prompt, length) for prompt in PROMPTS] != wanted

    async def ask() -> list[list[int]]:
        from vllm import SamplingParams as Sampling
        from vllm.lora.request import LoRARequest

        from verl.workers.rollout.vllm_rollout import VLLMEngine

        limits = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "lora_rank": RANK}
        engine = VLLMEngine(str(POLICY), **limits)
        try:
            # As another program would: vLLM reads the folder itself.
            request = LoRARequest("exported", 7, str(tmp_path / "out"))
            sampling = Sampling(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
            direct = []
            for number, prompt in enumerate(PROMPTS):
                asked = engine._engine.generate(
                    {"prompt_token_ids": prompt}, sampling, f"x{number}", lora_request=request
                )
                async for answer in asked:
                    direct.append(list(answer.outputs[0].token_ids)) if answer.finished else None
            # And as this project's engine does.
            await engine.update_weights(read_adapter(tmp_path / "out"), 1)
            params = SamplingParams(max_new_tokens=length, temperature=0.0)
            ours = [(await engine.generate(prompt, params)).token_ids for prompt in PROMPTS]
            return direct, ours
        finally:
            engine.close()

    direct, ours = asyncio.run(ask())
    assert direct == wanted
    assert ours == wanted
