"""The methods that tables compare, each as a function from a case to pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, cast

from benchmarks.alignment import best_possible, needleman_wunsch, ours, sliding_window
from benchmarks.alignment.case import Aligner, Case
from benchmarks.alignment.score import Score, scored

from ncclscope_wire.batch import Columns


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to answer a case."""

    name: str
    answer: Callable[[Case], Columns]

    def score(self, cases: Iterable[Case]) -> Score:
        """Its score over some cases."""
        return scored((case, self.answer(case)) for case in cases)


def method(name: str, align: Aligner) -> Method:
    """An aligner as a method: of a case it sees what was logged and captured."""
    return Method(name, lambda case: align(case.nccl_version, case.operations, case.kernels))


def named_aligner(text: str) -> Aligner:
    """The aligner that `module:function` names.

    Raises:
        ValueError: there is none of that name.
    """
    module, _, function = text.partition(":")
    try:
        return cast(Aligner, getattr(import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"aligner {text!r} is not a module:function that can be imported: {error}") from error


SLIDING_WINDOW: Final = method("window", sliding_window.align)
NEEDLEMAN_WUNSCH: Final = method("thesis", needleman_wunsch.align)
OURS: Final = method("ncclscope", ours.align)
BOUND: Final = Method("bound", best_possible.align)
