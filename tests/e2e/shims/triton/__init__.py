"""Stands in for Triton on a machine without a GPU: SGLang's modules can define their kernels, and none can be launched.

Every submodule and attribute exists, as a `Placeholder`; what modules do with Triton while they are imported works on it:
decorating, subscripting, calling, subclassing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

__version__ = "3.7.0"


class Placeholder(ModuleType):
    """A module, decorator, type or constant of Triton's, whichever it is taken for."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A capitalised name is subclassed or annotated with: a class then, anything else is a placeholder again.
        found = type(name, (), {"__module__": self.__name__}) if name[0].isupper() else Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        # As a decorator, with or without options. SGLang also asks for the current target, and takes "cpu" when that fails.
        return args[0] if len(args) == 1 and callable(args[0]) and not options else lambda decorated: decorated

    def __getitem__(self, key: object) -> Placeholder:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any `triton.<name>`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith("triton.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class JITFunction:
    """A kernel: it has its function's name, and cannot be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Any:
        raise NotImplementedError(f"the Triton kernel {self.__name__} does not run on a CPU")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self[None]


class Config:
    """One tuning of a kernel; only its being there counts."""

    def __init__(self, kwargs: dict[str, Any] | None = None, *args: Any, **options: Any) -> None:
        self.kwargs = kwargs or {}


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return JITFunction if function is None else JITFunction(function)


def _unchanged(*args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


autotune = heuristics = _unchanged


def cdiv(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"triton.{name}")


sys.meta_path.append(_Submodules())
