"""The distribution `miniresearcher`: the packages `verl` (training) and `scrl` (the search agent)."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def pins(file_name: str) -> list[str]:
    """The requirement lines of a file beside this one."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / file_name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


setup(
    name="miniresearcher",
    version="0.1.0",
    description="Teaches a small language model to search before it answers, with reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["verl", "verl.*", "scrl", "scrl.*"]),
    package_data={"": ["*.yaml", "*.html", "*.css", "*.js", "LICENSE", "NOTICE"]},
    install_requires=pins("requirements.txt"),
    extras_require={
        "gpu": [*pins("requirements-gpu.txt"), "flash-attn==2.8.3.post2"],
        "test": pins("requirements-test.txt"),
    },
)
