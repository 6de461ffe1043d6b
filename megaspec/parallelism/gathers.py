"""Whole weights out of the shards that ranks update."""

from collections.abc import Callable, Iterable, Sequence

from megaspec.nn.transfer import Side, wait_for
from megaspec.parallelism.bucket import Bucket


class Gathers:
    """Knows where the whole weights of each bucket are there.

    `kept`: everywhere, gathered after each update. Otherwise from `prefetch` or `unshard` to the last `reshard`.
    `overlap`: gathers run beside the computation that does not need them yet.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        side: Side,
        kept: bool,
        overlap: bool,
        on_free: Callable[[Sequence[str]], None] = lambda names: None,
        on_bytes: Callable[[Bucket], None] = lambda bucket: None,
    ):
        """`buckets`: in the order in which they are needed. `on_free` is called with the names of what is freed,
        `on_bytes` with a bucket whose bytes are there in place of its weights."""
        self._on_free = on_free
        self._on_bytes = on_bytes
        self._buckets = buckets
        self._side = side
        self._kept = kept
        self._overlap = overlap

    def renew(self) -> None:
        """The shards have changed."""
        if not self._kept:
            for bucket in self._buckets:
                if bucket.is_gathered:
                    self._free(bucket)
            return
        for bucket in self._buckets:
            self._gather(bucket)
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """What the computation starts from here on finds all weights that are kept."""
        for bucket in self._buckets:
            self._wait(bucket)

    def prefetch(self, buckets: Iterable[Bucket]) -> None:
        """These are needed soon: gathers them beside the computation."""
        if self._overlap:
            for bucket in buckets:
                if not self._kept and not bucket.is_gathered:
                    self._gather(bucket)

    def unshard(self, buckets: Iterable[Bucket], *, exact: bool = False) -> None:
        """What the computation starts from here on finds the whole weights, until `reshard`. `exact`: never bytes."""
        for bucket in buckets:
            if exact and bucket.holds_bytes:
                assert bucket.users == 0, f"{bucket.names} are in use as bytes"
                self._free(bucket)
            if not self._kept and not bucket.is_gathered:
                self._gather(bucket, exact=exact)
            self._wait(bucket)
            if bucket.users == 0 and bucket.holds_bytes:
                self._on_bytes(bucket)
            bucket.users += 1

    def reshard(self, buckets: Iterable[Bucket]) -> None:
        """One user less; behind the last one the shards alone have memory."""
        for bucket in buckets:
            bucket.users -= 1
            if not self._kept and bucket.users == 0:
                self._free(bucket)

    def _gather(self, bucket: Bucket, *, exact: bool = False) -> None:
        if not self._kept:
            # in the order of the computation's stream, which the gather then waits for
            bucket.allocate(exact=exact)
        with self._side.after_now():
            bucket.gather()
        bucket.is_gathered = True
        bucket.gathered = self._side.done()

    def _wait(self, bucket: Bucket) -> None:
        wait_for(bucket.gathered)
        bucket.gathered = None

    def _free(self, bucket: Bucket) -> None:
        # a gather may still write into the memory
        self._wait(bucket)
        self._on_free(bucket.names)
        bucket.free()
        bucket.is_gathered = False
        bucket.users = 0
