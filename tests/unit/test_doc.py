"""What the documents name exists: a test that guards a pitfall, a file, a key."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((ROOT / "doc").rglob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_tests_and_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path, test in re.findall(r"`((?:tests|scripts|verl|scrl|doc|logs|evaluate)/[\w./-]+)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), f"{path} is not there"
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"
