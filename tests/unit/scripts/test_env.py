"""scripts/env.sh on a miniature repository: the real script, the real pip, packages of one line and no network."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BACKEND = """
import zipfile
from pathlib import Path

def build_editable(directory, config_settings=None, metadata_directory=None):
    name, info = "tinyproject-1.0-py3-none-any.whl", "tinyproject-1.0.dist-info"
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        wheel.writestr("tinyproject.pth", str(Path.cwd()))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tinyproject\\nVersion: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
TRAINER = """
import os, sys
print("\\n".join(["cwd " + os.getcwd(), "omp " + os.environ.get("OMP_NUM_THREADS", ""), *sys.argv[1:]]))
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Repository:
    """A folder with the real scripts, whose pins are tiny wheels beside it."""

    def __init__(self, base: Path, folder: str = "repo") -> None:
        self.root = root = base / folder
        wheels, self.bin, self.home = (base / name for name in ("wheel house", "bin", "home"))
        for folder in (root / "scripts", root / "verl" / "trainer", wheels, self.bin, self.home):
            folder.mkdir(parents=True)
        for name in ("scripts/env.sh", "scripts/check_pins.py", "train_grpo.sh"):
            shutil.copy(ROOT / name, root / name)
        for name in ("tinydep", "tinytest", "tinygpu", "tinyvllm"):
            write_wheel(wheels, name, "1.0")
        write_wheel(wheels, "tinydep", "2.0")
        self.write("requirements.txt", "tinydep==1.0  # as small as it gets\n")
        self.write("requirements-test.txt", "tinytest==1.0\n")
        self.write("requirements-gpu.txt", "tinygpu==1.0\n")
        self.write("requirements-vllm-cpu.txt", "tinyvllm==1.0\n")
        self.write("setup.py", "# what the editable install is made from\n")
        self.write("backend.py", BACKEND)
        self.write("pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
        self.write("verl/trainer/main_ppo.py", TRAINER)
        self.gpus(0)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PET_", "RAY_"))
        }
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHON", "OMP_NUM_THREADS", "XDG_CACHE_HOME"):
            self.environment.pop(name, None)
        self.environment |= {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": wheels.as_uri(),  # a plain path would be split at its space
        }

    @property
    def venv(self) -> Path:
        """In the repository, or outside where its path has a space."""
        return next((self.home / ".cache" / "miniresearcher").glob("venv-*"), self.root / ".venv")

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text, encoding="utf-8")

    def gpus(self, count: int) -> None:
        lines = "".join(f"echo 'GPU {index}: A100 (UUID: {index})'\n" for index in range(count))
        (self.bin / "nvidia-smi").write_text(f"#!/bin/sh\n{lines or 'exit 9'}\n")
        (self.bin / "nvidia-smi").chmod(0o755)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *command],
            cwd="/",
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*command, **environment)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def set_up(self, purpose: str = "run", **environment: str) -> tuple[int, str, str]:
        return self.run(str(self.root / "scripts" / "env.sh"), purpose, **environment)

    def python(self, code: str) -> str:
        return subprocess.check_output([self.venv / "bin" / "python", "-c", code], text=True, cwd="/").strip()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Nothing set up yet; a space in the path."""
    return Repository(tmp_path_factory.mktemp("env"), "with a space")


@pytest.fixture(scope="module")
def first_two(fresh: Repository) -> list[tuple[int, str, str]]:
    """The outcome of two set-ups that start at once, from nothing."""
    processes = [fresh.start(str(fresh.root / "scripts" / "env.sh"), "run") for _ in range(2)]
    outputs = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def repo(fresh: Repository, first_two: list[tuple[int, str, str]]) -> Repository:
    """Set up for `run`, at least."""
    return fresh


def test_two_at_once_set_up_once(repo: Repository, first_two: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in first_two] == [0, 0], first_two
    assert [out.strip() for _, out, _ in first_two] == [str(repo.venv)] * 2
    assert sum("2/4 packages" in err for _, _, err in first_two) == 1
    assert sum("waiting for it" in err for _, _, err in first_two) == 1
    assert repo.python("import tinydep, verl; print(tinydep.version)") == "1.0"
    assert " " not in str(repo.venv)  # Ray can't start a worker from there


def test_next_start_calls_no_pip(repo: Repository) -> None:
    before = (repo.venv / "setup.log").stat().st_mtime_ns
    began = time.perf_counter()
    code, out, err = repo.set_up()
    assert (code, out.strip(), err.count("\n")) == (0, str(repo.venv), 1)
    assert (repo.venv / "setup.log").stat().st_mtime_ns == before
    assert time.perf_counter() - began < 5  # a tenth of a second where nothing else runs


def test_sourced_puts_the_environment_first(repo: Repository) -> None:
    script = 'source "$1/scripts/env.sh" run 2>/dev/null; python -c "import sys; print(sys.prefix)"; echo "$PYTHONPATH"'
    code, out, _ = repo.run("-c", script, "_", str(repo.root))
    assert (code, out.splitlines()) == (0, [str(repo.venv), str(repo.root)])


def test_trainer_gets_arguments_and_directory_as_given(repo: Repository) -> None:
    given = ["data.train_files=[a b.parquet,'c']", "+max_turns=3"]
    code, out, _ = repo.run(str(repo.root / "train_grpo.sh"), *given)
    assert (code, out.splitlines()) == (0, ["cwd /", "omp 1", *given, "profile=cpu_demo"])
    code, out, _ = repo.run(str(repo.root / "train_grpo.sh"), "+profile=a100_80g")
    assert (code, out.splitlines()[2:]) == (0, ["+profile=a100_80g"])


def test_rank_above_zero_needs_an_address(repo: Repository) -> None:
    code, out, err = repo.run(str(repo.root / "train_grpo.sh"), PET_NODE_RANK="1", RAY_AUTH_TOKEN="0" * 64)
    assert (code, out) == (1, "")
    assert "export MASTER_ADDR" in err


@pytest.mark.parametrize("node", [{"PET_NODE_RANK": "1"}, {"PET_NNODES": "2"}])
def test_several_machines_need_a_token(repo: Repository, node: dict[str, str]) -> None:
    code, out, err = repo.run(str(repo.root / "train_grpo.sh"), MASTER_ADDR="127.0.0.1", **node)
    assert (code, out) == (1, "")
    assert "export the same RAY_AUTH_TOKEN" in err


def test_fitting_active_environment_is_used_as_it_is(repo: Repository, tmp_path: Path) -> None:
    other = Repository(tmp_path)
    code, out, err = other.set_up(VIRTUAL_ENV=str(repo.venv))
    assert (code, out.strip()) == (0, str(repo.venv))
    assert "using the active environment" in err
    assert not other.venv.exists()


def test_path_with_a_space_is_never_used(repo: Repository, tmp_path: Path) -> None:
    other, spaced = Repository(tmp_path), tmp_path / "a space"
    spaced.symlink_to(repo.venv)
    code, out, err = other.set_up(VIRTUAL_ENV=str(spaced), MINIRESEARCHER_VENV=str(tmp_path / "x y"), HOME="a home")
    assert (code, out) == (1, "")
    assert "export MINIRESEARCHER_VENV=" in err


def test_part_is_added_to_what_is_there_and_a_new_pin_is_followed(repo: Repository) -> None:
    repo.write("requirements.txt", "tinydep==2.0\n")
    code, _, err = repo.set_up("test", CONDA_PREFIX=sys.prefix)
    assert code == 0, err
    assert "does not fit (tinydep is missing; tinytest is missing and 1 more)" in err
    assert "virtual environment" not in err
    assert repo.python("import tinydep, tinytest; print(tinydep.version, tinytest.version)") == "2.0 1.0"
    assert repo.python("import tinyvllm; print(tinyvllm.version)") == "1.0"
    assert repo.set_up("run")[2].count("\n") == 1  # what is there includes what is asked


def test_vllm_without_a_gpu_comes_when_asked_for(tmp_path: Path) -> None:
    other = Repository(tmp_path)
    code, _, err = other.set_up("vllm")
    assert (code, other.python("import tinydep, tinyvllm; print(tinyvllm.version)")) == (0, "1.0"), err
    assert other.set_up("run")[2].count("\n") == 1


def test_gpu_brings_its_part_and_its_profile(repo: Repository) -> None:
    repo.gpus(1)
    code, out, err = repo.run(str(repo.root / "train_grpo.sh"))
    repo.gpus(0)
    assert (code, out.splitlines()[1:]) == (0, ["omp ", "profile=a100_80g"]), err
    assert "flash-attn" in err and "SDPA" in err  # optional, and it can't be had here
    assert repo.python("import tinygpu; print(tinygpu.version)") == "1.0"


def test_failure_ends_with_a_remedy_and_spares_the_shell(repo: Repository) -> None:
    before = (repo.root / "requirements-test.txt").read_text()
    repo.write("requirements-test.txt", "nosuchpackage==1.0\n")
    script = 'source "$1/scripts/env.sh" test || echo "still here"'
    code, out, err = repo.run("-c", script, "_", str(repo.root))
    repo.write("requirements-test.txt", before)
    assert (code, out) == (0, "still here\n")
    assert "No matching distribution found for nosuchpackage" in err
    assert "check the network" in err
    # pip had not installed anything: what was there is whole, and nothing is done again.
    for purpose in ("run", "test"):
        code, _, err = repo.set_up(purpose, PIP_FIND_LINKS="")
        assert (code, err.count("\n")) == (0, 1), err


def test_killed_set_up_is_repaired(repo: Repository) -> None:
    repo.write("requirements.txt", "tinydep==1.0\n")
    process = repo.start(str(repo.root / "scripts" / "env.sh"), "test")
    deadline = time.monotonic() + 60
    while not (repo.venv / "bin" / "python").exists() or not (repo.venv / ".unfinished").exists():
        assert time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    code, _, err = repo.set_up("test")
    assert code == 0, err
    assert "interrupted; starting afresh" in err
    assert repo.python("import tinydep, tinytest; print(tinydep.version, tinytest.version)") == "1.0 1.0"
    assert not (repo.venv / ".unfinished").exists()


def test_an_environment_of_the_users_is_filled_and_never_removed(tmp_path: Path) -> None:
    other = Repository(tmp_path)
    own = tmp_path / "own"
    subprocess.run([sys.executable, "-m", "venv", own], check=True, timeout=120)
    (own / "notes.txt").write_text("mine")
    code, _, err = other.set_up(MINIRESEARCHER_VENV=str(own), PIP_FIND_LINKS="")
    assert code == 1 and "could not reach its package index" in err
    code, out, err = other.set_up(MINIRESEARCHER_VENV=str(own))
    assert (code, out.strip()) == (0, str(own)), err
    (own / ".unfinished").touch()  # as a set-up leaves it that is killed while pip installs
    other.write("requirements.txt", "tinydep==2.0\n")
    code, _, err = other.set_up(MINIRESEARCHER_VENV=str(own))
    assert code == 1 and "was not made by this script" in err
    assert (own / "notes.txt").read_text() == "mine"

    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "notes.txt").write_text("mine")
    code, _, err = other.set_up(MINIRESEARCHER_VENV=str(tmp_path / "papers"))
    assert code == 1 and "holds other files and no environment" in err
    assert (tmp_path / "papers" / "notes.txt").read_text() == "mine"


def test_a_relative_folder_is_meant_from_where_it_was_named(repo: Repository) -> None:
    script = 'cd "$1" && source "$2/scripts/env.sh" run && cd / && python -c "import sys; print(sys.prefix)"'
    code, out, err = repo.run(
        "-c", script, "_", str(repo.venv.parent), str(repo.root), MINIRESEARCHER_VENV=repo.venv.name
    )
    assert (code, out.strip()) == (0, str(repo.venv)), err


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    other = Repository(tmp_path)
    other.venv.write_text("a file where the folder should be")
    code, _, err = other.set_up()
    assert code == 1
    assert "cannot write to" in err and "Make the folder writable" in err


def test_old_python_gets_a_remedy(tmp_path: Path) -> None:
    other = Repository(tmp_path)
    for tool in ("bash", "cat", "cmp", "dirname", "basename"):
        (other.bin / tool).symlink_to(shutil.which(tool) or "")
    (other.bin / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 || exit 1\n')
    (other.bin / "python3").chmod(0o755)
    code, _, err = other.set_up(PATH=str(other.bin))
    assert code == 1
    assert "Python 3.11 to 3.14 is needed; found: Python 3.8.1" in err
    assert "PYTHON=/path/to/python3.11" in err


def test_unknown_purpose_is_refused(tmp_path: Path) -> None:
    code, _, err = Repository(tmp_path).set_up("tests")
    assert code == 1
    assert "unknown purpose 'tests'" in err
