"""What a planted bug is, and what may notice it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pytest:
    """A selection of tests, as given to pytest."""

    selection: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A tool of the virtual environment and its arguments; it notices by its exit status 1."""

    arguments: tuple[str, ...]


LINT_IMPORTS = Command(arguments=("lint-imports", "--no-cache"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug: `old`, which stands exactly once in `file`, becomes `new`. `breaks` names what it would break for a user."""

    name: str
    file: str
    old: str
    new: str
    catcher: Pytest | Command
    breaks: str


def tests(*selection: str) -> Pytest:
    return Pytest(selection=selection)
