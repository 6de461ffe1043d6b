"""Memory that a rank fills from its device and its writer reads: one buffer, used again by every save."""

import errno
import mmap
import os
import tempfile

import torch
from torch import Tensor

from megaspec.core.errors import MegaspecError, MemoryRunOut, WriteError
from megaspec.core.units import bytes_in_words


class SharedBuffer:
    """`n_bytes` of the CPU's memory, shared through `fd`; page-locked for a GPU, so that copies run beside its work.

    It has no name, so nothing is left of it when the processes that map it are gone, however they end. All pages are
    taken when it is made. MemoryRunOut: there are not so many, or the driver does not lock them. WriteError: files may
    not be so large.
    """

    def __init__(self, n_bytes: int, *, device: torch.device):
        self.n_bytes = max(n_bytes, 1)
        self.fd = -1
        try:
            self.fd = _nameless_file(self.n_bytes)
            self._map = mmap.mmap(self.fd, self.n_bytes)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise _not_given(self.n_bytes, error) from None
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        # by several threads: the kernel clears a page when it is first touched
        self.bytes.zero_()
        self._is_locked = device.type == "cuda"
        if self._is_locked:
            self._lock_pages()

    def _lock_pages(self) -> None:
        # 1: cudaHostRegisterPortable, for every context
        code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.n_bytes, 1))
        if code != 0:
            self._is_locked = False
            self.close()
            raise MemoryRunOut(
                f"checkpoint.saving=async: {bytes_in_words(self.n_bytes)} of this machine's memory can't be "
                f"page-locked (cudaHostRegister: error {code}); checkpoint.saving=blocking needs none"
            )

    def part(self, offset: int, like: Tensor) -> Tensor:
        """The bytes from `offset` on as a contiguous tensor of the shape and dtype of `like`."""
        n_bytes = like.numel() * like.element_size()
        return self.bytes[offset : offset + n_bytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Gives the memory back, once nobody holds a part of it."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._is_locked = False
        # the map goes with the last tensor that lies in it
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _not_given(n_bytes: int, error: OSError) -> MegaspecError:
    text = f"checkpoint.saving=async: this machine does not give {bytes_in_words(n_bytes)} of memory: "
    text += os.strerror(error.errno or 0)
    if error.errno == errno.EFBIG:
        # the memory is a file to the kernel, which checkpoints would meet as well
        return WriteError(f"{text}; raise the limit on the size of files (ulimit -f)")
    return MemoryRunOut(f"{text}; checkpoint.saving=blocking needs none")


def _nameless_file(n_bytes: int) -> int:
    """A file of the memory's on Linux; elsewhere one whose name is gone."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("megaspec-checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, n_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
