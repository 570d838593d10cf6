"""What holds for the repository as a whole."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
DISTRIBUTIONS = {
    "pyproject.toml": "statetap",
    "clients/python/pyproject.toml": "statetap_client",
    "clients/sglang/pyproject.toml": "statetap_sglang",
}
PROJECTS = {file: tomllib.loads((ROOT / file).read_text(encoding="utf-8")) for file in DISTRIBUTIONS}
SOURCES = [
    file
    for folder in ("service", "clients", "tests", "tools")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "migrations" not in file.parts
]


def names_of(requirements):
    return {re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-") for line in requirements}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_is_long(file):
    lines = file.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES


@pytest.mark.parametrize(("file", "package"), DISTRIBUTIONS.items())
def test_a_distribution_installs_one_top_level_module(file, package):
    packages = PROJECTS[file]["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [Path(path).name for path in packages] == [package]
    assert ((ROOT / file).parent / packages[0] / "__init__.py").is_file()
    assert ((ROOT / file).parent / packages[0] / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["service", "clients", "clients/python", "clients/sglang", "tests"])
def test_a_folder_of_the_repository_is_no_package(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("file", DISTRIBUTIONS)
def test_every_distribution_has_the_license(file):
    assert PROJECTS[file]["project"]["license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License\n")


@pytest.mark.parametrize("file", DISTRIBUTIONS)
def test_versions_go_together(file):
    version = PROJECTS["pyproject.toml"]["project"]["version"]
    project = PROJECTS[file]["project"]
    assert project["version"] == version
    pins = [line for line in project["dependencies"] if "==" in line]
    assert all(re.fullmatch(rf"statetap-(client|sglang)=={re.escape(version)}", line) for line in pins)


@pytest.mark.parametrize("file", DISTRIBUTIONS)
def test_dependencies_are_open_here_and_pinned_for_tests(file):
    """Nobody who installs a distribution is bound to a version, and CI never tests what happened to be newest."""
    project = PROJECTS[file]["project"]
    wanted = [line for extra in project.get("optional-dependencies", {}).values() for line in extra] + project["dependencies"]
    lines = (ROOT / "requirements/test.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s=]+", line) for line in pinned)
    assert names_of(wanted) - names_of(pinned) <= {"statetap-client", "statetap-sglang"}
