"""Each pass as text before and after, and the cases where it must leave the graph alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexspec.compiler.passes.attention_modes import attention_modes
from flexspec.compiler.passes.dead_values import dead_values
from flexspec.compiler.passes.fuse_projections import fuse_projections
from flexspec.compiler.passes.fuse_residual import fuse_residual
from flexspec.compiler.passes.fuse_swiglu import fuse_swiglu
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_node
from flexspec.types import DType, Role
from flexspec.verifier import verify

HEAD = """\
graph g {
  input %x: f32[T,8]:activation
  input %r: f32[T,8]:activation
  input %a.weight: f32[8,8]:weight
  input %b.weight: f32[8,8]:weight
  input %c.weight: f32[8,8]:weight
  input %a.bias: f32[8]:weight
  input %b.bias: f32[8]:weight
"""
ACT = ": f32[T,8]:activation"


def graph_of(body: str) -> Graph:
    """A legal graph from lines of ``%y = op(...)``; every value is f32[T,8]."""
    lines = []
    for line in body.strip().splitlines():
        left, equals, right = line.strip().partition(" = ")
        typed = ", ".join(name + ACT for name in left.split(", ")) if equals else left
        lines.append(f"  {typed}{equals}{right}")
    graph = parse_graph(HEAD + "\n".join(lines) + "\n}\n")
    verify(graph)
    return graph


def check(rewrite, before: str, after: str) -> None:
    found = rewrite(graph_of(before))
    verify(found)
    wanted = graph_of(after)
    assert [print_node(n) for n in found.nodes] == [print_node(n) for n in wanted.nodes]
    assert found.outputs == wanted.outputs


def test_fuse_swiglu() -> None:
    check(
        fuse_swiglu,
        """
        %gate = linear(%x, %a.weight)
        %up = linear(%x, %b.weight)
        %y = swiglu(%gate, %up)
        return %y
        """,
        """
        %y = linear_swiglu(%x, %a.weight, %b.weight)
        return %y
        """,
    )


@pytest.mark.parametrize(
    "body",
    [
        # the gate has a bias
        "%g = linear(%x, %a.weight, %a.bias)\n%u = linear(%x, %b.weight)\n%y = swiglu(%g, %u)\nreturn %y",
        # another reader of the gate
        "%g = linear(%x, %a.weight)\n%u = linear(%x, %b.weight)\n%y = swiglu(%g, %u)\n%z = add(%y, %g)\nreturn %z",
        # the up product is an output
        "%g = linear(%x, %a.weight)\n%u = linear(%x, %b.weight)\n%y = swiglu(%g, %u)\nreturn %y, %u",
        # two different x
        "%g = linear(%x, %a.weight)\n%u = linear(%r, %b.weight)\n%y = swiglu(%g, %u)\nreturn %y",
        # gate and up are one value
        "%g = linear(%x, %a.weight)\n%y = swiglu(%g, %g)\nreturn %y",
        # operands that no node computes
        "%y = swiglu(%x, %r)\nreturn %y",
    ],
)
def test_fuse_swiglu_leaves_alone(body: str) -> None:
    check(fuse_swiglu, body, body)


def test_fuse_projections() -> None:
    check(
        fuse_projections,
        """
        %q = linear(%x, %a.weight)
        %s = add(%q, %r)
        %k = linear(%x, %b.weight)
        %v = linear(%x, %c.weight)
        %o = linear(%s, %a.weight)
        return %o, %k, %v
        """,
        """
        %q, %k, %v = linear_group(%x, %a.weight, %b.weight, %c.weight) {biased=false, count=3}
        %s = add(%q, %r)
        %o = linear(%s, %a.weight)
        return %o, %k, %v
        """,
    )


def test_fuse_projections_keeps_biased_and_unbiased_apart() -> None:
    check(
        fuse_projections,
        """
        %q = linear(%x, %a.weight, %a.bias)
        %k = linear(%x, %b.weight, %b.bias)
        %v = linear(%x, %c.weight)
        return %q, %k, %v
        """,
        """
        %q, %k = linear_group(%x, %a.weight, %b.weight, %a.bias, %b.bias) {biased=true, count=2}
        %v = linear(%x, %c.weight)
        return %q, %k, %v
        """,
    )


def test_fuse_projections_splits_groups_beyond_the_arity() -> None:
    body = "\n".join(f"%y{i} = linear(%x, %a.weight)" for i in range(11))
    found = fuse_projections(graph_of(body + "\nreturn " + ", ".join(f"%y{i}" for i in range(11))))
    verify(found)
    assert [node.attr("count") for node in found.nodes] == [8, 3]


def test_fuse_residual() -> None:
    check(
        fuse_residual,
        """
        %p = linear(%x, %a.weight, %a.bias)
        %s = add(%r, %p)
        %d = linear(%s, %b.weight)
        %y = add(%d, %s)
        return %y
        """,
        """
        %s = linear_add(%x, %a.weight, %r, %a.bias)
        %y = linear_add(%s, %b.weight, %s)
        return %y
        """,
    )


def test_fuse_residual_of_two_products_takes_the_later() -> None:
    check(
        fuse_residual,
        """
        %p = linear(%x, %a.weight)
        %q = linear(%r, %b.weight)
        %y = add(%q, %p)
        return %y
        """,
        """
        %p = linear(%x, %a.weight)
        %y = linear_add(%r, %b.weight, %p)
        return %y
        """,
    )


@pytest.mark.parametrize(
    "body",
    [
        "%p = linear(%x, %a.weight)\n%y = add(%r, %p)\nreturn %y, %p",  # the product is an output
        "%p = linear(%x, %a.weight)\n%y = add(%r, %p)\n%z = add(%y, %p)\nreturn %z",  # two readers
        "%p = linear(%x, %a.weight)\n%y = add(%p, %p)\nreturn %y",  # added to itself
        "%y = add(%x, %r)\nreturn %y",
    ],
)
def test_fuse_residual_leaves_alone(body: str) -> None:
    check(fuse_residual, body, body)


def test_dead_values() -> None:
    before = graph_of("%p = linear(%x, %a.weight)\n%q = linear(%p, %b.weight)\n%y = add(%x, %r)\nreturn %y, %p")
    after = dead_values(before)
    verify(after)
    assert [node.op for node in after.nodes] == ["linear", "add"]
    assert [value.name for value in after.inputs] == ["x", "r", "a.weight"]


def test_dead_values_keeps_step_inputs_and_caches() -> None:
    graph = build_model(ModelConfig("llama", 32, 16, 2, 2, 1, 8, 24, 1e-5, 64), DType.F32)
    assert dead_values(graph) == graph
    embedded_only = replace(graph, outputs=(graph.nodes[0].outputs[0].name,))
    after = dead_values(embedded_only)
    verify(after)
    assert after.inputs_of(Role.WEIGHT) == embedded_only.inputs_of(Role.WEIGHT)[:1]
    assert all(after.inputs_of(role) == graph.inputs_of(role) for role in (Role.IDS, Role.TREE, Role.KV))


def test_attention_modes() -> None:
    graph = build_model(ModelConfig("llama", 32, 16, 2, 2, 1, 8, 24, 1e-5, 64), DType.F32)
    moded = attention_modes(graph, "tree_verify")
    verify(moded)
    changed = [(a, b) for a, b in zip(graph.nodes, moded.nodes, strict=True) if a != b]
    assert [a.op for a, _ in changed] == ["attention", "attention"]
    assert {b.attr("mode") for _, b in changed} == {"tree_verify"}
