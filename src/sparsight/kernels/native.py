"""The kernels in C++, checked and called. The same operations as reference.py, on the same plans.

Tensors cross as addresses (a tenth of the cost of a buffer object), so everything is checked here, once.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch  # before the extension, which then shares torch's OpenMP runtime
from torch import Tensor

_native: Any
try:
    from sparsight.kernels import _native  # type: ignore[attr-defined,no-redef]
except ImportError as error:  # installed without a compiler, or built for another machine
    _native, _WHY = None, str(error)
else:
    _WHY = ""
    _native.isa()  # an unknown SPARSIGHT_ISA is an error here, before anything was computed

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "neon")
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
Pair = tuple[int, int]
Kind = Literal["linear", "unfolded", "direct"]
_KINDS = get_args(Kind)  # in the order of the enumeration in plan.h


def available() -> bool:
    """Whether the native kernels were built."""
    return _native is not None


def why_unavailable() -> str:
    """What went wrong where they are not available."""
    return _WHY


def isa() -> str:
    """The instruction set in use: portable, avx2, avx512 or neon; none without native kernels."""
    return "none" if _native is None else str(_native.isa())


def isa_available(name: str) -> bool:
    """Whether this machine, and this build, can run the kernels for an instruction set."""
    return _native is not None and bool(_native.isa_available(name))


def isa_force(name: str) -> None:
    """Run the kernels of another instruction set, for tests (SPARSIGHT_ISA does the same at start)."""
    if not isa_available(name) or not _native.isa_force(name):
        raise ValueError(f"the instruction set {name!r} is not available; running {isa()}")


class Plan:
    """What the kernels want to know about a topology; make a new one after each rewiring.

    crow [rows + 1] and col [entries] are int32 CSR over (outputs / block, inputs), columns increasing in each
    row. With block = 4 or 8 an entry stands for that many neighbouring outputs, and its values lie together:
    values[entry · block + i] is the weight from input col[entry] to output row · block + i. For a convolution
    inputs = channels · taps, where taps = height · width of the kernel, and `kind` says which way it goes:
    "direct" for a stride of 1 without row blocks, which is faster, "unfolded" for all others. `panel` is for
    tests: how many inputs (or outputs) a panel has, 0 to choose.
    """

    __slots__ = ("__weakref__", "block", "inputs", "kind", "native", "outputs", "taps", "weights")

    def __init__(
        self,
        crow: Tensor,
        col: Tensor,
        shape: Pair,
        block: int = 1,
        *,
        kind: Kind = "linear",
        taps: int = 1,
        panel: int = 0,
    ) -> None:
        self.outputs, self.inputs = shape
        self.block, self.kind, self.taps = block, kind, taps
        if block not in (1, 4, 8) or self.outputs % block:
            raise ValueError(f"block must be 1, 4 or 8 and divide {self.outputs} outputs, got {block}")
        if taps < 1 or self.inputs % taps:
            raise ValueError(f"{self.inputs} inputs do not divide into kernels of {taps} taps")
        if kind == "direct" and block > 1:
            raise ValueError(f"a direct convolution has no row blocks, got blocks of {block}")
        rows = self.outputs // block
        _check_index(crow, col, rows)
        self.weights = col.numel() * block
        self.native = _native.Plan(
            rows,
            self.inputs,
            col.numel(),
            crow.data_ptr(),
            col.data_ptr(),
            block,
            taps,
            _KINDS.index(kind),
            panel,
        )

    @property
    def bytes(self) -> int:
        """Memory the plan holds beside crow and col."""
        return int(self.native.bytes)


def linear(plan: Plan, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ (+ bias) for x [batch, inputs]."""
    batch = x.shape[0]
    if not (_fits(x, batch, plan.inputs, values) and _are(values, plan.weights)):
        check("values", values, (plan.weights,), values)
        check("x", x, (batch, plan.inputs), values)
    if bias is not None and not (_are(bias, plan.outputs) and bias.dtype == values.dtype):
        check("bias", bias, (plan.outputs,), values)
    run = _native.forward_f32 if values.dtype == torch.float32 else entry("forward", values.dtype)
    y = torch.empty((batch, plan.outputs), dtype=values.dtype)
    shift = 0 if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    run(plan.native, x.data_ptr(), batch, values.data_ptr(), shift, y.data_ptr(), threads)
    return y


def linear_backward(
    plan: Plan, dy: Tensor, x: Tensor, values: Tensor, *, need_x: bool = True, need_bias: bool = True
) -> Grads:
    """(dx, dvalues, dbias) of linear; None where not needed."""
    batch = dy.shape[0]
    if not (
        _fits(dy, batch, plan.outputs, values)
        and _fits(x, batch, plan.inputs, values)
        and _are(values, plan.weights)
    ):
        check("dy", dy, (batch, plan.outputs), values)
        check("x", x, (batch, plan.inputs), values)
        check("values", values, (plan.weights,), values)
    run = _native.backward_f32 if values.dtype == torch.float32 else entry("backward", values.dtype)
    dx = torch.empty_like(x) if need_x else None
    dvalues = torch.empty_like(values)
    dbias = torch.empty(plan.outputs, dtype=values.dtype) if need_bias else None
    run(
        plan.native,
        dy.data_ptr(),
        x.data_ptr(),
        batch,
        values.data_ptr(),
        0 if dx is None else dx.data_ptr(),
        dvalues.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        torch.get_num_threads(),
    )
    return dx, dvalues, dbias


def conv2d(
    plan: Plan,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """Convolution of x [batch, channels, height, width]; the plan's index is (out, channels · taps)."""
    run = entry("conv_forward", values.dtype)
    shape = _conv_shape(plan, x, kernel, stride, padding, dilation)
    check("x", x, tuple(x.shape), values)
    check("values", values, (plan.weights,), values)
    if bias is not None:
        check("bias", bias, (plan.outputs,), values)
    y = x.new_empty((x.shape[0], plan.outputs, *shape[-2:]))
    run(plan.native, shape, at(x), at(values), at(bias), at(y), torch.get_num_threads())
    return y


def conv2d_backward(
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    need_x: bool = True,
    need_bias: bool = True,
) -> Grads:
    """(dx, dvalues, dbias) of conv2d; None where not needed."""
    run = entry("conv_backward", values.dtype)
    shape = _conv_shape(plan, x, kernel, stride, padding, dilation)
    check("x", x, tuple(x.shape), values)
    check("values", values, (plan.weights,), values)
    check("dy", dy, (x.shape[0], plan.outputs, shape[-2], shape[-1]), values)
    dx = torch.empty_like(x) if need_x else None
    dvalues = torch.empty_like(values)
    run(plan.native, shape, at(dy), at(x), at(values), at(dx), at(dvalues), torch.get_num_threads())
    return dx, dvalues, dy.sum((0, 2, 3)) if need_bias else None


def library() -> Any:
    """The extension itself."""
    return _native


def at(tensor: Tensor | None) -> int:
    """The address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def entry(name: str, dtype: torch.dtype) -> Any:
    """The function of the extension for a type."""
    if dtype == torch.float32:
        return getattr(_native, f"{name}_f32")
    if dtype == torch.float64:
        return getattr(_native, f"{name}_f64")
    raise ValueError(f"values must be float32 or float64, got {dtype}")


# The two questions of every call, asked in the cheapest way; `check` then says what is wrong.


def _fits(matrix: Tensor, rows: int, columns: int, like: Tensor) -> bool:
    return (
        matrix.dim() == 2
        and matrix.size(1) == columns
        and matrix.size(0) == rows
        and matrix.dtype == like.dtype
        and matrix.is_cpu
        and matrix.is_contiguous()
    )


def _are(vector: Tensor, count: int) -> bool:
    return vector.dim() == 1 and vector.numel() == count and vector.is_cpu and vector.is_contiguous()


def check(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse what a kernel could not read."""
    if (
        tensor.shape != shape
        or tensor.dtype != like.dtype
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be contiguous {like.dtype} of shape {shape} on the CPU, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _check_index(crow: Tensor, col: Tensor, rows: int) -> None:
    for name, index in (("crow", crow), ("col", col)):
        if (
            index.dtype != torch.int32
            or index.device.type != "cpu"
            or index.dim() != 1
            or not index.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be a contiguous int32 vector on the CPU, got {index.dtype} of shape "
                f"{tuple(index.shape)} on {index.device}"
            )
    if crow.numel() != rows + 1:
        raise ValueError(f"crow must have {rows + 1} entries for {rows} rows, got {crow.numel()}")


def _conv_shape(
    plan: Plan, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> list[int]:
    if plan.kind == "linear":
        raise ValueError("this plan is for a linear layer, not for a convolution")
    batch, channels, height, width = x.shape
    taps = kernel[0] * kernel[1]
    if channels * taps != plan.inputs or taps != plan.taps:
        raise ValueError(
            f"{channels} channels under a {kernel[0]}×{kernel[1]} kernel do not fit a plan of "
            f"{plan.inputs} inputs and {plan.taps} taps"
        )
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise ValueError(f"stride {stride}, padding {padding}, dilation {dilation} are not possible")
    if plan.kind == "direct" and stride != (1, 1):
        raise ValueError(f"a plan for a direct convolution has a stride of 1, got {stride}")
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip((height, width), kernel, stride, padding, dilation, strict=True)
    ]
    if min(out) < 1:
        raise ValueError(
            f"a kernel of {kernel}, dilated by {dilation}, is larger than the padded input {(height, width)}"
        )
    return [batch, channels, height, width, *kernel, *stride, *padding, *dilation, *out]
