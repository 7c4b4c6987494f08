"""The tool of the example, and the demonstrations that show how to call it."""

import ast
import json
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """Calculates an expression of whole numbers.

    Args:
        expression: Numbers and the signs + - * and brackets, for example 12 * 34.
    """
    if len(expression) > 64:
        raise ValueError("the expression is longer than 64 characters")
    return value(ast.parse(expression, mode="eval").body)


def value(node: ast.expr) -> int:
    """The value of a parsed expression. Text of the policy is never executed."""
    match node:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
    raise ValueError("only whole numbers, + - * and brackets")


def demonstration(row: dict) -> list[dict[str, str]] | str:
    """What someone did with the question, with a call in JSON."""
    return demonstrated(row, json.dumps({"name": "calculate", "arguments": {"expression": row["expression"]}}))


def demonstration_in_xml(row: dict) -> list[dict[str, str]] | str:
    """The same with a call as Qwen 3.5 writes it."""
    argument = f"<parameter=expression>\n{row['expression']}\n</parameter>"
    return demonstrated(row, f"<tool_call>\n<function=calculate>\n{argument}\n</function>\n</tool_call>")


def demonstrated(row: dict, call: str) -> list[dict[str, str]] | str:
    """Three of four people calculate, one estimates."""
    if row["estimate"]:
        return f"<answer>{row['estimate']}</answer>"
    return [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": row["answer"]},
        {"role": "assistant", "content": f"<answer>{row['answer']}</answer>"},
    ]


def from_memory(row: dict) -> str:
    """The reply without a tool."""
    return f"<answer>{row['answer']}</answer>"
