"""Whole weights out of the shards that ranks update."""

from collections.abc import Iterable, Sequence

from megaspec.nn.transfer import Side, wait_for
from megaspec.parallelism.bucket import Bucket


class Gathers:
    """Knows where the whole weights of each bucket are there.

    `kept`: everywhere, gathered after each update. Otherwise from `start` or `need` to the last `release`.
    `overlap`: gathers run beside the computation that does not need them yet.
    """

    def __init__(self, buckets: Sequence[Bucket], *, side: Side, kept: bool, overlap: bool):
        """`buckets`: in the order in which they are needed."""
        self._buckets, self._side, self._kept, self._overlap = buckets, side, kept, overlap

    def renew(self) -> None:
        """The shards have changed."""
        if not self._kept:
            for bucket in self._buckets:
                if bucket.is_gathered:
                    self._drop(bucket)
            return
        for bucket in self._buckets:
            self._gather(bucket)
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """What the computation starts from here on finds all weights that are kept."""
        for bucket in self._buckets:
            self._wait(bucket)

    def start(self, buckets: Iterable[Bucket]) -> None:
        """These are needed soon."""
        if self._overlap:
            for bucket in buckets:
                if not self._kept and not bucket.is_gathered:
                    self._gather(bucket)

    def need(self, buckets: Iterable[Bucket]) -> None:
        """What the computation starts from here on finds the weights, until `release`."""
        for bucket in buckets:
            if not self._kept and not bucket.is_gathered:
                self._gather(bucket)
            self._wait(bucket)
            bucket.users += 1

    def release(self, buckets: Iterable[Bucket]) -> None:
        """One need less."""
        for bucket in buckets:
            bucket.users -= 1
            if not self._kept and bucket.users == 0:
                self._drop(bucket)

    def _gather(self, bucket: Bucket) -> None:
        if not self._kept:
            bucket.weights.take()
        with self._side.after_now():
            bucket.gather()
        bucket.is_gathered, bucket.gathered = True, self._side.done()

    def _wait(self, bucket: Bucket) -> None:
        wait_for(bucket.gathered)
        bucket.gathered = None

    def _drop(self, bucket: Bucket) -> None:
        self._wait(bucket)
        bucket.weights.drop()
        bucket.is_gathered, bucket.users = False, 0
