"""What operators of a loss outside of the graph allocate inside their backward, where that decides the peak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, OUTPUTS = 128, 32, 128


def ranked(outputs, target, number):
    """A quotient with two gradients, of outputs over their norms."""
    one, near, far = (F.normalize(part) for part in outputs.chunk(3))
    return F.triplet_margin_loss(one, near, far) + 0 * number


def scaled(outputs, target, number):
    """A gradient that is added up from one as large as the outputs, of a number."""
    return F.binary_cross_entropy_with_logits(outputs * number, target)


def shifted(outputs, target, number):
    return F.softplus(outputs - number).mean()


def weighed(outputs, target, number):
    """Positives that weigh otherwise."""
    return F.binary_cross_entropy_with_logits(outputs * number, target, pos_weight=target[0])


def cumulated(outputs, target, number):
    return -(0.5 * (1 + torch.erf(outputs))).clamp(min=1e-6).log().mean() * number


def alike(outputs, target, number):
    """Gradients that are added up in place."""
    return F.cosine_embedding_loss(outputs, target, torch.ones(len(outputs))) * number


def contrasted(outputs, target, number):
    """Both operands of a product are the same; each sum of gradients waits for its node."""
    one = F.normalize(outputs)
    return F.cross_entropy((one @ one.t() / 0.5).masked_fill(torch.eye(len(one), dtype=torch.bool), -1e9) * number,
                           torch.arange(len(one)))  # fmt: skip


def smoothed(outputs, target, number):
    """Outputs that are released before the loss needs most."""
    across = (outputs[1:] - outputs[:-1]).abs().mean() + (outputs[:, 1:] - outputs[:, :-1]).abs().mean()
    return across * number + F.mse_loss(outputs, target)


def separated(outputs, target, number):
    """An operator that is in no list."""
    return F.multi_margin_loss(outputs, target[:, 0].long()) * number


def blended(outputs, target, number):
    return torch.lerp(outputs, target, outputs.sigmoid()).abs().mean() * number


def distilled(outputs, target, number):
    """A tensor without gradients that is made for one operator of the forward, and saved by none."""
    return F.kl_div(outputs.log_softmax(-1), target.softmax(-1), reduction="batchmean") * number


def distilled_logs(outputs, target, number):
    """The same of logarithms."""
    target = target.log_softmax(-1)
    return F.kl_div(outputs.log_softmax(-1), target, reduction="batchmean", log_target=True) * number


def masked(outputs, target, number):
    """It is no such difference that a mask of the caller's is taken of."""
    return (target * (target - outputs)).sum() * number


def softened(outputs, target, number):
    """What is given to a loss is there as long as that runs, and saved by none of its operators."""
    return F.cross_entropy(outputs / 2, target.softmax(-1)) * number


def structural(outputs, target, number):
    """Convolutions, of whose workspaces only the library knows, and whose forward's is most."""
    window = torch.ones(1, 1, 5, 5)
    near, far = (F.conv2d(part.view(6, 1, 64, OUTPUTS), window) for part in (outputs, target))
    return F.l1_loss(near, far) * number


def spectral(outputs, target, number):
    """Complex numbers, of which a copy is made for the transform."""
    near, far = (torch.fft.fft2(part.view(6, 64, OUTPUTS)).abs() for part in (outputs, target))
    return (near - far).pow(2).mean() * number


def repeated(outputs, target, number):
    """A mean that is held in a storage as large as what it is of, and made beside one more."""
    return F.mse_loss(outputs.repeat(2, 1) * number, torch.cat([target, target]))


def shared(outputs, target, number):
    """A parameter of the loss whose gradient is added up."""
    return (outputs * number + (outputs * number).tanh() + (outputs * number).exp()).mean()


def checkpointed(outputs, target, number):
    """What a checkpoint makes again in the backward."""
    return checkpoint(lambda x: x.sin().exp().cos().square().mean(), outputs * number, use_reentrant=False)


LOSSES = [ranked, scaled, shifted, weighed, cumulated, alike, contrasted, smoothed, separated, blended, distilled,
          distilled_logs, masked, softened, structural, spectral, repeated, shared,
          checkpointed]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_inside_is_counted(loss, steps):
    def program(call):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, OUTPUTS))
        number = nn.ParameterList([nn.Parameter(torch.ones(()))])
        compiled, given, target = call(model), torch.randn(3 * ROWS, WIDTH), torch.rand(3 * ROWS, OUTPUTS)

        def step():
            held = target  # as a program holds it that reads a batch
            loss(compiled(given), held, number[0]).backward()
            found = [p.grad for p in (*model.parameters(), *number)]
            model.zero_grad()
            number.zero_grad()
            return found

        return step, (model, number), (given, target)

    peak, _, predicted, _ = steps.measured(program, 10**10)
    assert abs(predicted - peak) <= 0.005 * peak
