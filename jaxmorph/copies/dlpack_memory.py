"""Memory passed to JAX and taken from it by DLPack, without a copy.

`HostTensor` gives JAX memory of another owner; `view_on_device` finds the address of a JAX array.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmorph.copies.backends import PayloadShape

CPU, CUDA_HOST = 1, 3
"""DLPack's kinds of host memory: ordinary, and registered with CUDA."""

_BFLOAT = 4
_CODES = {"i": 0, "u": 1, "f": 2}
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("num_dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [
    ("tensor", _Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]

_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

_exported: dict[int, tuple[Any, ...]] = {}  # what a consumer may still use, by its address


@_Deleter
def _forget(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


class HostTensor:
    """Memory of this process, as an array for `jax.dlpack.from_dlpack`.

    Args:
        memory: uint8; kept as long as a consumer uses it.
        payload: Its contents, from the first byte on.
        kind: `CPU`, or `CUDA_HOST` for registered memory, which JAX takes as memory of the kind
            `pinned_host`.
    """

    def __init__(
        self, memory: np.ndarray, payload: PayloadShape, kind: int = CPU, number: int = 0
    ) -> None:
        self._memory, self._payload = memory, payload
        self._device = (kind, number)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        dtype, shape = np.dtype(self._payload.dtype), self._payload.shape
        code = _BFLOAT if dtype.name == "bfloat16" else _CODES[dtype.kind]
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        managed = _Managed()
        managed.tensor = _Tensor(
            self._memory.ctypes.data,
            _Device(*self._device),
            len(shape),
            _DataType(code, 8 * dtype.itemsize, 1),
            sizes,
        )
        managed.deleter = _forget
        address = ctypes.addressof(managed)
        _exported[address] = (managed, sizes, self._memory)
        return _capsule_new(address, _NAME, None)


def view_on_device(value: jax.Array, stream: int | None) -> tuple[int, Any]:
    """The address of an array's first element on its device, and what keeps its memory from reuse.

    Args:
        value: On one device; its computation may still be running.
        stream: Made to wait for the array's computation; None: JAX may block for that.

    Raises:
        BufferError: If it is on several devices.
        ValueError: If its elements are not in row-major order.
    """
    array: Any = value  # JAX's stubs lack the argument
    capsule = array.__dlpack__(stream=stream)
    return _address(capsule), (capsule, value)


def _address(capsule: Any) -> int:
    tensor = _Managed.from_address(_capsule_pointer(capsule, _NAME)).tensor
    if tensor.strides and not _in_order(tensor):
        raise ValueError("got an array whose elements lie in another order, expected row-major")
    return (tensor.data or 0) + tensor.byte_offset


def _in_order(tensor: _Tensor) -> bool:
    shape: Sequence[int] = tensor.shape[: tensor.num_dimensions]
    strides = tensor.strides[: tensor.num_dimensions]
    behind = (math.prod(shape[at + 1 :]) for at in range(len(shape)))
    dense = zip(shape, strides, behind, strict=True)
    return all(size == 1 or stride == due for size, stride, due in dense)
