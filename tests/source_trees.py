"""Syntax trees of source files, for tests that read the package: each file is parsed and walked once in a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, outer ones first."""
    return tuple(ast.walk(tree_of(file)))
