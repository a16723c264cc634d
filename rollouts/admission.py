"""Admission control: which groups may be asked, and which of them make the next batch, so that none gets too old.

Staleness is bounded before anything is generated, not by throwing away what came too late.

Let k be `max_staleness` and B `batch_groups`. A group asked at version v has the deadline v + k: its tokens are of version v
or later, so that is the last version at which they are at most k old. Batches of B are taken at versions V, V+1, ...; the
outstanding groups (asked, neither trained on nor withdrawn), sorted by deadline and counted from 0, can all be trained on in
time if and only if

    (1)   the n-th has a deadline of at least V + n // B,

since it is in the batch of V + n // B when batches are taken in that order, and no order serves it sooner without making
one before it wait. Three rules keep (1) true for ever, V being the version of the next batch:

- Requesting a group: at version v the newest group is last, with deadline v + k. (1) asks that n // B <= v + k - V, so at most
  (v + k - V + 1) * B groups may be outstanding: (k+1)B while a batch is awaited, kB while one is trained on (V is v + 1
  already). `over_issue` lowers that bound, never below the B that fill a batch.
- Taking a batch at V: what stays must obey (1) for V + 1. Were everything finished, taking the B of earliest deadline would
  always do: each of the others moves B places forward. Otherwise the batch waits for those that may not stay. Whoever takes
  one group more moves all behind it forward, so if any batch of finished groups is allowed, the largest one is.
- Withdrawing a group (it was filtered) only moves others forward.

Hence no group is trained on too late, and none is discarded. There is no deadlock: when all that is running finishes, and
what there is room for is asked and finishes, there are at least B, and taking the first B is allowed. With k = 0 all this is
the plain synchronous loop: B are asked, nothing is asked while they are trained on, and they are taken together.
"""

from __future__ import annotations

from configs.blocks.schedule import Schedule


class Admission:
    """Counts groups by id; knows nothing of what is in them. Versions never fall. Calls cost O(outstanding) at most."""

    def __init__(self, batch_groups: int, max_staleness: int, over_issue: float | None = None) -> None:
        """`over_issue`: groups asked beyond a batch, in batches, rounded to whole groups; None: max_staleness."""
        assert batch_groups >= 1 and max_staleness >= 0 and (over_issue is None or over_issue >= 0)
        self.batch_groups, self.max_staleness = batch_groups, max_staleness
        beyond = max_staleness if over_issue is None else min(over_issue, max_staleness)
        self.most_outstanding = batch_groups + round(beyond * batch_groups)
        # In order of asking. Versions never fall, so that is the order of deadlines too.
        self._deadlines: dict[str, int] = {}
        self._finished: set[str] = set()
        self._next_version = 0  # at which the next batch is trained on

    @classmethod
    def of(cls, schedule: Schedule, prompts_per_step: int) -> Admission:
        """As a job is configured; a batch is here what is generated for it, without what is reused."""
        fresh = prompts_per_step - schedule.replayed_groups(prompts_per_step)
        return cls(fresh, schedule.staleness, schedule.over_issue)

    @property
    def outstanding(self) -> int:
        """Groups asked, neither taken nor withdrawn."""
        return len(self._deadlines)

    @property
    def ready(self) -> int:
        """Groups finished and not yet taken."""
        return len(self._finished)

    @property
    def running(self) -> int:
        """Groups asked and unfinished."""
        return self.outstanding - self.ready

    def room(self, version: int) -> int:
        """How many groups may be asked now by engines that hold `version`."""
        batches_left = version + self.max_staleness - max(self._next_version, version) + 1
        return max(0, min(self.most_outstanding, batches_left * self.batch_groups) - self.outstanding)

    def asked(self, group_id: str, version: int) -> None:
        """A group is under way from `version` on."""
        deadline = version + self.max_staleness
        assert group_id not in self._deadlines, f"group {group_id} is asked twice"
        assert self.room(version) > 0, f"there is no room for group {group_id} at version {version}"
        assert deadline >= next(reversed(self._deadlines.values()), deadline), "versions fell"
        self._deadlines[group_id] = deadline

    def finished(self, group_id: str) -> None:
        """All responses of a group are there."""
        assert group_id in self._deadlines and group_id not in self._finished, f"group {group_id} is not running"
        self._finished.add(group_id)

    def withdrawn(self, group_id: str) -> None:
        """A group, finished or not, will not be trained on; its place is free."""
        del self._deadlines[group_id]
        self._finished.discard(group_id)

    def batch(self, version: int, count: int | None = None) -> list[str] | None:
        """Take a batch to be trained on at `version`: group ids, earliest deadline first, ties in order of asking.

        None: too few are finished, or some that are not must be in it, or they would get too old. `count`: be content with so
        many, fewer than batch_groups, since no more are asked; more are taken when more are finished. Until `trained` says
        otherwise the batch after it is at `version` + 1.
        """
        least = self.batch_groups if count is None else count
        assert 0 <= least <= self.batch_groups, f"a batch has {self.batch_groups} groups, not {least}"
        assert version >= self._next_version, f"the next batch is trained on at {self._next_version}, not {version}"
        taken = [group for group in self._deadlines if group in self._finished][: self.batch_groups]
        if len(taken) < least or not self._may_stay_behind(taken, version + 1):
            return None
        assert all(self._deadlines[group] >= version for group in taken), "a group is too old to train on"
        for group in taken:
            self.withdrawn(group)
        self._next_version = version + 1
        return taken

    def _may_stay_behind(self, taken: list[str], version: int) -> bool:
        """Whether all outstanding groups but these can be trained on in time when the next batch is at `version`."""
        gone = set(taken)
        left = (deadline for group, deadline in self._deadlines.items() if group not in gone)
        return all(deadline >= version + n // self.batch_groups for n, deadline in enumerate(left))

    def trained(self, version: int) -> None:
        """The last batch is trained on and the policy is at `version`: one more than before, or the same if no group in
        the batch had a gradient. Needed in the second case only: without it room() counts on one version more."""
        assert version in (self._next_version - 1, self._next_version), f"the batch was not trained on at {version}"
        self._next_version = version
