"""Copies of the working tree in which a bug may be planted and a check run, without touching the tree itself."""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.mutant import Command, Mutant, Pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "var", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "dist", "build"
)
PACKAGES = {"statetap": "service", "statetap_client": "clients/python", "statetap_sglang": "clients/sglang"}
TIMEOUT_SECONDS = 600
CAUGHT = 1


class Unusable(Exception):
    """The harness cannot say anything about a mutant; the message says why."""


def copy_tree(to: Path) -> Path:
    """Copy the working tree to a new folder, and compile it: a copy of the copy then starts sooner.

    The models under var/ are large and only read, so the copy links to them.
    """
    shutil.copytree(ROOT, to, ignore=NOT_COPIED, symlinks=True)
    models = ROOT / "var/models"
    if models.is_dir():
        (to / "var").mkdir()
        (to / "var/models").symlink_to(models)
    compileall.compile_dir(to, quiet=2, workers=0)
    return to


def require_imports_from(copy: Path) -> None:
    """Make sure that what runs in a copy imports the copy's packages, not the installed ones."""
    source = "; ".join(
        ["import pathlib", *(f"import {name}; print(pathlib.Path({name}.__file__).parents[1])" for name in PACKAGES)]
    )
    ran = subprocess.run(
        [sys.executable, "-c", source], cwd=copy, env=_environment(copy), capture_output=True, text=True, check=True
    )
    if ran.stdout.split() != [str(copy / folder) for folder in PACKAGES.values()]:
        raise Unusable(f"Python imports {ran.stdout.split()} instead of the copy in {copy}")


def plant(mutant: Mutant, copy: Path) -> None:
    """Put the bug into a copy. A mutant whose old text does not stand there exactly once is stale."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if text.count(mutant.old) != 1:
        raise Unusable(
            f"stale: its old text stands {text.count(mutant.old)} times in {mutant.file}; bring the catalogue up to date"
        )
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run(catcher: Pytest | Command, copy: Path) -> subprocess.CompletedProcess[str]:
    """Run a check in a copy: status 0 is "nothing found", CAUGHT "found something", any other that it did not run."""
    match catcher:
        case Pytest(selection=selection):
            # One failure is enough, and a fixed seed makes a property test find today what it found yesterday.
            options = ("-q", "-x", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0")
            arguments = [sys.executable, "-m", "pytest", *options, *selection]
        case Command(arguments=(tool, *rest)):
            arguments = [str(Path(sys.executable).parent / tool), *rest]
    try:
        return subprocess.run(
            arguments,
            cwd=copy,
            env=_environment(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as expired:
        raise Unusable(f"its check did not end in {TIMEOUT_SECONDS} s") from expired


def _environment(copy: Path) -> dict[str, str]:
    path = os.pathsep.join(str(copy / folder) for folder in PACKAGES.values())
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
