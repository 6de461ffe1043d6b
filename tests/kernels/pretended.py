"""A GPU that is not there, for Triton."""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Hopper:
    """What Triton asks its driver for before it compiles a kernel or launches one."""

    number: int = 0
    """Of the device, under which Triton keeps what it has compiled: users of the same process differ in it."""

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
