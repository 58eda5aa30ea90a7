"""No op of a real graph is unknown: reference models and torch.nn layers, undecomposed and with both decompositions."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
import torch._inductor.lowering  # the decomposition of max pooling looks it up
from torch import nn, rand
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._inductor.decomposition import select_decomp_table
from torch._prims import rng_prims  # registers the wrappers of recomputed random ops

from optpass import models
from optpass.passes.roofline.flops import conventions, known, op_cost

DECOMPOSITIONS: dict[str, Any] = {
    "undecomposed": {},
    "core": core_aten_decompositions(),
    "inductor": select_decomp_table(),
}
aten = torch.ops.aten
IMG, SEQ, VOL = rand(2, 4, 8, 8), rand(2, 6, 8), rand(2, 4, 4, 4, 4)


class Loss(nn.Module):
    """A loss with its target made from the prediction, so that one input suffices."""

    def __init__(self, loss: nn.Module, target: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.loss, self.target, self.layer = loss, target, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.sigmoid(self.layer(x))
        return self.loss(y, self.target(y.detach()))


class Function(nn.Module):
    """A function behind a linear layer, so that gradients flow through it."""

    def __init__(self, fn: Callable[[torch.Tensor], Any], width: int = 8) -> None:
        super().__init__()
        self.fn, self.layer = fn, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self.layer(x))


def _classes(y: torch.Tensor) -> torch.Tensor:
    return y.argmax(1) if y.dim() == 2 else y.argmax(-1)


FLAT = rand(6, 8)
ACTIVATIONS = """ReLU ReLU6 GELU SiLU Mish ELU CELU SELU Sigmoid Tanh Hardswish Hardsigmoid Hardtanh Hardshrink
Softshrink Softplus Softsign LogSigmoid LeakyReLU RReLU Tanhshrink PReLU""".split()

LAYERS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    **{f"{name}": (nn.Sequential(nn.Linear(8, 8), getattr(nn, name)()), (FLAT,)) for name in ACTIVATIONS},
    "GLU": (nn.Sequential(nn.Linear(8, 8), nn.GLU()), (FLAT,)),
    "Conv1d": (nn.Conv1d(6, 5, 3), (SEQ,)),
    "Conv2d": (nn.Conv2d(4, 8, 3, padding=1, groups=2), (IMG,)),
    "Conv2d_reflect": (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
        (IMG,),
    ),
    "Conv2d_circular": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (IMG,)),
    "Conv2d_replicate": (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")),
        (IMG,),
    ),
    "Conv3d": (nn.Conv3d(4, 4, 2), (VOL,)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 4, 3, 2), (IMG,)),
    "BatchNorm2d": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), (IMG,)),
    "InstanceNorm2d": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)), (IMG,)),
    "GroupNorm": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), (IMG,)),
    "LayerNorm": (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (SEQ,)),
    "RMSNorm": (nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), (SEQ,)),
    "LocalResponseNorm": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)), (IMG,)),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (SEQ,)),
    "spectral_norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (SEQ,)),
    **{
        name: (nn.Sequential(nn.Conv2d(4, 4, 1), layer), (IMG,))
        for name, layer in {
            "MaxPool2d": nn.MaxPool2d(3, 2, 1),
            "AvgPool2d": nn.AvgPool2d(3, 2, 1),
            "LPPool2d": nn.LPPool2d(2, 2),
            "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d((3, 5)),
            "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d((3, 5)),
            "FractionalMaxPool2d": nn.FractionalMaxPool2d(2, output_size=3),
            "PixelShuffle": nn.PixelShuffle(2),
            "Upsample_nearest": nn.Upsample(scale_factor=2),
            "Upsample_bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
            "Upsample_bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
            "Unfold": nn.Unfold(3),
            "Softmax2d": nn.Softmax2d(),
            "Dropout2d": nn.Dropout2d(0.3),
            "ZeroPad2d": nn.ZeroPad2d(1),
        }.items()
    },
    "MaxPool1d": (nn.Sequential(nn.Linear(8, 8), nn.MaxPool1d(2)), (SEQ,)),
    "MaxPool3d": (nn.Sequential(nn.Conv3d(4, 4, 1), nn.MaxPool3d(2)), (VOL,)),
    "AvgPool3d": (nn.Sequential(nn.Conv3d(4, 4, 1), nn.AvgPool3d(2)), (VOL,)),
    "AdaptiveAvgPool3d": (nn.Sequential(nn.Conv3d(4, 4, 1), nn.AdaptiveAvgPool3d(3)), (VOL,)),
    "Dropout": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), (SEQ,)),
    "AlphaDropout": (nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3)), (SEQ,)),
    "Embedding": (nn.Embedding(10, 4, padding_idx=0), (torch.randint(0, 10, (3, 5)),)),
    "EmbeddingBag": (nn.EmbeddingBag(10, 4), (torch.randint(0, 10, (3, 5)),)),
    "Bilinear": (nn.Bilinear(8, 8, 3), (FLAT, FLAT)),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2, batch_first=True), (SEQ, SEQ, SEQ)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (SEQ,)),
    "Transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (SEQ, SEQ)),
    "LSTM": (nn.LSTM(8, 5, 2, bidirectional=True, dropout=0.1), (SEQ,)),
    "LSTM_projected": (nn.LSTM(8, 5, proj_size=3), (SEQ,)),
    "GRU": (nn.GRU(8, 5), (SEQ,)),
    "RNN": (nn.RNN(8, 5), (SEQ,)),
    "LSTMCell": (nn.LSTMCell(8, 5), (FLAT,)),
    "GRUCell": (nn.GRUCell(8, 5), (FLAT,)),
    "CosineSimilarity": (Function(lambda y: nn.functional.cosine_similarity(y, y.flip(0))), (FLAT,)),
    "cdist": (Function(lambda y: torch.cdist(y, y + 1)), (FLAT,)),
    "fft": (Function(lambda y: torch.fft.irfft2(torch.fft.rfft2(y) * 2).abs()), (FLAT,)),
    "stft": (
        Function(lambda y: torch.stft(y.flatten(), 16, return_complex=True, window=torch.hann_window(16)).abs()),
        (FLAT,),
    ),
    "sort": (Function(lambda y: y.sort(1).values + y.argsort(0)), (FLAT,)),
    "scatter": (Function(lambda y: torch.zeros(6, 4).scatter_add(1, torch.zeros(6, 8, dtype=torch.long), y)), (FLAT,)),
    "index_put": (Function(lambda y: torch.zeros(9, 8).index_put((torch.arange(6),), y, accumulate=True)), (FLAT,)),
    "einsum": (Function(lambda y: torch.einsum("ij,kj,lj->ikl", y, y, y)), (FLAT,)),
    "linalg": (Function(lambda y: torch.linalg.cholesky(y @ y.mT + torch.eye(6)).logsumexp(0)), (FLAT,)),
    "solve": (Function(lambda y: torch.linalg.solve(y @ y.mT + torch.eye(6), y)), (FLAT,)),
    "svd_qr_eigh": (
        Function(
            lambda y: (
                torch.linalg.svdvals(y).sum()
                + torch.linalg.qr(y.mT).R.sum()
                + torch.linalg.eigh(y @ y.mT).eigenvalues.sum()
            )
        ),
        (FLAT,),
    ),
    "grid_sample": (
        Function(lambda y: nn.functional.grid_sample(y.view(1, 1, 6, 8), torch.rand(1, 4, 4, 2), align_corners=False)),
        (FLAT,),
    ),
    "special": (
        Function(
            lambda y: (
                torch.lgamma(y.abs() + 1)
                + torch.special.i0e(y)
                + torch.erfinv(y.clamp(-0.5, 0.5))
                + torch.logaddexp(y, y)
            )
        ),
        (FLAT,),
    ),
    "norms": (
        Function(lambda y: torch.linalg.vector_norm(y, 3) + y.norm(dim=1) + y.var(1) + y.std(1) + y.prod(1)),
        (FLAT,),
    ),
    "cum": (Function(lambda y: y.cumsum(0) + y.cumprod(1) + y.cummax(0).values + y.logcumsumexp(1)), (FLAT,)),
    "masks": (Function(lambda y: torch.where(y > 0, y.tril(), y.triu()).masked_fill(y > 1, 0).nan_to_num()), (FLAT,)),
    **{
        name: (Loss(loss, target), (FLAT,))
        for name, loss, target in (
            ("MSELoss", nn.MSELoss(), torch.square),
            ("L1Loss", nn.L1Loss(), torch.square),
            ("HuberLoss", nn.HuberLoss(), torch.square),
            ("SmoothL1Loss", nn.SmoothL1Loss(), torch.square),
            ("BCELoss", nn.BCELoss(), torch.square),
            ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss(), torch.square),
            ("KLDivLoss", nn.KLDivLoss(reduction="batchmean"), torch.square),
            ("CrossEntropyLoss", nn.CrossEntropyLoss(label_smoothing=0.1), _classes),
            ("NLLLoss", nn.NLLLoss(), _classes),
            ("SoftMarginLoss", nn.SoftMarginLoss(), torch.sign),
            ("MultiMarginLoss", nn.MultiMarginLoss(), _classes),
            ("PoissonNLLLoss", nn.PoissonNLLLoss(), torch.square),
        )
    },
}


@pytest.mark.by_turns
@pytest.mark.parametrize("table", ["undecomposed", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_no_unknown_ops(name: str, table: str, trace_module: Any) -> None:
    module, inputs = LAYERS[name]
    traced = trace_module(module, *inputs, decompositions=DECOMPOSITIONS[table])
    assert not traced.unknown
    assert traced.flops > 0 or name == "Embedding"


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("table", ["core", "inductor"])
@pytest.mark.parametrize("name", models.names())
def test_models_have_no_unknown_ops(name: str, table: str, trace_module: Any) -> None:
    module, inputs = models.build(name, "tiny")
    traced = trace_module(module, *inputs, decompositions=DECOMPOSITIONS[table])
    assert not traced.unknown
    products = sum(c.flops for kind in ("matmul", "conv", "attention") for c in traced.of(kind))
    assert 0.3 < products / traced.flops < 1


def _overload(qualified: str) -> Any:
    namespace, _, rest = qualified.partition("::")
    base, _, name = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), name or "default")


#: Ops tagged core that have no rule, with the reason. None today.
CORE_EXCEPTIONS: dict[str, str] = {}


def test_every_core_aten_op_is_known() -> None:
    names = [q for q in torch._C._dispatch_get_all_op_names() if q.startswith("aten::")]
    core = [q for q in names if torch.Tag.core in _overload(q).tags]
    assert len(core) > 150, "the tag was not found: this test would pass on nothing"
    assert [q for q in core if not known(_overload(q)) and q not in CORE_EXCEPTIONS] == []


_VERSION = "Dynamo's, of autograd's version counters; registered by `torch._dynamo.tensor_version_op`, gone after AOT"
#: prims that only tests of torch, or its own tracing, make.
PRIMS_EXCEPTIONS = dict.fromkeys(("prims::_tensor_version", "prims::_unsafe_set_version_counter"), _VERSION)


def test_every_prim_is_known() -> None:
    importlib.import_module("torch._dynamo.tensor_version_op")  # other tests may have had it loaded
    names = {q for q in torch._C._dispatch_get_all_op_names() if q.startswith("prims::")}
    assert "prims::inductor_random" in names
    packets = {q.partition(".")[0] for q in names}
    targets = {q: getattr(torch.ops.prims, q.partition("::")[2]) for q in packets}
    assert sorted(q for q, t in targets.items() if not known(t) and q not in PRIMS_EXCEPTIONS) == []


_SPARSE = "a sparse tensor's dense sizes do not tell the work"
#: Ops that Inductor can lower and that have no rule, with the reason.
INDUCTOR_EXCEPTIONS: dict[str, str] = {
    "aten._foobar": "exists to test torch's code generation",
    "aten._histogramdd_bin_edges": "edges come from the data's range; used by torch.histogramdd only",
    "aten._histogramdd_from_bin_cts": "as above",
    "aten._histogramdd_from_bin_tensors": "as above",
    "aten._sparse_coo_tensor_with_dims_and_tensors": _SPARSE,
    "aten._sparse_semi_structured_mm": _SPARSE,
    "aten._to_sparse": _SPARSE,
    "aten.to_sparse": _SPARSE,
}


def test_every_op_inductor_lowers_is_known() -> None:
    """What Inductor leaves undecomposed reaches a lowering or a fallback: no such aten or prims op may be unknown."""
    lowering = torch._inductor.lowering
    targets = {t for t in [*lowering.lowerings, *lowering.fallbacks] if type(t) is type(torch.ops.aten.mm.default)}
    targets = {t for t in targets if t.namespace in ("aten", "prims")}
    assert len(targets) > 300
    unknown = {str(t.overloadpacket) for t in targets if not known(t)}
    assert unknown <= set(INDUCTOR_EXCEPTIONS)


def test_an_unknown_op_is_none_and_not_zero() -> None:
    with torch.library._scoped_library("optpass_flops_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.define("wave(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pointwise,))
        ops = torch.ops.optpass_flops_test
        assert not known(ops.mystery.default)
        assert op_cost(ops.mystery.default, (FLAT,), {}, FLAT) is None
        # tagged pointwise: one operation per element of the result
        cost = op_cost(ops.wave.default, (FLAT, rand(8)), {}, FLAT)
        assert cost is not None and (cost.flops, cost.kind) == (48, "pointwise")
    assert op_cost(lambda x: x, (FLAT,), {}, FLAT) is None
    assert op_cost(torch.ops.higher_order.cond, (), {}, None) is None


def test_targets_of_every_spelling() -> None:
    args, out = (rand(2, 3), rand(3, 4)), rand(2, 4)
    for target in (torch.ops.aten.mm.default, torch.ops.aten.mm):
        cost = op_cost(target, args, {}, out)
        assert cost is not None and cost.flops == 2 * 2 * 3 * 4
    cost = op_cost(operator.getitem, ((out, out), 0), {}, out)
    assert cost is not None and (cost.flops, cost.kind) == (0, "view")
    keywords = {"self": args[0], "mat2": args[1]}
    cost = op_cost(torch.ops.aten.mm.default, (), keywords, out)
    assert cost is not None and cost.flops == 2 * 2 * 3 * 4
    in_place = op_cost(torch.ops.aten.add_.Tensor, (FLAT, FLAT), {"alpha": 2}, FLAT)
    assert in_place is not None and in_place.flops == 2 * 48


def test_plain_records_serve_as_tensors() -> None:
    class Record:
        shape, dtype = (4, 5), torch.float32

    cost = op_cost(torch.ops.aten.mul.Tensor, (Record(), Record()), {}, Record())
    assert cost is not None and cost.flops == 20


def test_recomputation_wrappers_cost_what_they_wrap() -> None:
    assert rng_prims is not None
    hop = torch.ops.higher_order
    out = (FLAT, FLAT > 0)
    dropout = torch.ops.aten.native_dropout.default
    cost = op_cost(hop.run_and_save_rng_state, (dropout, FLAT, 0.1, True), {}, (None, out))
    assert cost is not None and cost.flops == 4 * 48
    cost = op_cost(hop.run_with_rng_state, (None, dropout, FLAT, 0.1, True), {}, out)
    assert cost is not None and cost.flops == 4 * 48
    cost = op_cost(hop.graphsafe_run_with_rng_state, (dropout, FLAT, 0.1, True), {"rng_state": None}, out)
    assert cost is not None and cost.flops == 4 * 48


AGREE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
    "softmax": (lambda x: torch.softmax(x, 1), aten._softmax),
    "log_softmax": (lambda x: torch.log_softmax(x, 1), aten._log_softmax),
    "layer_norm": (lambda x: nn.functional.layer_norm(x, (8,)), aten.native_layer_norm),
    "gelu": (lambda x: nn.functional.gelu(x), aten.gelu),
    "gelu_tanh": (lambda x: nn.functional.gelu(x, approximate="tanh"), aten.gelu),
    "mse_loss": (lambda x: nn.functional.mse_loss(x, x.flip(0)), aten.mse_loss),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.5), aten.addcmul),
}


@pytest.mark.parametrize("name", AGREE)
def test_fused_counts_are_those_of_torchs_decomposition(name: str, trace: Any) -> None:
    """An independent derivation: the op's own decomposition, one level deep, costs what the rule says."""
    fn, packet = AGREE[name]
    fused, decomposed = trace(fn, FLAT), trace(fn, FLAT, decompositions=get_decompositions([packet]))
    assert fused.named(str(packet)) and not decomposed.named(str(packet))
    assert decomposed.flops == fused.flops


def test_optimiser_steps() -> None:
    meta = [torch.empty(s, device="meta") for s in ((10, 4), (7,))]
    n = 47
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False, "maximize": False}
    lists: tuple[Any, ...] = (meta, meta, meta, meta, [], meta)
    # m 3, v 4, sqrt, divide, add, divide, multiply, subtract 6; decay 2
    cost = op_cost(torch.ops.aten._fused_adamw_.default, lists, adam | {"weight_decay": 0.01}, None)
    assert cost is not None and (cost.flops, cost.transcendental) == (15 * n, n)
    cost = op_cost(torch.ops.aten._fused_adamw_.default, lists, adam | {"weight_decay": 0.0}, None)
    assert cost is not None and cost.flops == 13 * n
    cost = op_cost(torch.ops.aten._foreach_addcmul.Scalar, (meta, meta, meta), {"value": 0.5}, meta)
    assert cost is not None and cost.flops == 3 * n
    cost = op_cost(torch.ops.aten._foreach_sqrt_.default, (meta,), {}, None)
    assert cost is not None and (cost.flops, cost.transcendental) == (n, n)


def test_conventions_are_stated_for_every_topic() -> None:
    topics = dict(conventions())
    assert len(topics) >= 20
    assert all(len(text) > 20 for text in topics.values())
    assert "multiply-add is 2" in topics["unit"]
    assert "2.5 times the forward" in topics["attention"]
