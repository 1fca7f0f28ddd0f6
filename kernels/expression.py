"""The expression of a row-wise operator's record, with the attributes of a node filled in.

Both backends generate their kernel from it: the CPU uses it directly as C++, Triton a translation (gpu/expression.py).
"""

from __future__ import annotations

from flexspec.errors import CompileError
from flexspec.graph import Node
from flexspec.ops.record import record_of


def record_expression(node: Node) -> str:
    """The expression of a row-wise operator, ``{name}`` replaced by the node's attribute of that name.

    Raises CompileError when the record has none, or when it leaves out an attribute: the program would then differ from
    the reference for every other value of it.
    """
    expression = record_of(node).kernel.expr
    if expression is None:
        raise CompileError(
            f"operator {node.op} has the kernel key 'rowwise' and no expr",
            "an expression over x0, x1",
            "set expr in the operator's record",
        )
    for name, value in node.attrs:
        mark = "{" + name + "}"
        if mark not in expression:
            raise CompileError(
                f"operator {node.op} has the attribute {name}={value!r}, and its expr does not use it",
                f"an expr with {mark} where the value belongs",
                "write the attribute into the expression, or take it out of the record",
            )
        if isinstance(value, (str, tuple)):
            raise CompileError(
                f"attribute {name}={value!r} of the row-wise operator {node.op}",
                "a number or a bool",
                "give the operator a kernel of its own",
            )
        number = f"{value!r}f" if isinstance(value, float) else str(int(value))
        expression = expression.replace(mark, f"({number})")
    return expression
