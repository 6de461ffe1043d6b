"""Programmatic dependent launch (CUDA's name for it; from Hopper on): a kernel that reads what the one before it on
its stream writes is launched while that one still runs, and waits for it on the GPU.

A kernel lets the next one begin (`let_next_begin`), which happens once all of its programs have said so or ended. The
next one is launched with `launch_pdl=True`, and waits (`wait_for_kernel_before`) until all kernels before it have ended
and what they wrote can be read: all of them, since each kernel that was launched so itself has waited before it ended.
Ahead of that it may compute, and read what a kernel wrote that had ended before the one that it follows began; anything
else would be a race. Of two short kernels that hides a launch and the time in which the last programs of the first one
leave most of the GPU idle.

What ended before is known where a kernel in the row was launched in the ordinary way: it begins when all before it have
ended. Kernels of others that are launched so wait before they read, too. tests/kernels/test_compiled_for_hopper.py
looks for races in what is compiled.
"""

from functools import cache

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks kernels of Triton there
    triton = None

if triton is not None:
    INTERPRETED = triton.knobs.runtime.interpret

    @triton.jit
    def let_next_begin(overlaps: tl.constexpr):
        if overlaps:
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def wait_for_kernel_before(overlaps: tl.constexpr):
        if overlaps:
            tl.extra.cuda.gdc_wait()


def has_dependent_launch() -> bool:
    """Whether the device that is current has it."""
    if INTERPRETED:
        return False
    driver = triton.runtime.driver.active
    return _has_it(driver.get_current_device())


def following(follows: bool = True) -> dict[str, bool]:
    """What a kernel that may follow another is launched with: that it waits, and that it is launched early. `follows`:
    whether it does so in this launch."""
    early = follows and has_dependent_launch()
    return {"overlaps": early, "launch_pdl": early}


@cache
def _has_it(device: int) -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90
