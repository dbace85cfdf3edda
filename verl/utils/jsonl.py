"""Files of one JSON object a line and step, as a resumed run finds them."""

import json
from pathlib import Path


def continue_jsonl(path: Path, resume_step: int) -> None:
    """Make ``path`` ready to be appended to by a run that goes on after ``resume_step``.

    Lines of later steps go, because those steps are run again; so does a last line that is half, whose writer was
    killed. A new run (0) under an old name finds the old run's file put aside, as ``name.1.jsonl`` and so on.
    """
    if not path.exists():
        return
    if resume_step == 0:
        beside = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(1, 1_000_000))
        path.rename(next(name for name in beside if not name.exists()))
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= resume_step:
            kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
