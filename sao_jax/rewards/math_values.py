"""Values of parsed answers: bounded before anything is computed, and compared by relative, not absolute, differences.

math-verify rounds to 6 decimals and chops differences below 1e-15, so that it takes 1/2^99 for 1/2^98. Here two values
that differ relatively are different, whatever their size. sympy's trees enter.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

MAX_BITS = 100_000.0  # of a number; 2006! has 19,600
MAX_NODES = 2000
EXACT, DECIMAL = 1e-15, 1e-5  # largest relative difference; the second where one side is written with a decimal point
DIGITS = 30  # of an evaluation
POINTS = ("0.7310585786", "1.2718281828", "-2.6180339887")  # of the variables, where equal expressions agree


def is_bounded(tree: Any) -> bool:
  """True when no number in the tree can be larger than 2^100000 or have more digits, and the tree is not too large."""
  import sympy

  if sum(1 for _ in itertools.islice(sympy.preorder_traversal(tree), MAX_NODES + 1)) > MAX_NODES:
    return False
  return all(_log2(part) <= MAX_BITS for part in _parts(tree))


def holds_operators(tree: Any) -> bool:
  """True with a sum, product, integral, derivative or limit that is written out, not computed."""
  import sympy

  operators = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
  return any(isinstance(node, operators) for node in sympy.preorder_traversal(tree))


def differ(one: Any, other: Any) -> bool:
  """True when two trees certainly have different values; False when they agree, or cannot be compared by numbers."""
  import sympy

  if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
    return len(one) != len(other) or any(all(differ(a, b) for b in other.args) for a in one.args)
  both = [list(_elements(tree)) for tree in (one, other)]
  if both[0] and len(both[0]) == len(both[1]) and type(one) is type(other):
    return any(map(differ, *both))
  # Relations of the same side, as x = 1 and x = 2.
  if isinstance(one, sympy.Rel) and isinstance(other, sympy.Rel):
    turned = [other, other.reversed]
    same = [tree for tree in turned if type(tree) is type(one) and tree.lhs == one.lhs]
    return bool(same) and all(differ(one.rhs, tree.rhs) for tree in same)
  if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
    return False
  tolerance = DECIMAL if one.has(sympy.Float) or other.has(sympy.Float) else EXACT
  points = POINTS if one.free_symbols or other.free_symbols else POINTS[:1]
  pairs = {(one, other), (without_percent(one), other), (one, without_percent(other))}  # 25 % is 25, and 0.25
  return all(any(_differ_at(*pair, point, tolerance) for point in points) for pair in pairs)


def with_positive_variables(tree: Any) -> Any:
  """Returns the tree with variables known to be positive: there, and only there, sqrt(1/n) is 1/sqrt(n)."""
  import sympy

  return tree.subs({symbol: sympy.Symbol(symbol.name, positive=True) for symbol in tree.free_symbols})


def without_percent(tree: Any) -> Any:
  """Returns x of math-verify's tree for x per cent; any other tree as it is."""
  import sympy

  percent = isinstance(tree, sympy.Mul) and tree.args[1:] == (sympy.UnevaluatedExpr(sympy.Rational(1, 100)),)
  return tree.args[0] if percent else tree


def _elements(tree: Any) -> Any:
  """The elements of a tuple, matrix or interval; nothing of any other tree."""
  import sympy

  if isinstance(tree, sympy.Tuple | sympy.Interval):
    return tree.args[:2] if isinstance(tree, sympy.Interval) else tree.args
  return tree.flat() if isinstance(tree, sympy.MatrixBase) else ()


def _parts(tree: Any) -> Any:
  """Yields the trees of which a tree is made up, those of matrices included."""
  import sympy

  return tree.flat() if isinstance(tree, sympy.MatrixBase) else (tree,)


def _log2(tree: Any) -> float:
  """Bounds |log2| of the magnitude of every number that computing the tree may make; infinite when unbounded."""
  import sympy

  if tree.is_Rational:
    return float(max(abs(int(tree.p)).bit_length(), int(tree.q).bit_length()))
  if tree.is_Float:
    return 1.0 + (abs(math.log2(abs(float(tree)))) if 0.0 < abs(float(tree)) < math.inf else 0.0)
  inner = [_log2(part) for part in tree.args if isinstance(part, sympy.Basic)]
  worst = max(inner, default=2.0)  # a variable is compared near 1, and constants are at most 4
  if worst > MAX_BITS:
    return math.inf
  if isinstance(tree, sympy.Pow | sympy.exp):
    base, exponent = (2.0, inner[-1]) if len(inner) == 1 else inner
    return max(worst, max(base, 1.0) * 2.0**exponent if exponent < 40.0 else math.inf)
  if isinstance(tree, sympy.factorial | sympy.factorial2 | sympy.binomial | sympy.gamma):
    return worst * 2.0**worst if worst < 40.0 else math.inf
  return sum(inner) if isinstance(tree, sympy.Mul | sympy.Add) else worst


def _differ_at(one: Any, other: Any, point: str, tolerance: float) -> bool:
  """Compares the values with the variables near a point; those that are not real at a negative one do not count."""
  import sympy

  # A variable is known by its name: what was assumed of it depends on what else the answer holds.
  names = sorted({symbol.name for symbol in one.free_symbols | other.free_symbols})
  numbers = {name: sympy.Rational(point) * (1 + sympy.Rational(place, 7)) for place, name in enumerate(names)}
  try:
    values = [
      tree.subs({symbol: numbers[symbol.name] for symbol in tree.free_symbols}).doit().evalf(DIGITS)
      for tree in (one, other)
    ]
    if not all(value.is_number and value.is_finite for value in values):
      return False
    if point.startswith("-") and names and not all(value.is_real for value in values):
      return False
    return bool(abs(values[0] - values[1]) > tolerance * max(map(abs, values)))
  except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):
    return False
