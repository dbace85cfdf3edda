"""Rate limit, retries and breaker, proved by counts on a clock that moves only when somebody sleeps."""

import threading

import pytest

from scrl.handler.web_search_agent.backend import SearchError
from scrl.handler.web_search_agent.resilience import CircuitBreaker, Guard, Limits, TokenBucket

FAST = Limits(rate=1000.0, burst=1000.0)


def passing(kind: str = "bad_reply", retry_after_s: float | None = None) -> SearchError:
    return SearchError(kind, "a bad moment", retryable=True, retry_after_s=retry_after_s)


class Requests:
    """Fails with ``errors`` in turn, then answers; ``times`` are when it was asked and the seconds it was given."""

    def __init__(self, clock, *errors: SearchError) -> None:
        self.clock, self.errors, self.times = clock, list(errors), []

    def __call__(self, seconds: float) -> str:
        self.times.append((self.clock(), seconds))
        if self.errors:
            raise self.errors.pop(0)
        return "rows"


def guard(clock, limits: Limits = FAST, counts: list[str] | None = None) -> Guard:
    return Guard(limits, (counts if counts is not None else []).append, clock, clock.sleep)


# The token bucket.


def test_a_burst_goes_at_once_and_the_rest_at_the_rate(clock):
    bucket = TokenBucket(rate=2.0, burst=3.0, clock=clock)
    assert [bucket.reserve(2000.0) for _ in range(7)] == [0, 0, 0, 0.5, 1.0, 1.5, 2.0]
    clock.now += 2.0  # those four turns are used up
    assert bucket.reserve(2000.0) == 0.5


def test_idle_time_earns_no_more_than_the_burst(clock):
    bucket = TokenBucket(rate=2.0, burst=3.0, clock=clock)
    clock.now += 1e6
    assert [bucket.reserve(1e9) for _ in range(4)] == [0, 0, 0, 0.5]


def test_a_turn_after_the_deadline_is_refused_and_not_used_up(clock):
    bucket = TokenBucket(rate=0.1, burst=1.0, clock=clock)
    assert bucket.reserve(1005.0) == 0
    for _ in range(3):
        with pytest.raises(
            SearchError, match="at most 0.1 times a second.*within 5.0 s; raise search.rate_limit"
        ) as no:
            bucket.reserve(1005.0)
        assert no.value.kind == "rate_limited" and not no.value.retryable and not no.value.fault
    assert bucket.reserve(2000.0) == 10.0


def test_a_held_bucket_gives_nothing_until_the_time_but_never_for_a_day(clock):
    bucket = TokenBucket(rate=1.0, burst=5.0, clock=clock)
    bucket.hold(7.0)
    bucket.hold(3.0)  # the longer one counts
    assert bucket.reserve(2000.0) == 7.0
    bucket.hold(86400.0)
    assert bucket.reserve(1e9) == 600.0


def test_threads_together_keep_to_the_rate(clock):
    bucket, waits = TokenBucket(rate=4.0, burst=1.0, clock=clock), []
    threads = [threading.Thread(target=lambda: waits.extend(bucket.reserve(1e9) for _ in range(50))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(waits) == [i / 4.0 for i in range(400)]  # nobody got another's turn


# Retries.


def test_what_may_pass_is_tried_again_with_growing_random_waits(clock):
    counts: list[str] = []
    requests = Requests(clock, passing(), passing("connection"), passing())
    assert guard(clock, counts=counts).run(requests, 1060.0) == "rows"
    assert len(requests.times) == 4 and len(clock.sleeps) == 3
    assert all(0 <= wait <= limit for wait, limit in zip(clock.sleeps, (0.5, 1.0, 2.0), strict=True))
    assert requests.times[0] == (1000.0, 60.0) and requests.times[-1][1] == 1060.0 - clock.now  # what was left
    assert (counts.count("requests"), counts.count("retries")) == (4, 3)


def test_waits_differ_from_client_to_client(clock):
    for _ in range(20):
        guard(clock).run(Requests(clock, passing()), clock.now + 60)
    assert len(set(clock.sleeps)) == 20


def test_four_requests_are_the_most(clock):
    requests = Requests(clock, *(passing() for _ in range(9)))
    with pytest.raises(SearchError, match="a bad moment"):
        guard(clock).run(requests, 1e9)
    assert len(requests.times) == 4


def test_what_will_not_pass_is_told_at_once(clock):
    requests = Requests(clock, SearchError("bad_request", "too long a query"))
    with pytest.raises(SearchError, match="too long a query"):
        guard(clock).run(requests, 1060.0)
    assert len(requests.times) == 1 and not clock.sleeps


def test_a_bug_is_not_retried_and_goes_through(clock):
    def broken(seconds: float) -> str:
        raise KeyError("oops")

    with pytest.raises(KeyError, match="oops"):
        guard(clock).run(broken, 1060.0)
    assert not clock.sleeps


def test_retry_after_is_waited_for_when_it_fits(clock):
    requests = Requests(clock, passing("rate_limited", 7.0))
    assert guard(clock).run(requests, 1060.0) == "rows"
    assert 7.0 <= requests.times[1][0] - 1000.0 <= 7.5 and len(clock.sleeps) == 1


def test_retry_after_past_the_deadline_ends_it_at_once_and_spares_the_server(clock):
    guarded, requests = guard(clock), Requests(clock, passing("rate_limited", 90.0))
    with pytest.raises(SearchError, match="a bad moment"):
        guarded.run(requests, 1060.0)
    assert not clock.sleeps
    with pytest.raises(SearchError, match="wants no requests for 90 s"):  # the next caller isn't even sent
        guarded.run(requests, 1060.0)
    assert len(requests.times) == 1
    clock.now += 90.0
    assert guarded.run(requests, 2000.0) == "rows"


def test_no_retry_starts_past_the_deadline(clock):
    limits = Limits(rate=1000.0, burst=1000.0, attempts=100, backoff_s=8.0)
    for _ in range(50):
        start, requests = clock.now, Requests(clock, *(passing() for _ in range(200)))
        with pytest.raises(SearchError):
            guard(clock, limits).run(requests, start + 10.0)
        assert all(asked < start + 10.0 and seconds > 0 for asked, seconds in requests.times)
        clock.now += 1000.0


def test_every_try_takes_a_turn_of_the_rate_limit(clock):
    counts: list[str] = []
    limits = Limits(rate=0.1, burst=1.0, backoff_s=0.01)
    requests = Requests(clock, passing(), passing())
    guard(clock, limits, counts).run(requests, 2000.0)
    assert [round(asked) for asked, _ in requests.times] == [1000, 1010, 1020]
    assert counts.count("throttled") == 2


def test_closing_wakes_who_waits():
    guarded, failed = Guard(Limits(rate=0.01, burst=1.0)), []
    guarded.run(lambda seconds: None, float("inf"))

    def wait() -> None:
        try:
            guarded.run(lambda seconds: None, float("inf"))  # a hundred seconds for its turn
        except SearchError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    guarded.close()
    thread.join(timeout=20)
    assert not thread.is_alive() and failed[0].kind == "internal" and not failed[0].fault


# The circuit breaker.


def fail(breaker: CircuitBreaker, fault: bool = True) -> str:
    """What a failing call inside got to hear; "reached" when it was let through."""
    try:
        with breaker.guarding():
            raise SearchError("connection", "reached", fault=fault)
    except SearchError as error:
        return str(error)


def succeed(breaker: CircuitBreaker) -> bool:
    try:
        with breaker.guarding():
            return True
    except SearchError as error:
        assert error.kind == "no_backend" and not error.fault and not error.retryable
        return False


def test_breaker_opens_after_faults_in_a_row_only(clock):
    breaker = CircuitBreaker(3, 30.0, clock)
    for _ in range(5):
        assert [fail(breaker), fail(breaker), succeed(breaker)] == ["reached", "reached", True]
    assert [fail(breaker) for _ in range(3)] == ["reached"] * 3
    assert fail(breaker) == "failed 3 times in a row and is asked again in 30 s; last: reached"
    assert not succeed(breaker)


def test_bad_queries_and_bugs_do_not_open_it(clock):
    breaker = CircuitBreaker(1, 30.0, clock)
    fail(breaker, fault=False)
    with pytest.raises(KeyError), breaker.guarding():
        raise KeyError
    assert succeed(breaker)


def test_one_probe_at_a_time_decides(clock):
    opened: list[int] = []
    breaker = CircuitBreaker(1, 30.0, clock, lambda: opened.append(1))
    fail(breaker)
    clock.now += 29.9
    assert not succeed(breaker)
    clock.now += 0.2
    with breaker.guarding():  # the probe is under way
        assert "being tried" in fail(breaker)
        assert not succeed(breaker)
    assert succeed(breaker) and succeed(breaker)
    fail(breaker)
    clock.now += 30.0
    assert fail(breaker) == "reached"  # a failed probe opens it for another cool-down
    clock.now += 29.9
    assert not succeed(breaker)
    assert len(opened) == 3


def test_a_probe_that_says_nothing_leaves_the_next_to_try(clock):
    breaker = CircuitBreaker(1, 30.0, clock)
    fail(breaker)
    clock.now += 30.0
    fail(breaker, fault=False)
    with pytest.raises(KeyError), breaker.guarding():
        raise KeyError
    assert succeed(breaker) and succeed(breaker)


def test_a_success_from_before_it_opened_does_not_close_it(clock):
    breaker = CircuitBreaker(1, 30.0, clock)
    with breaker.guarding():
        fail(breaker)
    assert not succeed(breaker)


def test_an_outage_costs_a_few_requests_however_many_search(clock):
    """The family's outage: 512 retries a query. Here a thousand queries in ten minutes of outage."""
    counts: list[str] = []
    guarded = guard(clock, counts=counts)
    for _ in range(1000):
        with pytest.raises(SearchError):
            guarded.run(Requests(clock, *(passing("connection") for _ in range(9))), clock.now + 30.0)
        clock.now += 0.6
    # five searches of four requests open it, then one probe of four each 30 s
    assert counts.count("requests") <= 4 * (5 + 600 / 30 + 1)
    assert 2 <= counts.count("breaker_opened") <= 22


def test_breaker_is_one_for_all_threads(clock):
    limits = Limits(rate=1000.0, burst=1000.0, attempts=1, failures=5)
    guarded, asked, barrier = guard(clock, limits), [], threading.Barrier(8)

    def search() -> None:
        def request(seconds: float) -> None:
            asked.append(1)
            raise passing("connection")

        barrier.wait(timeout=30)
        for _ in range(100):
            with pytest.raises(SearchError):
                guarded.run(request, 2000.0)

    threads = [threading.Thread(target=search) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert 5 <= len(asked) <= 12  # five, and what the other seven had under way
