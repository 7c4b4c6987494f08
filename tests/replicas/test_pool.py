"""The pool with servers that are objects of this process: who gets which request, and what happens to a server that fails."""

import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from grpo_tasks.replicas.pool import Pool, PoolLimits
from grpo_tasks.replicas.replica import Concurrency, State
from schemas.errors import RolloutError, ServerBusyError, ServerGoneError
from schemas.metrics import QUEUE_DEPTH, REPLICAS_SERVING


class Shop:
    """Answers a request with its square; `alive`, `own` and `delay_s` are set by the tests."""

    def __init__(self, name, *, own=True):
        self.address, self.own, self.alive, self.delay_s = name, own, True, 0.0
        self.fail = lambda: None
        self.asked, self.restarts, self.admissions = [], 0, 0
        self.running = self.most = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        self.policy = None

    def restart(self):
        if not self.own:
            raise RolloutError("the server does not answer", place=self.address)
        self.restarts, self.alive, self.policy = self.restarts + 1, True, None

    def ask(self, number):
        with self.lock:
            self.asked.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if not self.alive:
                raise ServerGoneError("no answer", place=self.address)
            self.fail()
            assert self.policy == "present", "a server that was not admitted was asked"
            if self.delay_s:
                self.released.wait(self.delay_s)
            return number * number
        finally:
            with self.lock:
                self.running -= 1


def pool_of(*shops, concurrency=4, max_restarts=2, **limits):
    def admit(shop):
        if not shop.alive:
            raise ServerGoneError("no answer", place=shop.address)
        shop.admissions, shop.policy = shop.admissions + 1, "present"

    settings = PoolLimits(concurrency, max_restarts, **{"retry_s": 0.05, **limits})
    return Pool(shops, settings, healthy=lambda shop: shop.alive, admit=admit)


def ask(shop, number):
    return shop.ask(number)


@contextmanager
def background(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    yield found
    thread.join(30)
    assert not thread.is_alive()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def squares(count):
    return [number * number for number in range(count)]


def test_answers_come_in_the_order_of_the_requests_and_both_servers_work():
    shops = [Shop("a"), Shop("b")]
    shops[0].delay_s = shops[1].delay_s = 0.005
    assert pool_of(*shops).run(range(60), ask) == squares(60)
    assert sorted(shops[0].asked + shops[1].asked) == [*range(60)]
    assert all(shop.asked and shop.most <= 4 for shop in shops)


def test_the_least_loaded_server_takes_the_next_request():
    slow, fast = Shop("slow"), Shop("fast")
    slow.delay_s, fast.delay_s = 0.3, 0.003
    pool_of(slow, fast).run(range(80), ask)
    # Taken in turns, each would have had 40.
    assert len(fast.asked) > 3 * len(slow.asked)


def test_the_requests_of_a_server_that_dies_are_given_to_the_other_one_and_none_is_lost_or_counted_twice():
    dying, other = Shop("dying"), Shop("other")
    other.delay_s = 0.002

    def fail():
        if len(dying.asked) >= 5:
            dying.alive = False
            raise ServerGoneError("killed", place="dying")

    dying.fail = fail
    pool = pool_of(dying, other, max_restarts=0)
    # The first must not die before the second has been admitted.
    pool.refresh()
    answers = pool.run(range(50), ask, tokens=lambda _: 1)
    assert answers == squares(50)
    figures = pool.take_figures()
    assert figures[REPLICAS_SERVING] == 1
    # One token an answer: had an answer been counted twice, the two rates would not add up to 50 answers.
    shares = [figures[f"replica/{number}/tokens_per_s"] for number in (0, 1)]
    assert sum(shares) / max(shares) == pytest.approx(50 / (50 - 4), rel=0.1)
    assert figures[QUEUE_DEPTH] > 0
    assert any("is left out after 1 failures" in event for event in pool.take_events())
    assert pool.take_events() == []


def test_an_own_server_that_died_is_restarted_and_asked_again_only_when_it_was_admitted():
    shop = Shop("a")
    pool = pool_of(shop)
    pool.run(range(3), ask)
    shop.alive = False
    assert pool.run(range(20), ask) == squares(20)
    assert (shop.restarts, shop.admissions) == (1, 2)
    assert any("serves again" in event for event in pool.take_events())


def test_a_server_that_fails_too_often_ends_the_batch_with_its_own_error_when_no_other_is_left():
    shop = Shop("a")
    shop.fail = lambda: (_ for _ in ()).throw(ServerGoneError("its engine died", place="a"))
    with pytest.raises(ServerGoneError, match="its engine died"):
        pool_of(shop, max_restarts=2).run(range(5), ask)
    assert shop.admissions == 3


def test_a_refused_request_ends_the_batch_because_no_other_server_would_take_it():
    shops = [Shop("a"), Shop("b")]
    for shop in shops:
        shop.fail = lambda: (_ for _ in ()).throw(RolloutError("the prompt is too long"))
    with pytest.raises(RolloutError, match="too long"):
        pool_of(*shops).run(range(5), ask)


def test_an_error_in_the_code_that_admits_a_server_is_raised_and_not_waited_for():
    pool = Pool([Shop("a")], PoolLimits(1, 1), healthy=lambda _: True, admit=lambda _: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        pool.refresh()


def test_the_requests_of_a_server_that_lags_are_given_to_an_idle_one_and_it_is_left_out():
    stuck, other = Shop("stuck"), Shop("other")
    stuck.delay_s = 60
    pool = pool_of(stuck, other, lag_s=0.2, max_restarts=0)
    assert pool.run(range(30), ask) == squares(30)
    assert stuck.asked
    assert [replica.state for replica in pool.replicas] == [State.GONE, State.SERVING]
    # What the stuck server says in the end changes nothing.
    stuck.released.set()
    assert pool.run(range(30), ask) == squares(30)
    assert Counter(other.asked)[29] == 2


def test_a_slow_answer_is_not_taken_for_a_lag_when_the_other_servers_copy_comes_later():
    first, second = Shop("first"), Shop("second")
    first.delay_s, second.delay_s = 0.5, 60
    pool = pool_of(first, second, lag_s=0.1, concurrency=1, max_restarts=0, drain_s=0.1)
    second.fail = lambda: second.released.set() if len(second.asked) == 1 else second.released.clear()
    # Request 1 is answered by `second` at once; it gets a copy of request 0, which `first` answers before it.
    assert pool.run(range(2), ask) == squares(2)
    assert pool.replicas[0].state is State.SERVING
    second.released.set()


def test_a_server_joins_in_the_middle_of_a_batch():
    first, late = Shop("first"), Shop("late")
    first.delay_s = late.delay_s = 0.01
    pool = pool_of(first, concurrency=1)
    with background(lambda: pool.run(range(100), ask)) as found:
        until(lambda: len(first.asked) > 3)
        pool.add(late)
    assert found == [squares(100)]
    assert late.admissions == 1
    assert len(late.asked) > 20


def test_a_foreign_server_that_was_away_serves_again_in_the_same_batch():
    away, other = Shop("away", own=False), Shop("other")
    away.alive = False
    away.delay_s = other.delay_s = 0.02
    pool = pool_of(away, other, concurrency=1)
    with background(lambda: pool.run(range(150), ask)) as found:
        until(lambda: any("cannot be started again" in event for event in pool._events))
        away.alive = True
        until(lambda: len(away.asked) > 3)
    assert found == [squares(150)]
    # It is tried again every 50 ms, and reported once.
    assert sum("cannot be started again" in event for event in pool.take_events()) == 1


def test_foreign_servers_that_are_all_away_end_the_batch_at_once():
    shops = [Shop("a", own=False), Shop("b", own=False)]
    shops[0].alive = shops[1].alive = False
    with pytest.raises(RolloutError, match="does not answer"):
        pool_of(*shops, retry_s=60).run(range(5), ask)


def test_with_patience_a_batch_waits_until_a_server_comes_back_or_another_one_joins():
    for back in (True, False):
        shop = Shop("a", own=False)
        pool = pool_of(shop, patience_s=60.0)
        pool.refresh()
        shop.alive = False
        with background(lambda pool=pool: pool.run([3], ask)) as found:
            time.sleep(0.5)
            assert not found
            if back:
                shop.alive = True
            else:
                pool.add(Shop("b", own=False))
        assert found == [[9]]


def test_patience_ends(caplog):
    shop = Shop("a", own=False)
    pool = pool_of(shop, patience_s=0.3)
    pool.refresh()
    shop.alive = False
    began = time.monotonic()
    with pytest.raises(RolloutError):
        pool.run([3], ask)
    assert time.monotonic() - began >= 0.3


def test_new_weights_are_handed_to_every_server_and_one_that_fails_follows_later():
    shops = [Shop("a"), Shop("b")]
    pool = pool_of(*shops)
    pool.refresh()
    shops[0].alive = False
    pool.refresh()
    assert shops[1].admissions == 2
    until(lambda: shops[0].restarts == 1)
    pool.run(range(10), ask)
    pool.refresh()
    assert [shop.policy for shop in shops] == ["present"] * 2


def test_an_admission_that_began_before_the_policy_changed_is_repeated():
    policies, handing_over = ["old"], threading.Event()
    late, other = Shop("late"), Shop("other")
    late.alive = False

    def admit(shop):
        policy = policies[-1]
        if shop is late:
            handing_over.set()
            shop.released.wait(30)
        shop.policy = policy

    pool = Pool([other], PoolLimits(4, 2, drain_s=0.1), healthy=lambda shop: shop.alive, admit=admit)
    pool.refresh()
    pool.add(late)
    with background(lambda: pool.run([3], lambda _, number: handing_over.wait(30) and number)):
        until(handing_over.is_set)
    policies.append("new")
    with background(pool.refresh):
        # Longer than what `refresh` waits for what is in progress.
        time.sleep(0.5)
        late.released.set()
    assert [shop.policy for shop in pool.serving] == ["new", "new"]


def test_an_overloaded_server_gets_half_as_many_requests_and_then_slowly_more():
    limit = Concurrency(16)
    limit.overloaded(began=1.0, now=2.0)
    assert limit.limit == 8
    # Sent before the limit was lowered: the same overload.
    limit.overloaded(began=1.5, now=3.0)
    assert limit.limit == 8
    for _ in range(8):
        limit.answered()
    assert 8.9 < limit.limit < 9.1
    for _ in range(1000):
        limit.answered()
    assert limit.limit == 16


def test_a_server_that_bears_few_requests_is_kept_with_few():
    shop = Shop("a")
    shop.delay_s = 0.005

    def fail():
        if shop.running > 3:
            raise ServerBusyError("too many requests", place="a")

    shop.fail = fail
    pool = pool_of(shop, concurrency=32, max_restarts=1)
    assert pool.run(range(300), ask) == squares(300)
    assert shop.restarts == 0
    assert pool.replicas[0].concurrency.limit < 12
    # Beyond the first burst hardly a request was refused.
    assert len(shop.asked) < 300 + 32 + 150


def test_a_server_that_stays_overloaded_is_taken_out_and_its_requests_are_answered_by_the_other():
    busy, other = Shop("busy"), Shop("other")
    busy.fail = lambda: (_ for _ in ()).throw(ServerBusyError("too many requests", place="busy"))
    other.delay_s = 0.002
    pool = pool_of(busy, other, max_restarts=0)
    assert pool.run(range(60), ask) == squares(60)
    assert pool.replicas[0].state is State.GONE
