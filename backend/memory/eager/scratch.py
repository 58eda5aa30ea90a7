"""Workspaces of the operators that eager nodes call in their backward, and of convolutions in the forward of these.

What only the library tells is asked when the backward is over: to ask is to run the operator, and by then what it read
is released.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from optpass.backend.memory.probe import Described, workspace_of
from optpass.passes.memory.workspace.asked import is_library
from optpass.passes.memory.workspace.call import Call
from optpass.passes.memory.workspace.workspace import op_workspace

log = logging.getLogger(__name__)

#: Of the arguments of a convolution's backward, those of its forward.
_FORWARD = ("input", "weight", "stride", "padding", "dilation", "transposed", "output_padding", "groups")


@dataclass
class Scratch:
    """Of the operators of one node.

    Attributes:
        asked: what only the library knows of: bytes that there were beside each, and its description.
    """

    asked: list[tuple[int, Described]] = field(default_factory=list)

    def of(self, target: Any, args: Any, kwargs: Any, result: Any, beside: int) -> int:
        """Bytes that an operator allocates inside itself; 0 for now of what is asked later."""
        try:
            call = Call.of(target, args, kwargs, result)
            if call is None or not is_library(call):
                return op_workspace(target, args, kwargs, result)
            described = Described.of(call) if all(t.device.type == "cpu" for _, t in call.tensors()) else None
        except Exception as error:  # noqa: BLE001  # this runs in the user's backward, which no formula may end
            log.debug("the workspace of %s is not known: %s", target, error)
            return 0
        if described is not None:
            self.asked.append((beside, described))
        return 0


def workspace(call: Described) -> int:
    """Bytes; 0 where the library cannot be asked."""
    return workspace_of(call) or 0


def forward_workspace(call: Described) -> int:
    """Of the convolution that a call is the backward of; 0 of any other."""
    if call.target is not torch.ops.aten.convolution_backward.default:
        return 0
    given = dict(call.arguments)
    arguments = (("bias", None), *((name, given[name]) for name in _FORWARD))
    return workspace(Described(torch.ops.aten.convolution.default, arguments))
