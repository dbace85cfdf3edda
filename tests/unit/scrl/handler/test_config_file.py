"""config.yaml is HandlerConfig with a comment for each key; the servers' command line over it."""

from dataclasses import fields

import pytest
import yaml

from scrl.handler.config import CONFIG_FILE, HandlerConfig, config_from_arguments, load_config


def test_the_file_equals_the_dataclass():
    values = yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8"))
    assert list(values) == [field.name for field in fields(HandlerConfig)]
    assert load_config() == HandlerConfig()


def test_every_key_has_a_comment():
    lines = CONFIG_FILE.read_text(encoding="utf-8").splitlines()
    keys = [line for line in lines if line and not line.startswith("#")]
    assert len(keys) == len(fields(HandlerConfig))
    for line in keys:
        assert len(line.partition(" # ")[2].split()) >= 3, line


def test_command_line_over_scripts_defaults_over_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("topk: 7\nport: 1\nmax_workers: 2\n")
    config = config_from_arguments(
        None, ["--config", str(tmp_path / "mine.yaml"), "port=3", "server_url_list=[http://a, http://b]"], ["port=2"]
    )
    assert (config.topk, config.port, config.max_workers) == (7, 3, 2)
    assert config.server_url_list == ("http://a", "http://b")
    assert config.timeout_s == HandlerConfig.timeout_s


def test_a_corpus_is_looked_for_here_and_then_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = CONFIG_FILE.parents[2] / "data/demo/corpus.jsonl"
    assert load_config(overrides=["index_corpus=data/demo/corpus.jsonl"]).index_corpus == str(there)
    (tmp_path / "data/demo").mkdir(parents=True)
    (tmp_path / "data/demo/corpus.jsonl").touch()
    assert load_config(overrides=["index_corpus=data/demo/corpus.jsonl"]).index_corpus == "data/demo/corpus.jsonl"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prt=7", "unknown key prt; did you mean port?"),
        ("port", "'port' is no key=value"),
        ("port=x", "port='x' can't be: Input should be a valid integer"),
        ("topk=1.5", "topk=1.5 can't be"),
        ("topk=0", "search.topk=0 is too small; give 1 or more"),
        ("host=null", "host=None can't be"),
        ("server_url_list=[1]", "server_url_list.0=1 can't be"),
        ("timeout_s=.nan", "search.timeout_s=nan"),
    ],
)
def test_what_cannot_be_is_one_sentence(override, said):
    with pytest.raises(ValueError) as error:
        load_config(overrides=[override])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\udcff"])
def test_a_file_that_is_none(tmp_path, text):
    (tmp_path / "bad.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="bad.yaml"):
        load_config(tmp_path / "bad.yaml")
