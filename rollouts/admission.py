"""Admission decides which groups may be requested, and which of them make the next batch, so that none gets too old.

Staleness is bounded before anything is generated, not by discarding what arrives too late.

Let k be `max_staleness` and B `batch_groups`. A group that is submitted at version v has the deadline v + k: its tokens
are of version v or later, so this is the last version at which they are at most k old. Batches of B groups are taken at
versions V, V+1, ... The outstanding groups are those that were submitted and neither trained on nor cancelled. Sorted
by deadline and counted from 0, all of them can be trained on in time if and only if

    (1)   the n-th has a deadline of at least V + n // B,

because it is in the batch of V + n // B when batches are taken in that order, and no order takes it sooner without
making one before it wait. Three rules keep (1) true for ever, where V is the version of the next batch:

- Submitting a group: at version v the newest group is the last, with deadline v + k. (1) requires n // B <= v + k - V,
so at
  most (v + k - V + 1) * B groups may be outstanding: (k+1)B while a batch is awaited, and kB while one is trained on (V
  is already v + 1 then). `over_issue` lowers that bound, but never below the B that fill a batch.
- Taking a batch at V: the groups that stay must satisfy (1) for V + 1. If every group is finished, the B with the
earliest
  deadlines can be taken, since each of the others moves B places forward. Otherwise the batch waits for those that may
  not stay. Taking one group more moves all behind it forward, so if any batch of finished groups is allowed, the
  largest is.
- Cancelling a group (because it was filtered) only moves others forward.

Hence no group is trained on too late, and none is discarded. There is no deadlock: when all running groups finish, and
as many groups as there is room for are submitted and finish, there are at least B, and taking the first B is allowed.
With k = 0 this is the plain synchronous loop: B groups are submitted, none is submitted while they are trained on, and
they are taken together.
"""

from __future__ import annotations

from configs.blocks.schedule import Schedule


class Admission:
    """Keep account of groups by their ids. Versions never fall. A call costs O(outstanding groups) at most."""

    def __init__(self, batch_groups: int, max_staleness: int, over_issue: float | None = None) -> None:
        """Limit the groups submitted beyond a batch to `over_issue` batches, or `max_staleness` batches with None."""
        assert batch_groups >= 1 and max_staleness >= 0 and (over_issue is None or over_issue >= 0)
        self.batch_groups, self.max_staleness = batch_groups, max_staleness
        beyond = max_staleness if over_issue is None else min(over_issue, max_staleness)
        self.most_outstanding = batch_groups + round(beyond * batch_groups)
        # The order is that of submission, which is also that of deadlines, because versions never fall.
        self._deadlines: dict[str, int] = {}
        self._finished: set[str] = set()
        self._next_version = 0  # the version at which the next batch is trained on

    @classmethod
    def of(cls, schedule: Schedule, prompts_per_step: int) -> Admission:
        """Return the admission of a configured job. Groups from the replay buffer do not count in its batches."""
        fresh = prompts_per_step - schedule.replayed_groups(prompts_per_step)
        return cls(fresh, schedule.staleness, schedule.over_issue)

    @property
    def outstanding(self) -> int:
        """Return the number of groups that were submitted and neither taken nor cancelled."""
        return len(self._deadlines)

    @property
    def ready(self) -> int:
        """Return the number of groups that are finished and not yet taken."""
        return len(self._finished)

    @property
    def running(self) -> int:
        """Return the number of groups that were submitted and are not finished."""
        return self.outstanding - self.ready

    def room(self, version: int) -> int:
        """Return how many groups may be submitted now to engines that hold `version`."""
        batches_left = version + self.max_staleness - max(self._next_version, version) + 1
        return max(0, min(self.most_outstanding, batches_left * self.batch_groups) - self.outstanding)

    def submitted(self, group_id: str, version: int) -> None:
        """Note that a group was submitted to engines that hold `version`."""
        deadline = version + self.max_staleness
        assert group_id not in self._deadlines, f"group {group_id} is submitted twice"
        assert self.room(version) > 0, f"there is no room for group {group_id} at version {version}"
        assert deadline >= next(reversed(self._deadlines.values()), deadline), "versions fell"
        self._deadlines[group_id] = deadline

    def finished(self, group_id: str) -> None:
        """Note that all responses of a group have arrived."""
        assert group_id in self._deadlines and group_id not in self._finished, f"group {group_id} is not running"
        self._finished.add(group_id)

    def cancelled(self, group_id: str) -> None:
        """Note that a group, finished or not, will not be trained on, so that its place is free."""
        del self._deadlines[group_id]
        self._finished.discard(group_id)

    def batch(self, version: int, count: int | None = None) -> list[str] | None:
        """Take a batch to be trained on at `version`; return its group ids by deadline, then in order of submission.

        Return None when too few groups are finished, or when unfinished ones must be in this batch because they would
        get too old. `count` is the smallest number that will do (None: batch_groups); up to batch_groups are taken.
        Until `trained` says otherwise, the batch after this one is at `version` + 1.
        """
        least = self.batch_groups if count is None else count
        assert 0 <= least <= self.batch_groups, f"a batch has {self.batch_groups} groups, not {least}"
        assert version >= self._next_version, f"the next batch is trained on at {self._next_version}, not {version}"
        taken = [group for group in self._deadlines if group in self._finished][: self.batch_groups]
        if len(taken) < least or not self._may_stay_behind(taken, version + 1):
            return None
        assert all(self._deadlines[group] >= version for group in taken), "a group is too old to train on"
        for group in taken:
            self.cancelled(group)
        self._next_version = version + 1
        return taken

    def _may_stay_behind(self, taken: list[str], version: int) -> bool:
        """Return whether all groups but these can be trained on in time when the next batch is at `version`."""
        taken_ids = set(taken)
        deadlines = (deadline for group, deadline in self._deadlines.items() if group not in taken_ids)
        return all(deadline >= version + n // self.batch_groups for n, deadline in enumerate(deadlines))

    def trained(self, version: int) -> None:
        """Note that the last batch was trained on, and that the policy is now at `version`.

        This is one version more than before, or the same if no group in the batch had a gradient. The call is needed
        only in the second case, because `room` counts on the first.
        """
        assert version in (self._next_version - 1, self._next_version), f"the batch was not trained on at {version}"
        self._next_version = version
