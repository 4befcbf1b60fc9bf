"""Functions that treat every element alike: what they cost and what their backward keeps.

What is kept follows PyTorch's derivative formulas (``tools/autograd/derivatives.yaml`` of its source). FLOPs count one
per addition, multiplication, comparison or transcendental function; a function made of several counts each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """An element-wise function.

    Args:
        num_flops: FLOPs per element, forward.
        num_flops_backward: FLOPs per element, backward.
        keeps: What the backward needs: ``"nothing"``, ``"output"``, ``"first"`` (the first input), or ``"inputs"`` (of
            two inputs, each is kept for the other's gradient).
        never_negative: Whether no output is below zero.
    """

    num_flops: int
    num_flops_backward: int
    keeps: str
    never_negative: bool = False


FUNCTIONS: Mapping[str, Function] = {
    "abs": Function(1, 2, "inputs", never_negative=True),
    "add_scalar": Function(1, 0, "nothing"),
    "clamp": Function(2, 2, "inputs"),
    "compare": Function(1, 0, "nothing", never_negative=True),
    "cos": Function(1, 2, "inputs"),
    "divide": Function(1, 4, "inputs"),
    "elu": Function(3, 3, "inputs"),
    "erf": Function(1, 4, "inputs"),
    "exp": Function(1, 1, "output", never_negative=True),
    "gelu": Function(4, 8, "inputs"),
    "hard_sigmoid": Function(4, 2, "inputs", never_negative=True),
    "hard_swish": Function(5, 5, "inputs"),
    "leaky_relu": Function(2, 2, "inputs"),
    "log": Function(1, 1, "inputs"),
    "log1p": Function(2, 2, "inputs"),
    "maximum": Function(1, 2, "inputs"),
    "minimum": Function(1, 2, "inputs"),
    "mish": Function(5, 9, "inputs"),
    "multiply_scalar": Function(1, 1, "nothing"),
    "negative": Function(1, 1, "nothing"),
    "power_scalar": Function(1, 3, "inputs"),
    "prelu": Function(2, 3, "inputs"),
    "reciprocal": Function(1, 3, "output"),
    "relu": Function(1, 1, "output", never_negative=True),
    "relu6": Function(2, 2, "inputs", never_negative=True),
    "rsqrt": Function(2, 4, "output", never_negative=True),
    "select": Function(1, 2, "first"),
    "sigmoid": Function(3, 3, "output", never_negative=True),
    "silu": Function(4, 6, "inputs"),
    "sin": Function(1, 2, "inputs"),
    "softplus": Function(3, 3, "inputs", never_negative=True),
    "sqrt": Function(1, 2, "output", never_negative=True),
    "subtract": Function(1, 1, "nothing"),
    "subtract_from_scalar": Function(1, 1, "nothing"),
    "tanh": Function(1, 3, "output"),
}
"""Function name to what is known of it."""
