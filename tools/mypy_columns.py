"""A mypy plug-in that finds the type of a column of a structured array at once.

`rows["start_ns"]` has the type `ndarray[..., dtype[Any]]`. numpy's stubs say so in one of five overloads, and mypy
tries the text against the others too. One of them takes nested sequences of sequences, which a text is: three quarters
of mypy's time went into that. This gives the same type for a literal text directly, so nothing else is checked less.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import StrExpr
from mypy.plugin import MethodSigContext, Plugin
from mypy.types import AnyType, FunctionLike, Instance, TypeOfAny, get_proper_type

_GETITEM = "numpy.ndarray.__getitem__"
_STRUCTURED = "numpy.void"


class ColumnsPlugin(Plugin):
    """Answers for `ndarray.__getitem__` alone."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """The hook of a method, by its full name."""
        return _signature if fullname == _GETITEM else None


def _signature(context: MethodSigContext) -> FunctionLike:
    array, signature = get_proper_type(context.type), context.default_signature
    if not (context.args and context.args[0] and isinstance(context.args[0][0], StrExpr)):
        return signature
    dtype = get_proper_type(array.args[1]) if isinstance(array, Instance) and len(array.args) > 1 else None
    element = get_proper_type(dtype.args[0]) if isinstance(dtype, Instance) and dtype.args else None
    if not (isinstance(array, Instance) and isinstance(dtype, Instance) and isinstance(element, Instance)):
        return signature
    if element.type.fullname != _STRUCTURED:
        return signature
    unknown = AnyType(TypeOfAny.special_form)
    column = array.copy_modified(args=[array.args[0], dtype.copy_modified(args=[unknown])])
    return signature.copy_modified(arg_types=[unknown], ret_type=column)


def plugin(_version: str) -> type[Plugin]:
    """The class that mypy makes its plug-in from."""
    return ColumnsPlugin
