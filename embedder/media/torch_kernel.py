"""PyTorch's resize kernel for 8-bit images, called in its C library: the same bits as NumPy, five times as fast.

`import torch` takes seconds and hundreds of MiB in each decoding process; the library with its kernels takes 0.2 s and
60 MiB. It is called through its stable C interface, available since PyTorch 2.10. NumPy does the work if PyTorch is
missing or older, or its kernel gives other bits (it needs AVX2).

Source: PyTorch 2.15, torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h.
"""

import ctypes
import resource
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from embedder.media.arrays import Pixels
from embedder.media.resize import Box, Interpolation, Size

LIBRARY = {"darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
INTERFACE_VERSION = 2 << 56 | 10 << 48  # of the functions below: PyTorch 2.10
ROOM_BYTES = 1 << 30  # of address space; the library takes 430 MiB, and running out while loading kills the process
CPU = 0

SIGNATURES = {
    "aoti_torch_create_tensor_from_blob": (
        [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p]
    ),
    "aoti_torch_get_data_ptr": [c_void_p, c_void_p],
    "aoti_torch_get_strides": [c_void_p, c_void_p],
    "aoti_torch_delete_tensor_object": [c_void_p],
    "aoti_torch_dtype_uint8": [],
    "torch_new_list_reserve_size": [c_size_t, c_void_p],
    "torch_list_push_back": [c_void_p, c_uint64],
    "torch_call_dispatcher": [c_char_p, c_char_p, c_void_p, c_uint64],
}
"""Functions of the C library and the types of their arguments; each returns 0, or another number for an error."""


class TorchKernelError(Exception):
    """The C library reported an error."""


class TorchKernel:
    """Antialiased resize of 8-bit images."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the functions; an AttributeError if the library lacks one."""
        self._library = library
        for name, types in SIGNATURES.items():
            getattr(library, name).argtypes = types
        self._uint8 = library.aoti_torch_dtype_uint8()

    def resize(self, pixels_HWC: Pixels, size: Size, box: Box, interpolation: Interpolation) -> Pixels:
        """Resize contiguous uint8 pixels and return a copy of a box; uint8 (bottom - top, right - left, C).

        `size` is width and height, `box` left, top, right and bottom in pixels of the result. Raises a TorchKernelError
        if the library reports an error.
        """
        lib, (height, width, num_channels) = self._library, pixels_HWC.shape
        image, sides, pointer = c_void_p(), c_void_p(), c_void_p()
        shape_NCHW = (c_int64 * 4)(1, num_channels, height, width)
        strides = (c_int64 * 4)(pixels_HWC.size, 1, width * num_channels, num_channels)
        place = (self._uint8, CPU, 0, byref(image))
        _check(lib.aoti_torch_create_tensor_from_blob(pixels_HWC.ctypes.data, 4, shape_NCHW, strides, 0, *place))
        _check(lib.torch_new_list_reserve_size(2, byref(sides)))
        for side in reversed(size):
            _check(lib.torch_list_push_back(sides, side))
        # input, output_size, align_corners, scales_h, scales_w; the call frees the first two and puts its result there
        stack = (c_uint64 * 5)(image.value or 0, sides.value or 0, False, 0, 0)
        name = f"aten::_upsample_{interpolation}2d_aa".encode()
        _check(lib.torch_call_dispatcher(name, b"", stack, INTERFACE_VERSION))
        resized = c_void_p(stack[0])
        try:
            strides_of = POINTER(c_int64)()
            _check(lib.aoti_torch_get_data_ptr(resized, byref(pointer)))
            _check(lib.aoti_torch_get_strides(resized, byref(strides_of)))
            _, channel, row, column = strides_of[:4]
            num_bytes = num_channels * size[0] * size[1]
            memory = (c_uint8 * num_bytes).from_address(pointer.value or 0)
            view = np.ndarray((size[1], size[0], num_channels), np.uint8, memory, 0, (row, column, channel))
            left, top, right, bottom = box
            return view[top:bottom, left:right].copy("C")
        finally:
            lib.aoti_torch_delete_tensor_object(resized)


def _check(error: int) -> None:
    if error:
        raise TorchKernelError


Resize = Callable[[Pixels, Size, Box, Interpolation], Pixels]


def load_kernel(reference: Resize) -> dict[Interpolation, TorchKernel]:
    """Load PyTorch's C library, and return its kernel for each filter whose bits match the reference."""
    path = _library_path()
    if path is None or not _has_room():
        return {}
    try:
        kernel = TorchKernel(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        return {}
    filters: tuple[Interpolation, ...] = ("bilinear", "bicubic", "lanczos")
    return {name: kernel for name in filters if _is_equal(kernel, reference, name)}


def _is_equal(kernel: TorchKernel, reference: Resize, name: Interpolation) -> bool:
    """Return whether the kernel matches the reference's bits for an image that is reduced, and enlarged."""
    image = np.random.default_rng(0).integers(0, 256, (61, 83, 3), np.uint8)
    try:
        return all(
            np.array_equal(kernel.resize(each, size, (0, 0, *size), name), reference(each, size, (0, 0, *size), name))
            for each in (image, np.ascontiguousarray(image[..., :1]))
            for size in ((29, 17), (70, 97))
        )
    except TorchKernelError:
        return False


def _library_path() -> Path | None:
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(folders[0], "lib", LIBRARY) if folders else None
    return path if path is not None and path.is_file() else None


def _has_room() -> bool:
    """Return whether this process's address space limit leaves room for the library."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return True
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return False
    return limit - pages * resource.getpagesize() >= ROOM_BYTES
