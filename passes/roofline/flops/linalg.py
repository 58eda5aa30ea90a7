"""Factorisations and solvers, by the leading-order counts of the literature (complex: 4 times).

LAPACK Working Note 41 (Blackford and Dongarra), appendix C: Cholesky n^3/3; LU mn^2 - n^3/3 (m >= n); QR
2mn^2 - 2n^3/3; forming Q 4mnk - 2(m + n)k^2 + 4k^3/3; triangular solve n^2 per right side; inverse from LU
4n^3/3. Golub and Van Loan, Matrix Computations (3rd ed.), 5.4.5 (R-SVD), 7.5.6, 8.3: SVD values 2mn^2 + 2n^3,
thin 6mn^2 + 20n^3, full 4m^2 n + 22n^3; symmetric eigenvalues 4n^3/3, with vectors 9n^3; general 10n^3 and
25n^3. Not here: products (matmul.py).
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from optpass.passes.roofline.flops.cost import OpCost
from optpass.passes.roofline.flops.registry import Call, register
from optpass.passes.roofline.flops.shapes import first_numel, mac_factor, numel, shape


def _sizes(a: Any) -> tuple[int, int, int]:
    """(batch, rows, columns)."""
    sizes = shape(a)
    return prod(sizes[:-2]), sizes[-2], sizes[-1]


def _cost(a: Any, flops: Fraction | int, batch: int) -> OpCost:
    total = flops * batch * mac_factor(a)
    whole = Fraction(total)
    return OpCost(int(whole) if whole.denominator == 1 else float(whole), "other")


def lu(m: int, n: int) -> Fraction:
    a, b = max(m, n), min(m, n)
    return a * b * b - Fraction(b**3, 3)


def qr(m: int, n: int) -> Fraction:
    a, b = max(m, n), min(m, n)
    return 2 * a * b * b - Fraction(2 * b**3, 3)


def form_q(m: int, n: int, k: int) -> Fraction:
    """An m x n Q from k reflectors."""
    return 4 * m * n * k - 2 * (m + n) * k * k + Fraction(4 * k**3, 3)


@register("linalg_cholesky", "linalg_cholesky_ex", "cholesky")
def _cholesky(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), Fraction(n**3, 3), batch)


@register("linalg_ldl_factor", "linalg_ldl_factor_ex")
def _ldl(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), Fraction(n**3, 3), batch)


@register("linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info")
def _lu(c: Call) -> OpCost:
    batch, m, n = _sizes(c.at(0))
    return _cost(c.at(0), lu(m, n), batch)


@register("linalg_det", "_linalg_det", "linalg_slogdet", "_linalg_slogdet", "det", "slogdet", "logdet")
def _det(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    logs = 0 if c.base in ("linalg_det", "_linalg_det", "det") else n  # log |u_ii| before the sum
    return _cost(c.at(0), lu(n, n) + n + logs, batch)


@register("lu_unpack")
def _lu_unpack(c: Call) -> OpCost:
    return OpCost(0, "copy")


@register("linalg_qr", "qr", "geqrf")
def _qr(c: Call) -> OpCost:
    batch, m, n = _sizes(c.at(0))
    mode = c.arg("mode", "reduced")
    k = min(m, n)
    if c.base == "geqrf" or mode == "r":
        return _cost(c.at(0), qr(m, n), batch)
    return _cost(c.at(0), qr(m, n) + form_q(m, m if mode == "complete" else k, k), batch)


@register("linalg_householder_product", "orgqr")
def _householder(c: Call) -> OpCost:
    batch, m, n = _sizes(c.at(0))
    return _cost(c.at(0), form_q(m, n, shape(c.at(1))[-1]), batch)


@register("ormqr")
def _ormqr(c: Call) -> OpCost:
    # Applying k reflectors of length m to n columns: 4mnk - 2nk^2.
    batch, m, n = _sizes(c.at(2))
    if not c.arg("left", True):
        m, n = n, m
    k = shape(c.at(1))[-1]
    return _cost(c.at(0), 4 * m * n * k - 2 * n * k * k, batch)


def _solve_sides(c: Call, b: Any, n: int) -> int:
    """Right-hand sides in all: elements of the solution over n."""
    return (first_numel(c.out) or numel(b)) // max(n, 1)


@register("linalg_solve_triangular", "triangular_solve")
def _triangular(c: Call) -> OpCost:
    # torch.triangular_solve takes (b, A), linalg_solve_triangular (A, B).
    a, b = (c.at(0), c.at(1)) if c.base == "linalg_solve_triangular" else (c.at(1), c.at(0))
    n = shape(a)[-1]
    return _cost(a, n * n * _solve_sides(c, b, n), 1)


@register("linalg_lu_solve", "lu_solve", "cholesky_solve", "_cholesky_solve_helper", "linalg_ldl_solve")
def _factored_solve(c: Call) -> OpCost:
    # Two triangular solves.
    a = c.at(0) if c.base in ("linalg_lu_solve", "linalg_ldl_solve") else c.at(1)
    n = shape(a)[-1]
    return _cost(a, 2 * n * n * _solve_sides(c, c.at(0), n), 1)


@register("linalg_solve", "linalg_solve_ex", "_linalg_solve_ex")
def _solve(c: Call) -> OpCost:
    a, b = c.at(0), c.at(1)
    batch, n, _ = _sizes(a)
    return _cost(a, lu(n, n) * batch + 2 * n * n * _solve_sides(c, b, n), 1)


@register("linalg_inv", "linalg_inv_ex", "inverse")
def _inverse(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), 2 * n**3, batch)  # LU 2/3, then 4/3


@register("cholesky_inverse")
def _cholesky_inverse(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), Fraction(2 * n**3, 3), batch)


@register("linalg_lstsq")
def _lstsq(c: Call) -> OpCost:
    # QR, Q^T b, back substitution.
    batch, m, n = _sizes(c.at(0))
    b = shape(c.at(1))
    sides = b[-1] if len(b) >= 2 and len(b) == len(shape(c.at(0))) else 1
    k = min(m, n)
    per_side = 4 * m * k - 2 * k * k + k * k
    return _cost(c.at(0), qr(m, n) + per_side * sides, batch)


@register("linalg_svd", "_linalg_svd", "linalg_svdvals", "svd", "prims::svd")
def _svd(c: Call) -> OpCost:
    batch, rows, columns = _sizes(c.at(0))
    m, n = max(rows, columns), min(rows, columns)
    if c.base == "linalg_svdvals" or not c.arg("compute_uv", True):
        return _cost(c.at(0), 2 * m * n * n + 2 * n**3, batch)
    full = c.arg("full_matrices", False) or (c.base == "svd" and c.name.startswith("aten") and not c.arg("some", True))
    return _cost(c.at(0), 4 * m * m * n + 22 * n**3 if full else 6 * m * n * n + 20 * n**3, batch)


@register("linalg_pinv")
def _pinv(c: Call) -> OpCost:
    """Thin SVD, singular values inverted (a compare and a quotient) and scaled into V, then V U^T: 2mnk."""
    batch, rows, columns = _sizes(c.at(0))
    m, n = max(rows, columns), min(rows, columns)
    return _cost(c.at(0), 6 * m * n * n + 20 * n**3 + 2 * n + n * columns + 2 * m * n * n, batch)


@register("linalg_eigh", "_linalg_eigh", "linalg_eigvalsh")
def _eigh(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    vectors = c.base != "linalg_eigvalsh" and c.arg("compute_v", True)
    return _cost(c.at(0), 9 * n**3 if vectors else Fraction(4 * n**3, 3), batch)


@register("linalg_eig", "linalg_eigvals", "_linalg_eigvals")
def _eig(c: Call) -> OpCost:
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), (25 if c.base == "linalg_eig" else 10) * n**3, batch)


@register("linalg_matrix_exp", "matrix_exp")
def _matrix_exp(c: Call) -> OpCost:
    """Degree-18 Taylor polynomial in 5 products (Bader, Blanes and Casas 2019); squarings depend on the norm:
    not counted.
    """
    batch, n, _ = _sizes(c.at(0))
    return _cost(c.at(0), 5 * 2 * n**3, batch)


@register("_compute_linear_combination")
def _linear_combination(c: Call) -> OpCost:
    terms = shape(c.at(1))[-1]
    return OpCost(2 * terms * numel(c.out), "other")
