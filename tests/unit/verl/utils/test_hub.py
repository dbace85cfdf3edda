"""Names that mean ModelScope. Its package is replaced by one that "downloads" from a folder, or fails as it does."""

import importlib
import sys
from pathlib import Path

import pytest

from verl.trainer.config.loading import load_config
from verl.trainer.config.validation import check_inputs
from verl.utils.hub import check_name, model_folder, settle_name
from verl.utils.tokenizer import load_tokenizer

POLICY = Path(__file__).resolve().parents[4] / "data" / "demo" / "policy"


@pytest.fixture
def modelscope(tmp_path, monkeypatch):
    """What the package gives us of itself: ``snapshot_download(model_id)`` and errors that are OSErrors."""
    (tmp_path / "modelscope.py").write_text(
        "def snapshot_download(model_id):\n"
        "    if model_id == 'demo/policy':\n"
        f"        return {str(POLICY)!r}\n"
        "    raise ConnectionError('[E1020] Connection failed\\nat length')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("modelscope", None)


def test_a_name_is_settled_once_where_the_configuration_is_read(monkeypatch, tmp_path):
    overrides = ["profile=cpu_demo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct"]
    read = lambda: load_config(overrides).actor_rollout_ref.model.path  # noqa: E731
    monkeypatch.delenv("VERL_USE_MODELSCOPE", raising=False)
    assert read() == "Qwen/Qwen2.5-3B-Instruct"
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert read() == "modelscope://Qwen/Qwen2.5-3B-Instruct"
    assert settle_name(read()) == read()
    assert load_config(["profile=cpu_demo"]).actor_rollout_ref.model.path == str(POLICY), "folders stay"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert settle_name("org/model") == "org/model" and settle_name("./gone/model") == "./gone/model"
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "False")
    assert settle_name("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"


def test_a_tokenizer_comes_from_there(modelscope):
    assert model_folder("modelscope://demo/policy") == str(POLICY)
    assert model_folder("demo/policy") == "demo/policy", "Hugging Face is transformers' to ask"
    ids = load_tokenizer("modelscope://demo/policy").encode("Who is Ann?")
    assert ids == load_tokenizer(str(POLICY)).encode("Who is Ann?")


def test_what_cannot_be_fetched_is_one_sentence(modelscope):
    with pytest.raises(ValueError, match=r"can't be fetched \(\[E1020\] Connection failed\); check the name") as caught:
        load_tokenizer("modelscope://demo/other")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="organisation/name"):
        check_name("modelscope://policy")


def test_a_missing_package_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # import would fail
    config = load_config(["profile=cpu_demo", "actor_rollout_ref.model.path=modelscope://demo/policy"])
    with pytest.raises(ValueError, match="pip install modelscope"):
        check_inputs(config)
