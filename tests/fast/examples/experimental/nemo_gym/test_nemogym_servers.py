"""Places, outages and folders: the decisions without a server, the waiting with real event loops."""

import asyncio
import logging
import threading
from collections import Counter

import nemogym_servers as servers
import pytest
from nemogym_contract import Outcome
from nemogym_servers import Limits, OutageError, Pool, Server

FAILED = Outcome("SandboxUnavailable", detail="docker is down")
GRADED = Outcome("Submitted", 0.0)
LIMITS = Limits(concurrency=2, outage_wait_s=1800.0)


def _fail(server: Server, count: int, *, instances: int = 2, now: float = 0.0, limits: Limits = LIMITS) -> None:
    for number in range(count):
        place = server.take(f"task-{number % instances}", now)
        server.taken -= 1
        server.ended(place, FAILED, now, limits)


# --- one server -----------------------------------------------------------------


def test_a_server_has_room_up_to_its_limit():
    server = Server("http://a")
    assert server.has_room(LIMITS, now=0.0)
    server.take("x", 0.0)
    server.take("y", 0.0)
    assert not server.has_room(LIMITS, now=0.0)
    assert server.has_room(Limits(), now=0.0), "no limit"


@pytest.mark.parametrize(
    "count, instances, is_outage", [(7, 2, False), (8, 1, False), (30, 1, False), (8, 2, True), (8, 8, True)]
)
def test_an_outage_is_eight_failures_in_a_row_of_at_least_two_tasks(count, instances, is_outage):
    server = Server("http://a")
    _fail(server, count, instances=instances)
    assert (server.outage is not None) is is_outage


def test_a_verdict_between_failures_is_no_outage():
    server = Server("http://a")
    _fail(server, 7)
    server.ended(server.take("x", 0.0), GRADED, 0.0, LIMITS)
    _fail(server, 7)
    assert server.outage is None


@pytest.mark.parametrize("status", ["Aborted", "UngradableInstance"])
def test_what_is_not_the_servers_fault_makes_no_outage(status):
    server = Server("http://a")
    for number in range(20):
        server.ended(server.take(f"task-{number}", 0.0), Outcome(status), 0.0, LIMITS)
    assert server.outage is None


def test_a_scan_meets_no_outage():
    server = Server("http://a")
    _fail(server, 50, limits=Limits())
    server.refused(server.take("x", 0.0), FAILED, 0.0, Limits())
    assert server.outage is None


def test_in_an_outage_there_is_one_trial_at_a_time_with_doubling_pauses():
    server = Server("http://a")
    _fail(server, 8)
    pauses, now = [], 0.0
    for _ in range(7):
        start = now
        while not server.has_room(LIMITS, now):
            now += 0.5
        pauses.append(now - start)
        trial = server.take("x", now)
        assert server.is_on_trial(trial) and not server.has_room(LIMITS, now + 1e6), "one at a time"
        server.ended(trial, FAILED, now, LIMITS)
    assert pauses == [2, 4, 8, 16, 32, 60, 60]


def test_a_trial_with_a_verdict_ends_the_outage(caplog):
    server = Server("http://user:secret@a")
    _fail(server, 8)
    server.ended(server.take("x", 5.0), GRADED, 7.0, LIMITS)
    assert server.outage is None and server.has_room(LIMITS, 7.0)
    assert "docker is down" in caplog.text and "works again after 7 s" in caplog.text
    assert "secret" not in caplog.text


def test_a_late_verdict_of_an_episode_from_before_ends_the_outage_too():
    server = Server("http://a")
    before = server.take("x", 0.0)
    _fail(server, 8)
    server.ended(before, GRADED, 1.0, LIMITS)
    assert server.outage is None


def test_an_aborted_trial_says_nothing():
    server = Server("http://a")
    _fail(server, 8)
    server.ended(server.take("x", 5.0), Outcome("Aborted"), 6.0, LIMITS)
    assert server.outage and server.has_room(LIMITS, 6.0)


def test_a_server_that_has_worked_and_refuses_is_failing_at_once():
    new, known = Server("http://a"), Server("http://b")
    known.ended(known.take("x", 0.0), GRADED, 0.0, LIMITS)
    for server in (new, known):
        server.refused(server.take("x", 1.0), Outcome("ServerUnreachable"), 1.0, LIMITS)
    assert new.outage is None and known.outage is not None


def test_a_refusal_counts_for_nothing_where_another_episode_was_graded_meanwhile():
    server = Server("http://a")
    refused = server.take("x", 1.0)
    server.ended(server.take("y", 2.0), GRADED, 3.0, LIMITS)
    server.refused(refused, Outcome("ServerUnreachable"), 4.0, LIMITS)
    assert server.outage is None and server.has_room(Limits(concurrency=3, outage_wait_s=1.0), 4.0)


def test_a_server_is_in_doubt_from_a_lost_connection_to_its_next_answer():
    server = Server("http://a")
    place = server.take("x", 0.0)
    for outcome, in_doubt in [
        (Outcome("ServerUnreachable"), True),
        (Outcome("Aborted"), True),
        (FAILED, False),
        (Outcome("ServerUnreachable"), True),
        (GRADED, False),
    ]:
        server.ended(place, outcome, 0.0, LIMITS)
        assert server.is_in_doubt(place, LIMITS) is in_doubt, outcome
    server.refused(place, Outcome("ServerUnreachable"), 0.0, LIMITS)
    assert not server.is_in_doubt(place, LIMITS), "no connection was lost"


def test_a_scan_and_a_trial_ask_nobody():
    server = Server("http://a")
    place = server.take("x", 0.0)
    server.lost()
    assert server.is_in_doubt(place, LIMITS) and not server.is_in_doubt(place, Limits())
    _fail(server, 8)
    server.lost()
    assert server.is_in_doubt(place, LIMITS) and not server.is_in_doubt(server.take("x", 5.0), LIMITS)


def test_silence_is_the_episodes_own_if_it_was_alone_or_another_was_graded():
    server = Server("http://a")
    alone = server.take("x", 0.0)
    assert server.worked_during(alone)

    second = server.take("y", 1.0)
    assert not server.worked_during(alone) and not server.worked_during(second), "two, and none was graded"

    server.ended(second, FAILED, 2.0, LIMITS)
    assert not server.worked_during(alone), "a failure shows nothing"

    third = server.take("z", 3.0)
    server.ended(third, GRADED, 4.0, LIMITS)
    assert server.worked_during(alone)
    assert not server.worked_during(server.take("z", 5.0)), "that grade was before its time"


def test_a_timeout_of_another_is_no_proof_that_the_server_works():
    server = Server("http://a")
    first, second = server.take("x", 0.0), server.take("y", 0.0)
    server.ended(first, Outcome("TimeLimitExceeded", 0.0), 9.0, LIMITS)
    assert not server.worked_during(second)


def test_silence_one_by_one_is_not_the_episodes_own_for_ever():
    server = Server("http://a")
    first = server.take("x", 0.0)
    assert server.worked_during(first)
    server.ended(first, Outcome("TimeLimitExceeded", 0.0), 9.0, LIMITS)
    server.left(first)

    second = server.take("y", 10.0)
    assert not server.worked_during(second), "it has said nothing since"
    server.ended(second, GRADED, 11.0, LIMITS)
    server.left(second)
    assert server.worked_during(server.take("z", 12.0))


def test_a_timeout_does_not_hide_an_outage():
    server = Server("http://a")
    for number in range(8):
        server.ended(server.take("x", 0.0), Outcome("TimeLimitExceeded", 0.0), 0.0, LIMITS)
        server.ended(server.take(f"task-{number}", 0.0), FAILED, 0.0, LIMITS)
    assert server.outage is not None


def test_in_an_outage_silence_is_never_the_episodes_own():
    server = Server("http://a")
    _fail(server, 8)
    assert not server.worked_during(server.take("x", 5.0))


# --- the pool -------------------------------------------------------------------


async def _admit(pool: Pool, image: str = "image", *, instance: str = "task", limits: Limits = LIMITS, **kwargs):
    return await asyncio.wait_for(pool.admit(instance=instance, image=image, limits=limits, **kwargs), timeout=5)


async def test_the_waiting_are_served_first_come_first_served():
    pool, order = Pool(["http://a"]), []
    held = [await _admit(pool) for _ in range(2)]

    async def wait(name):
        place = await _admit(pool)
        order.append(name)
        pool.left(place)

    tasks = [asyncio.create_task(wait(name)) for name in range(20)]
    await asyncio.sleep(0.05)
    assert order == []
    for place in held:
        pool.left(place)
    await asyncio.gather(*tasks)
    assert order == list(range(20))
    assert pool.servers[0].taken == 0


async def test_who_was_not_delivered_goes_first():
    pool, order = Pool(["http://a"]), []
    held = [await _admit(pool) for _ in range(2)]

    async def wait(name, **kwargs):
        place = await _admit(pool, **kwargs)
        order.append(name)
        pool.left(place)

    tasks = [asyncio.create_task(wait("new"))]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(wait("again", first=True)))
    await asyncio.sleep(0.01)
    pool.left(held[0])
    await asyncio.gather(*tasks)
    assert order == ["again", "new"]


async def test_a_cancelled_wait_gives_its_place_back():
    pool = Pool(["http://a"])
    held = [await _admit(pool) for _ in range(2)]
    waiting = [asyncio.create_task(_admit(pool)) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    pool.left(held[0])
    waiting[1].cancel()  # it has just been given the place
    assert (await waiting[2]).server is pool.servers[0]
    assert pool.servers[0].taken == 2


async def test_an_image_has_its_server_and_images_spread():
    pool = Pool(["http://a", "http://b", "http://c"])
    home = {}
    for image in map(str, range(300)):
        places = [await _admit(pool, image, limits=Limits()) for _ in range(2)]
        (home[image],) = {place.server.url for place in places}
    counts = Counter(home.values())
    assert len(counts) == 3 and min(counts.values()) > 60

    fewer = Pool(["http://c", "http://a"])
    moved = [
        image
        for image, url in home.items()
        if url != "http://b" and (await _admit(fewer, image, limits=Limits())).server.url != url
    ]
    assert moved == [], "a server that goes moves only its own images"


async def test_a_full_or_failing_server_is_stood_in_for_by_the_least_busy_one():
    pool = Pool(["http://a", "http://b", "http://c"])
    home = (await _admit(pool)).server
    others = [server for server in pool.servers if server is not home]
    busy = others[0].take("x", 0.0)
    await _admit(pool)
    assert (await _admit(pool)).server is others[1], "home is full"

    pool.left(busy)
    home.taken = 0
    _fail(home, 8, now=1e9)
    assert (await _admit(pool)).server is others[0], "home is failing"
    assert (await _admit(pool, avoid={others[0].url, home.url})).server is others[1]


async def test_a_failing_server_gets_its_trial_although_others_work(monkeypatch):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.05)
    pool = Pool(["http://a", "http://b"])
    home = (await _admit(pool)).server
    _fail_now(home)
    assert (await _admit(pool)).server is not home
    await asyncio.sleep(0.1)
    trial = await _admit(pool)
    assert trial.server is home and home.is_on_trial(trial)


def _fail_now(server: Server, limits: Limits = LIMITS) -> None:
    _fail(server, 8, now=servers.time.monotonic(), limits=limits)


async def test_who_waits_in_an_outage_is_woken_for_the_trial_and_by_its_verdict(monkeypatch):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.1)
    pool = Pool(["http://a"])
    _fail_now(pool.servers[0])
    waiting = [asyncio.create_task(_admit(pool)) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    await asyncio.sleep(0.15)
    assert [task.done() for task in waiting] == [True, False, False, False]

    trial = waiting[0].result()
    pool.ended(trial, GRADED, LIMITS)
    pool.left(trial)
    await asyncio.sleep(0.05)
    assert [task.done() for task in waiting] == [True, True, True, False], "full speed, up to the limit"
    waiting[3].cancel()


async def test_an_outage_of_all_that_lasts_fails_the_waiting_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.3)
    limits = Limits(concurrency=2, outage_wait_s=0.15)
    pool = Pool(["http://a", "http://b"])
    for server in pool.servers:
        _fail_now(server, limits)
    caplog.clear()
    waiting = [asyncio.create_task(_admit(pool, limits=limits)) for _ in range(3)]
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, OutageError)
        assert result.outcome.exit_status == "SandboxUnavailable" and "docker is down" in result.outcome.detail
    with pytest.raises(OutageError):
        await _admit(pool, limits=limits)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "since 2" in record.message and "docker is down" in record.message

    await asyncio.sleep(0.2)
    trial = await _admit(pool, limits=limits)
    assert trial.server.is_on_trial(trial), "a trial may still end it"
    pool.ended(trial, GRADED, limits)
    await _admit(pool, limits=limits)


async def test_nobody_is_refused_while_a_first_trial_runs(monkeypatch):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.05)
    limits = Limits(concurrency=2, outage_wait_s=0.2)
    pool = Pool(["http://a"])
    _fail_now(pool.servers[0], limits)
    trial = await _admit(pool, limits=limits)
    waiting = asyncio.create_task(_admit(pool, limits=limits))
    await asyncio.sleep(0.4)
    assert not waiting.done(), "the trial is about to show that the server works"
    pool.ended(trial, GRADED, limits)
    await waiting


async def test_who_has_to_avoid_a_server_does_not_block_it():
    pool = Pool(["http://a", "http://b"])
    home = (await _admit(pool)).server
    (other,) = [server for server in pool.servers if server is not home]
    other.taken = 2
    avoiding = asyncio.create_task(_admit(pool, avoid={home.url}))
    await asyncio.sleep(0.01)
    assert (await _admit(pool)).server is home
    assert not avoiding.done()
    other.taken = 0
    pool.left(other.take("x", 0.0))
    assert (await avoiding).server is other


async def test_a_server_to_avoid_is_better_than_one_in_an_outage():
    pool = Pool(["http://a", "http://b"])
    _fail_now(pool.servers[1])
    assert (await _admit(pool, avoid={"http://a"})).server.url == "http://a"


async def test_a_task_that_cannot_be_placed_blocks_nobody():
    pool = Pool(["http://a", "http://b"])
    with pytest.raises(UnicodeError):
        await _admit(pool, "broken \ud800")
    assert (await _admit(pool)).server in pool.servers
    assert not pool._waiters


def test_a_wake_up_does_not_end_with_the_loop_that_promised_it(monkeypatch):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.5)
    pool = Pool(["http://a"])
    _fail_now(pool.servers[0])

    async def leave_early():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.admit(instance="x", image="i", limits=LIMITS), timeout=0.2)

    async def stay():
        return await asyncio.wait_for(pool.admit(instance="x", image="i", limits=LIMITS), timeout=10)

    early = threading.Thread(target=lambda: asyncio.run(leave_early()))
    early.start()
    place = asyncio.run(stay())
    early.join()
    assert pool.servers[0].is_on_trial(place)


def test_a_waiter_whose_loop_is_gone_gets_no_place():
    pool, limits = Pool(["http://a"]), Limits(concurrency=1)

    async def admit():
        return await pool.admit(instance="x", image="i", limits=limits)

    held = asyncio.run(admit())
    gone = asyncio.new_event_loop()
    task = gone.create_task(admit())
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    pool.left(held)
    assert pool.servers[0].taken == 0
    assert asyncio.run(asyncio.wait_for(admit(), timeout=5)).server is pool.servers[0]
    del task


async def test_while_one_server_works_nobody_is_refused():
    limits = Limits(concurrency=1, outage_wait_s=0.01)
    pool = Pool(["http://a", "http://b"])
    _fail_now(pool.servers[0], limits)
    place = await _admit(pool, limits=limits)
    waiting = asyncio.create_task(_admit(pool, limits=limits))
    await asyncio.sleep(0.1)
    assert place.server is pool.servers[1] and not waiting.done()
    pool.left(place)
    await waiting


def test_several_event_loops_share_the_places():
    pool, limits = Pool(["http://a"]), Limits(concurrency=3)
    most, lock = [0], threading.Lock()

    async def episode():
        place = await pool.admit(instance="x", image="i", limits=limits)
        with lock:
            most[0] = max(most[0], pool.servers[0].taken)
        await asyncio.sleep(0.001)
        pool.left(place)

    async def many():
        await asyncio.wait_for(asyncio.gather(*(episode() for _ in range(100))), timeout=20)

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [3] and pool.servers[0].taken == 0


def test_a_process_has_one_pool_for_the_same_servers_and_one_for_scans():
    assert servers.pool_of(["http://one"], LIMITS) is servers.pool_of(("http://one",), Limits(7, 60.0))
    assert servers.pool_of(["http://one"], LIMITS) is not servers.pool_of(["http://one", "http://two"], LIMITS)
    assert servers.pool_of(["http://one"], LIMITS) is not servers.pool_of(["http://one"], Limits())


# --- folders --------------------------------------------------------------------


async def test_a_folder_is_unique_among_the_taken_and_used_again_after():
    pools = [Pool(["http://a"]), Pool(["http://b"])]
    places = [await _admit(pool, limits=Limits()) for pool in pools * 4]
    episodes = {place.episode for place in places}
    assert len(episodes) == 8, "two servers may share a parent folder"

    pools[0].left(places[0])
    pools[1].left(places[1], reusable=False)
    again = [(await _admit(pools[0], limits=Limits())).episode for _ in range(2)]
    assert places[0].episode in again and places[1].episode not in again
