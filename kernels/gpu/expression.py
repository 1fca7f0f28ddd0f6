"""Translates the C++ expression of a row-wise operator to Triton: a recursive descent over its few operators."""

from __future__ import annotations

import re

from flexspec.errors import CompileError

# What an expression may call: functions of templates/cpu/simd.h, and Triton's names. To add one, write it there and add
# a line here; ``tanh``, which Triton lacks, is in templates/triton/rowwise.py.j2.
FUNCTIONS = {
    "fs_exp": "tl.exp",
    "fs_log": "tl.log",
    "fs_tanh": "tanh",
    "vmax": "tl.maximum",
    "vmin": "tl.minimum",
    "select": "tl.where",
    "splat": "",
}
_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)f?\b|([A-Za-z_]\w*)|(<=|>=|==|!=|[-+*/<>?:(),]))"
)
_LEVELS = (("<", ">", "<=", ">=", "==", "!="), ("+", "-"), ("*", "/"))  # lowest precedence first


def to_triton(expression: str, operands: int) -> str:
    """The expression in Triton's Python, over ``x0`` to ``x{operands - 1}``.

    Raises CompileError for what has no translation, naming it.
    """
    return _Reader(expression, operands).read()


class _Reader:
    def __init__(self, expression: str, operands: int) -> None:
        self._expression, self._names = expression, {f"x{i}" for i in range(operands)}
        self._tokens: list[str] = []
        self._at = 0
        position, text = 0, expression.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._wrong(repr(text[position:].lstrip()[:10]))
            self._tokens.append(match[1] or match[2] or match[3])
            position = match.end()

    def read(self) -> str:
        text = self._choice()
        if self._at < len(self._tokens):
            raise self._wrong(repr(self._tokens[self._at]))
        return text

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self, expected: str = "") -> str:
        token = self._peek()
        if not token or expected not in ("", token):
            raise self._wrong(f"{token!r} instead of {expected!r}" if token else "an early end")
        self._at += 1
        return token

    def _choice(self) -> str:
        text = self._binary(0)
        if self._peek() != "?":
            return text
        self._next()
        chosen = self._choice()
        self._next(":")
        return f"tl.where({text}, {chosen}, {self._choice()})"

    def _binary(self, level: int) -> str:
        if level == len(_LEVELS):
            return self._unary()
        text = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            text = f"{text} {self._next()} {self._binary(level + 1)}"
            if level == 0 and self._peek() in _LEVELS[0]:
                raise self._wrong(f"a second comparison {self._peek()!r}")  # a chain means something else in Python
        return text

    def _unary(self) -> str:
        sign = self._next() if self._peek() in ("-", "+") else ""
        return f"{sign}{self._unary()}" if sign else self._primary()

    def _primary(self) -> str:
        token = self._next()
        if token == "(":
            text = self._choice()
            self._next(")")
            return f"({text})"
        if token[0].isdigit() or token[0] == ".":
            return token
        if token in self._names:
            return token
        if token not in FUNCTIONS or self._peek() != "(":
            raise self._wrong(token)
        return f"{FUNCTIONS[token]}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        self._next("(")
        arguments = [self._choice()]
        while self._peek() == ",":
            self._next()
            arguments.append(self._choice())
        self._next(")")
        return arguments

    def _wrong(self, found: str) -> CompileError:
        return CompileError(
            f"{found} in the expression {self._expression}",
            f"{', '.join(sorted(self._names))}, numbers, + - * /, a < b, mask ? a : b, {', '.join(FUNCTIONS)}",
            "use only these, or set triton='torch' in the operator's KernelKey",
        )
