"""Does this interpreter have every pin of the given requirement files? Says nothing when it does, else what is missing.

Reads metadata only and imports nothing that has to be installed, so it takes a tenth of a second in any environment.
"""

import sys
from importlib import metadata
from pathlib import Path


def read_pins(text: str) -> dict[str, str]:
    """`name==version` lines as {name: version}; comments and blank lines are skipped.

    Raises:
        ValueError: a line that is no exact pin.
    """
    pins = {}
    for line in text.splitlines():
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        name, separator, version = requirement.partition("==")
        if not separator:
            raise ValueError(f"{requirement!r} is not an exact pin; write it as name==version")
        pins[name.strip()] = version.strip()
    return pins


def unmet(pins: dict[str, str]) -> list[str]:
    """The pins that this interpreter lacks, each with what it has; a local build tag (`+cpu`) is no difference."""
    problems = []
    for name, wanted in pins.items():
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if have.partition("+")[0] != wanted:
            problems.append(f"{name} is {have}, not {wanted}")
    return problems


def main(paths: list[str]) -> int:
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        print(f"Python {sys.version_info[0]}.{sys.version_info[1]} is not 3.11 to 3.14")
        return 1
    problems = [problem for path in paths for problem in unmet(read_pins(Path(path).read_text(encoding="utf-8")))]
    if problems:
        more = f" and {len(problems) - 2} more" if len(problems) > 2 else ""
        print("; ".join(problems[:2]) + more)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
