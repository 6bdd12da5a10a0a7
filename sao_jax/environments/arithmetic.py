"""Integer expressions like 3-12*7: drawing, reading and reducing them one operation at a time, without `eval`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

OPERATORS = "+-*"
CALL = re.compile(r"(-?[0-9]{1,12})([+*-])(-?[0-9]{1,12})")  # bounded: a result has at most 24 digits


def draw_question(rng: np.random.Generator, num_operands: int, max_operand: int, operators: str) -> str:
  """Draws a question such as "3-12*7": operands 1..max_operand, each operator equally likely."""
  operands = rng.integers(1, max_operand + 1, size=num_operands).tolist()
  chosen = rng.choice(list(operators), size=num_operands - 1).tolist()
  return str(operands[0]) + "".join(f"{operator}{operand}" for operator, operand in zip(chosen, operands[1:]))


def count_questions(num_operands: int, max_operand: int, operators: str) -> int:
  """Counts the different questions that `draw_question` can draw; `operators` holds each operator once."""
  return max_operand**num_operands * len(operators) ** (num_operands - 1)


def question_at(number: int, num_operands: int, max_operand: int, operators: str) -> str:
  """Returns one question by its number, 0 <= `number` < `count_questions`; every number has a question of its own."""
  number, operand = divmod(number, max_operand)
  question = str(operand + 1)
  for _ in range(num_operands - 1):
    number, operator = divmod(number, len(operators))
    number, operand = divmod(number, max_operand)
    question += f"{operators[operator]}{operand + 1}"
  return question


def parse_question(question: str) -> tuple[list[int], list[str]]:
  """Splits a question of `draw_question` into operands and operators: "3-12*7" -> [3, 12, 7], ["-", "*"]."""
  return [int(number) for number in re.findall(r"[0-9]+", question)], re.findall(r"[+*-]", question)


def apply(left: int, operator: str, right: int) -> int:
  """Computes `left operator right` for an operator of OPERATORS."""
  if operator == "+":
    return left + right
  return left - right if operator == "-" else left * right


def evaluate_call(text: str) -> int | None:
  """Computes one operation on two operands of at most twelve digits; returns None when the text is anything else."""
  match = CALL.fullmatch(text)
  if match is None:
    return None
  left, operator, right = match.groups()
  return apply(int(left), operator, int(right))


def next_operation(operators: Sequence[str]) -> int:
  """Returns the index of the operator to compute first: the leftmost product, or else the leftmost operator."""
  return operators.index("*") if "*" in operators else 0


def reduce(operands: list[int], operators: list[str], index: int, value: int) -> tuple[list[int], list[str]]:
  """Replaces operation `index` and its two operands by its value; returns the shorter expression."""
  return [*operands[:index], value, *operands[index + 2 :]], [*operators[:index], *operators[index + 1 :]]


def solve(question: str) -> int:
  """Computes the question's value, products first, then left to right."""
  operands, operators = parse_question(question)
  while operators:
    index = next_operation(operators)
    value = apply(operands[index], operators[index], operands[index + 1])
    operands, operators = reduce(operands, operators, index, value)
  return operands[0]
