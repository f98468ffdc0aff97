"""Where and when an episode runs: places on the agent servers, and what becomes of them in an outage.

1. A server takes ``Limits.concurrency`` episodes at a time; the rest wait here, first come first served, with no clock
   running. A place is free again when the server has answered.
2. With several servers an episode goes to the one that its image hashes to (rendezvous hashing), so that each image is
   pulled once; to the least busy one while that is full or failing.
3. After 8 episodes in a row without a verdict, of at least two tasks, a server is failing: it gets one trial episode at
   a time, with doubling pauses, until one ends with a verdict. A server that has worked and now refuses connections is
   failing at once. One that was silent or lost a connection is asked whether it is there before the next episode goes,
   but for a trial, which finds out by itself.
4. When every server has been failing for ``Limits.outage_wait_s`` and no trial runs that may show otherwise, the waiting
   fail, and every further episode at once, but for the trials.

``Server`` decides and does no I/O; ``Pool`` waits. One pool serves every event loop and thread of the process.
"""

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nemogym_contract import Outcome, without_userinfo

logger = logging.getLogger(__name__)

_FAILURES_OF_AN_OUTAGE = 8
_INSTANCES_OF_AN_OUTAGE = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


@dataclass(frozen=True)
class Limits:
    """What a caller grants.

    Attributes:
        concurrency: episodes at a time on each server; None for any number.
        outage_wait_s: seconds for which episodes wait for failing servers; None to try every episode whatever the
            others met, as a scan does.
    """

    concurrency: int | None = None
    outage_wait_s: float | None = None


@dataclass(frozen=True, eq=False)
class Place:
    """An episode's place on a server.

    Attributes:
        server: where.
        instance: the task, as outages tell tasks apart.
        episode: name of its folder there, unique among the places that are taken.
        started: monotonic seconds of its admission.
        number: how many the server had admitted, with this one.
        alone: no other place of the server was taken then.
    """

    server: "Server"
    instance: str
    slot: int
    started: float
    number: int
    alone: bool

    @property
    def episode(self) -> str:
        return f"{_RUN_TOKEN}-{self.slot}"


@dataclass
class Outage:
    """What is known of a failing server; times in monotonic seconds."""

    since: float
    last: Outcome
    pause_s: float
    next_trial: float
    trial: Place | None = None

    def trial_failed(self, now: float, outcome: Outcome) -> None:
        self.trial = None
        self.last = outcome
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
        self.next_trial = now + self.pause_s


class OutageError(Exception):
    """Every server has been failing for too long. ``outcome``: for the episode, with the reason of the outage."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


class Server:
    """One agent server as its episodes show it; the caller holds the pool's lock.

    Attributes:
        url: of the server.
        outage: None while it works.
        has_answered: it did at least once.
        taken: places that are taken.
        admitted: episodes in all.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.outage: Outage | None = None
        self.has_answered = False
        self.taken = 0
        self.admitted = 0
        self._in_doubt = False
        self._last_grade = -math.inf
        self._silent_since_timeout = False
        self._failures = 0
        self._failed_instances: set[str] = set()

    def has_room(self, limits: Limits, now: float) -> bool:
        """Whether an episode may start now; a trial may whatever else is still held there."""
        if self.outage:
            return self.outage.trial is None and now >= self.outage.next_trial
        return limits.concurrency is None or self.taken < limits.concurrency

    def take(self, instance: str, now: float) -> Place:
        """Give a place to an episode."""
        alone = self.taken == 0
        self.taken += 1
        self.admitted += 1
        place = Place(
            server=self, instance=instance, slot=_take_slot(), started=now, number=self.admitted, alone=alone
        )
        if self.outage:
            self.outage.trial = place
        return place

    def is_on_trial(self, place: Place) -> bool:
        """Whether this episode decides if the outage goes on."""
        return self.outage is not None and self.outage.trial is place

    def worked_during(self, place: Place) -> bool:
        """Whether its silence is the episode's own: no outage, and another episode was graded, or there was none.

        Of episodes that come one at a time, the second that ends in silence is no longer taken for its own.
        """
        had_it_alone = place.alone and self.admitted == place.number and not self._silent_since_timeout
        return self.outage is None and (had_it_alone or self._last_grade >= place.started)

    def ended(self, place: Place, outcome: Outcome, now: float, limits: Limits) -> None:
        """Take note of how an episode ended."""
        if outcome.exit_status == "TimeLimitExceeded":
            self._silent_since_timeout = True
        elif outcome.reward is not None:
            self._recover(now)
        elif outcome.blames_server:
            self._in_doubt = outcome.exit_status == "ServerUnreachable"
            self.has_answered |= not self._in_doubt
            self._count_failure(place, outcome, now, limits)
        elif self.is_on_trial(place):
            self.outage.trial = None

    def lost(self) -> None:
        """Take note of a connection that was lost; a process that ends may still accept others."""
        self._in_doubt = True

    def is_in_doubt(self, place: Place, limits: Limits) -> bool:
        """Whether it is to be asked if it is there before the episode of a place is sent."""
        return self._in_doubt and limits.outage_wait_s is not None and not self.is_on_trial(place)

    def left(self, place: Place) -> None:
        """Take a place back."""
        self.taken -= 1
        if self.is_on_trial(place):
            self.outage.trial = None

    def refused(self, place: Place, outcome: Outcome, now: float, limits: Limits) -> None:
        """Take note that an episode was not delivered.

        From a server that has worked that is enough for an outage, unless it has graded another one since.
        """
        if not self.has_answered or limits.outage_wait_s is None:
            self._count_failure(place, outcome, now, limits)
        elif self._last_grade <= place.started:
            self._fail(place, outcome, now, is_outage=True)

    def _count_failure(self, place: Place, outcome: Outcome, now: float, limits: Limits) -> None:
        self._failures += 1
        self._failed_instances.add(place.instance)
        is_outage = self._failures >= _FAILURES_OF_AN_OUTAGE
        is_outage &= len(self._failed_instances) >= _INSTANCES_OF_AN_OUTAGE
        self._fail(place, outcome, now, is_outage=is_outage and limits.outage_wait_s is not None)

    def _fail(self, place: Place, outcome: Outcome, now: float, *, is_outage: bool) -> None:
        if self.is_on_trial(place):
            self.outage.trial_failed(now, outcome)
        elif is_outage and not self.outage:
            self.outage = Outage(now, outcome, pause_s=_FIRST_PAUSE_S, next_trial=now + _FIRST_PAUSE_S)
            logger.error(
                "%s is failing: it gets one trial episode at a time until one ends with a verdict; the others wait. "
                "Last of %d in a row without one: %s: %s",
                without_userinfo(self.url),
                max(self._failures, 1),
                outcome.exit_status,
                outcome.detail,
            )

    def _recover(self, now: float) -> None:
        self.has_answered = True
        self._in_doubt = False
        self._last_grade = now
        self._silent_since_timeout = False
        self._failures = 0
        self._failed_instances.clear()
        if self.outage:
            outage, self.outage = self.outage, None
            logger.warning("%s works again after %.0f s", without_userinfo(self.url), now - outage.since)


@dataclass(eq=False, slots=True)
class _Waiter:
    instance: str
    home: list[Server]
    avoid: Collection[str]
    limits: Limits
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    place: Place | None = None
    abandoned: bool = False

    def choose(self, now: float) -> Server | None:
        """A server with room for it: the first of its own order, the least busy one where that is full or failing."""
        others = [server for server in self.home if server.url not in self.avoid]
        allowed = others if any(not server.outage for server in others) else self.home
        free = [server for server in allowed if server.has_room(self.limits, now)]
        if not free or free[0] is allowed[0]:
            return free[0] if free else None
        return min(free, key=lambda server: (server.outage is not None, server.taken))

    def admit(self, place: Place) -> None:
        self.place = place
        self._call(lambda: self.future.done() or self.future.set_result(place))

    def refuse(self, error: OutageError) -> None:
        self._call(lambda: self.future.done() or self.future.set_exception(error))

    def _call(self, callback: Callable[[], object]) -> None:
        if asyncio._get_running_loop() is self.loop:
            callback()
            return
        with contextlib.suppress(RuntimeError):  # its loop has ended, and nobody waits any more
            self.loop.call_soon_threadsafe(callback)


class Pool:
    """The agent servers of one NEMO_GYM_URL."""

    def __init__(self, urls: Collection[str]) -> None:
        self.servers = [Server(url) for url in urls]
        self._lock = threading.RLock()
        self._waiters: deque[_Waiter] = deque()
        self._wake: tuple[asyncio.AbstractEventLoop | None, float] = (None, math.inf)
        self._outage_told = False

    async def admit(
        self, *, instance: str, image: str, limits: Limits, avoid: Collection[str] = (), first: bool = False
    ) -> Place:
        """Wait for a place and take it; ``left`` has to follow.

        Args:
            instance: id of the task.
            image: its sandbox image, which picks the server.
            limits: what is granted.
            avoid: URLs of servers to leave out while there are others.
            first: go before those who wait, as an episode does that had a place and was not delivered.

        Raises:
            OutageError: every server has been failing for too long.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(instance, self._home_of(image), avoid, limits, loop, loop.create_future())
        with self._lock:
            (self._waiters.appendleft if first else self._waiters.append)(waiter)
            self._dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            with self._lock:
                waiter.abandoned = True
                if waiter.place:
                    self.left(waiter.place)
                self._dispatch()
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.exception()  # seen, or asyncio reports it as never retrieved
            raise

    def ended(self, place: Place, outcome: Outcome, limits: Limits) -> None:
        """Take note of an outcome; the place stays taken until ``left``."""
        with self._lock:
            place.server.ended(place, outcome, time.monotonic(), limits)
            self._dispatch()

    def refused(self, place: Place, outcome: Outcome, limits: Limits) -> None:
        """Take note that an episode was not delivered; the place stays taken until ``left``."""
        with self._lock:
            place.server.refused(place, outcome, time.monotonic(), limits)

    def is_worth_waiting_for(self, limits: Limits) -> bool:
        """Whether an undelivered episode should wait for its server to come back: one of them has worked before."""
        return limits.outage_wait_s is not None and any(server.has_answered for server in self.servers)

    def left(self, place: Place, *, reusable: bool = True) -> None:
        """Free a place.

        Args:
            place: as ``admit`` gave it.
            reusable: the server is known to be done with the episode's folder.
        """
        with self._lock:
            place.server.left(place)
            if reusable:
                _free_slot(place.slot)
            self._dispatch()

    def worked_during(self, place: Place) -> bool:
        """See ``Server.worked_during``."""
        with self._lock:
            return place.server.worked_during(place)

    def lost(self, place: Place) -> None:
        """See ``Server.lost``."""
        with self._lock:
            place.server.lost()

    def is_in_doubt(self, place: Place, limits: Limits) -> bool:
        """See ``Server.is_in_doubt``."""
        with self._lock:
            return place.server.is_in_doubt(place, limits)

    def _home_of(self, image: str) -> list[Server]:
        if len(self.servers) == 1:
            return self.servers
        return sorted(self.servers, key=lambda server: _weight(server.url, image), reverse=True)

    def _dispatch(self) -> None:
        """Give out what places there are; with none, see to it that this runs again when there may be one."""
        now = time.monotonic()
        if not self._outage_told and (not self._waiters or self._is_full(now)):
            return
        skipped: list[_Waiter] = []
        while self._waiters and (not skipped or skipped[-1].avoid):  # others may take what one has to avoid
            waiter = self._waiters.popleft()
            if waiter.abandoned or waiter.loop.is_closed():
                continue
            if server := waiter.choose(now):
                waiter.admit(server.take(waiter.instance, now))
            else:
                skipped.append(waiter)
        self._waiters.extendleft(reversed(skipped))
        self._outage_told &= all(server.outage for server in self.servers)
        if self._waiters and now >= self._outage_ends(self._waiters[0].limits):
            self._refuse_all(now)
        self._wake_later(now)

    def _is_full(self, now: float) -> bool:
        """Whether every server works and has no room: nothing is to be given out, and nothing to be waited for."""
        limits = self._waiters[0].limits
        return not any(server.outage or server.has_room(limits, now) for server in self.servers)

    def _outage_ends(self, limits: Limits) -> float:
        """When waiting ends, in monotonic seconds; infinite while a server works, or a first trial may show that."""
        outages = [server.outage for server in self.servers]
        if limits.outage_wait_s is None or not all(outages):
            return math.inf
        if any(outage.trial for outage in outages) and not self._outage_told:
            return math.inf
        return max(outage.since for outage in outages) + limits.outage_wait_s

    def _refuse_all(self, now: float) -> None:
        server = max(self.servers, key=lambda server: server.outage.since)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - (now - server.outage.since)))
        last = server.outage.last
        text = f"no verdict from any agent server since {since}; {without_userinfo(server.url)}: {last.detail}"
        if not self._outage_told:
            logger.error(
                "%s. Until a trial has a verdict every other episode fails at once, %s", text, last.exit_status
            )
            self._outage_told = True
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.abandoned:
                waiter.refuse(OutageError(Outcome(last.exit_status, detail=text)))

    def _wake_later(self, now: float) -> None:
        if not self._waiters:
            return
        due = [server.outage.next_trial for server in self.servers if server.outage and not server.outage.trial]
        events = [*due, self._outage_ends(self._waiters[0].limits)]
        at = min((event for event in events if event > now), default=math.inf)
        loop, promised = self._waiters[0].loop, self._wake  # the promise of another loop may end with it
        if at < math.inf and not (promised[0] is loop and promised[1] <= at):
            self._wake = (loop, at)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.call_later, at - now, self._woken)

    def _woken(self) -> None:
        with self._lock:
            self._wake = (None, math.inf)
            self._dispatch()


def pool_of(urls: Collection[str], limits: Limits) -> Pool:
    """The process's pool for these servers; scans have one of their own, in which there are no outages."""
    key = (tuple(urls), limits.outage_wait_s is None)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(urls)
        return _pools[key]


_pools: dict[tuple[tuple[str, ...], bool], Pool] = {}
_pools_lock = threading.Lock()


def _weight(url: str, image: str) -> bytes:
    return hashlib.blake2b(f"{url}\0{image}".encode(), digest_size=8).digest()


# --- folders ----------------------------------------------------------------------

# A slot names a folder on the server. Two agent servers of one NeMo Gym share a parent folder, so slots are the
# process's, not a server's.
_RUN_TOKEN = secrets.token_hex(4)
_new_slots = itertools.count()
_free_slots: list[int] = []
_slots_lock = threading.Lock()


def _take_slot() -> int:
    with _slots_lock:
        return heapq.heappop(_free_slots) if _free_slots else next(_new_slots)


def _free_slot(slot: int) -> None:
    with _slots_lock:
        heapq.heappush(_free_slots, slot)
