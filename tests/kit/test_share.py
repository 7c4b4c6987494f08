"""The pool with servers that are objects of this process: who gets which request, and what happens to a server that fails."""

import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from grpo_tasks.kit import share
from grpo_tasks.kit.share import Pool, State
from schemas.errors import RolloutError, ServerBusyError, ServerGoneError
from schemas.metrics import QUEUE_DEPTH, REPLICAS_SERVING
from tests.processes.waiting import until


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


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(share, "RETRY_S", 0.05)
    monkeypatch.setattr(share, "FIRST_COOLDOWN_S", 0.02)


def pool_of(*shops, concurrency=4, max_failures=2, patience_s=0.0):
    def admit(shop):
        if not shop.alive:
            raise ServerGoneError("no answer", place=shop.address)
        shop.admissions, shop.policy = shop.admissions + 1, "present"

    def repair(shop):
        if not shop.alive:
            shop.restart()

    limits = {"concurrency": concurrency, "max_failures": max_failures, "patience_s": patience_s}
    return Pool(shops, admit=admit, repair=repair, **limits)


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


def raising(error):
    """A function that raises it."""
    return lambda: (_ for _ in ()).throw(error)


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


def test_a_dead_servers_requests_go_to_the_other_once():
    dying, other = Shop("dying"), Shop("other")
    other.delay_s = 0.002

    def fail():
        if len(dying.asked) >= 5:
            dying.alive = False
            raise ServerGoneError("killed", place="dying")

    dying.fail = fail
    pool = pool_of(dying, other, max_failures=0)
    # The first must not die before the second has been admitted.
    pool.refresh()
    answers = pool.run(range(50), ask, tokens=lambda _: 1)
    assert answers == squares(50)
    figures, events = pool.take_report()
    assert figures[REPLICAS_SERVING] == 1
    # One token an answer: had an answer been counted twice, the two rates would not add up to 50 answers.
    shares = [figures[f"replica/{number}/tokens_per_s"] for number in (0, 1)]
    assert sum(shares) / max(shares) == pytest.approx(50 / (50 - 4), rel=0.1)
    assert figures[QUEUE_DEPTH] > 0
    assert any("is left out after 1 failures" in event for event in events)
    assert pool.take_report() == ({}, ())


def test_an_own_dead_server_is_asked_again_only_once_admitted():
    shop = Shop("a")
    pool = pool_of(shop)
    pool.run(range(3), ask)
    shop.alive = False
    assert pool.run(range(20), ask) == squares(20)
    assert (shop.restarts, shop.admissions) == (1, 2)
    assert any("serves again" in event for event in pool.take_report()[1])


def test_a_server_that_fails_too_often_ends_the_last_batch():
    shop = Shop("a")
    shop.fail = raising(ServerGoneError("its engine died", place="a"))
    with pytest.raises(ServerGoneError, match="its engine died"):
        pool_of(shop, max_failures=2).run(range(5), ask)
    assert shop.admissions == 3


def test_a_refused_request_and_an_error_in_an_admission_are_raised():
    shops = [Shop("a"), Shop("b")]
    for shop in shops:
        shop.fail = raising(RolloutError("the prompt is too long"))
    with pytest.raises(RolloutError, match="too long"):
        pool_of(*shops).run(range(5), ask)
    assert all(shop.admissions <= 1 for shop in shops), "it is no fault of the server's"
    pool = Pool([Shop("a")], concurrency=1, admit=lambda _: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        pool.refresh()


def test_requests_held_by_a_hanging_server_are_answered_elsewhere():
    hung, other = Shop("hung"), Shop("other")
    hung.delay_s = 60
    pool = pool_of(hung, other, max_failures=0)
    pool.refresh()
    with background(lambda: pool.run(range(30), ask)) as found:
        until(lambda: len(hung.asked) == 4)
        pool.take_out(hung, ServerGoneError("its machine is gone", place="hung"))
    assert found == [squares(30)]
    # What it says in the end changes nothing.
    hung.released.set()
    assert pool.run(range(30), ask) == squares(30)
    assert Counter(other.asked)[29] == 2
    assert [replica.state for replica in pool.replicas] == [State.GONE, State.SERVING]


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
    assert sum("cannot be started again" in event for event in pool.take_report()[1]) == 1


def test_with_patience_a_batch_waits_for_a_server():
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


@pytest.mark.parametrize(("patience_s", "reached"), [(0.0, True), (0.0, False), (0.3, True)])
def test_patience_ends(monkeypatch, patience_s, reached):
    monkeypatch.setattr(share, "RETRY_S", 60.0)
    shops = [Shop("a", own=False), Shop("b", own=False)]
    pool = pool_of(*shops, patience_s=patience_s)
    if reached:
        pool.refresh()
    shops[0].alive = shops[1].alive = False
    began = time.monotonic()
    with pytest.raises(RolloutError, match="does not answer"):
        pool.run(range(5), ask)
    assert patience_s <= time.monotonic() - began < 30


def test_new_weights_reach_every_server_and_a_failed_one_later():
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

    pool = Pool([other], concurrency=4, admit=admit)
    pool.refresh()
    pool.add(late)
    with background(lambda: pool.run([3], lambda _, number: handing_over.wait(30) and number)):
        until(handing_over.is_set)
    policies.append("new")
    with background(pool.refresh):
        time.sleep(0.5)
        late.released.set()
    assert [shop.policy for shop in pool.serving] == ["new", "new"]


def test_a_busy_server_rests_and_then_gets_one_request_until_it_answers():
    shop = Shop("a")
    shop.delay_s = 0.005

    def fail():
        if shop.running > 3:
            raise ServerBusyError("too many requests", place="a")

    shop.fail = fail
    pool = pool_of(shop, concurrency=32, max_failures=1)
    assert pool.run(range(60), ask) == squares(60)
    assert (shop.restarts, shop.admissions) == (0, 1)
    assert pool.take_report()[1] == ()


def test_a_server_that_stays_busy_is_left_out():
    busy, other = Shop("busy"), Shop("other")
    busy.fail = raising(ServerBusyError("too many requests", place="busy"))
    other.delay_s = 0.01
    pool = pool_of(busy, other, max_failures=0)
    assert pool.run(range(200), ask) == squares(200)
    assert pool.replicas[0].state is State.GONE
    assert len(busy.asked) < 4 + share.MOST_BUSY


def test_without_admission_a_failed_server_rests_and_comes_back():
    shops = [Shop("a", own=False), Shop("b", own=False)]
    for shop in shops:
        shop.policy = "present"
    pool = Pool(shops, concurrency=1)
    shops[0].alive = False
    assert [pool.answer(lambda shop, number=number: shop.ask(number)) for number in range(5)] == squares(5)
    assert len(shops[0].asked) == 1
    shops[0].alive = True
    until(lambda: pool.answer(lambda shop: shop.ask(3)) == 9 and len(shops[0].asked) > 2)
    for shop in shops:
        shop.alive = False
    with pytest.raises(ServerGoneError, match="no answer"):
        pool.answer(lambda shop: shop.ask(3))


def test_patience_begins_again_with_every_answer():
    shop = Shop("a", own=False)
    shop.policy = "present"
    pool = Pool([shop], concurrency=1, patience_s=0.3)

    def fails_once():
        shop.fail = lambda: None
        raise ServerBusyError("a moment", place="a")

    for _ in range(2):
        shop.fail = fails_once
        assert pool.answer(lambda shop: shop.ask(3)) == 9
        time.sleep(0.4)


def test_the_pause_that_a_server_asks_for_is_kept():
    shop, sent = Shop("a", own=False), []

    def slow_down(_):
        sent.append(time.monotonic())
        if len(sent) == 1:
            fault = ServerBusyError("too many requests")
            fault.pause_s = 0.5
            raise fault
        return "answer"

    assert Pool([shop], concurrency=1, patience_s=10.0).answer(slow_down) == "answer"
    assert sent[1] - sent[0] >= 0.5
