"""The README keeps its promises: what it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["README.md", "README_zh.md", "data/demo/README.md"])
def test_files_and_pictures_that_it_names_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "@@" not in text, "a placeholder was left"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    named = re.findall(r"`((?:verl|scrl|scripts|evaluate|logs|data)/[\w./-]+\.(?:py|sh|yaml|md|jsonl))`", text)
    assert all((ROOT / path).is_file() for path in pictures)
    missing = [path for path in named if not (ROOT / path).is_file()]
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)#]+)[^)]*\)", text)
    missing += [link for link in links if "://" not in link and not ((ROOT / name).parent / link).exists()]
    assert not missing, missing


def test_both_languages_give_the_same_commands():
    blocks = [
        re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
        for name in ("README.md", "README_zh.md")
    ]
    commands = [
        [line.partition("  #")[0].strip() for block in found for line in block.splitlines() if "<" not in line]
        for found in blocks
    ]
    assert commands[0] == commands[1] and len(commands[0]) > 8
