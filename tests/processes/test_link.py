"""The parent's end of a worker's sockets: every wait ends by its deadline, and nothing but one whole frame is accepted."""

import fcntl
import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from grpo_tasks.processes.worker_main import HEADER, MAGIC, frame
from grpo_tasks.processes.worker_process import MalformedReplyError, WorkerEndedError, WorkerLink
from grpo_tasks.processes.worker_supervisor import EXIT_QUERY, READY

FOREVER = float("inf")


@pytest.fixture
def link():
    made = WorkerLink()
    yield made
    made.close()


def soon():
    return time.monotonic() + 0.1


def later():
    return time.monotonic() + 20.0


def test_one_whole_frame_is_received(link):
    data, _ = link.worker_ends
    data.send(frame(b"{}"))
    assert link.receive(2, later()) == b"{}"


def test_a_frame_larger_than_the_limit_is_refused_before_it_has_arrived(link):
    data, _ = link.worker_ends
    data.send(HEADER.pack(MAGIC, 3))
    with pytest.raises(MalformedReplyError, match="announced a reply of 3 bytes where 2 is the maximum"):
        link.receive(2, later())


@pytest.mark.parametrize("sent", [b"GRPX", b"x", frame(b"{}") + b"x", frame(b"{}") * 2])
def test_bytes_that_are_not_one_frame_are_refused(link, sent):
    link.worker_ends[0].send(sent)
    with pytest.raises(MalformedReplyError):
        link.receive(100, later())


def test_bytes_behind_a_frame_are_always_refused(link, monkeypatch):
    monkeypatch.setattr("grpo_tasks.processes.worker_process.CHUNK_BYTES", len(frame(b"{}")))
    link.worker_ends[0].send(frame(b"{}") + b"x")
    with pytest.raises(MalformedReplyError, match="more than one reply"):
        link.receive(100, later())


def test_a_worker_that_sends_nothing_costs_no_more_than_the_deadline(link):
    with pytest.raises(TimeoutError):
        link.receive(100, soon())


def test_a_worker_that_does_not_read_costs_no_more_than_the_deadline(link):
    with pytest.raises(TimeoutError):
        link.send(b"x" * 2**24, soon())


def test_bytes_that_arrive_one_by_one_do_not_postpone_the_deadline(link):
    data, _ = link.worker_ends
    size, stop = 2_000_000, threading.Event()
    data.send(HEADER.pack(MAGIC, size))
    data.setblocking(False)

    def feed():
        sent = 0
        # Without a pause, so that the parent finds something to read whenever it waits.
        while sent < size and not stop.is_set():
            with suppress(BlockingIOError):
                sent += data.send(b"x")

    feeder = threading.Thread(target=feed)
    feeder.start()
    with pytest.raises(TimeoutError):
        link.receive(size, soon())
    stop.set()
    feeder.join()


@pytest.mark.parametrize("end", ["data", "control"])
def test_a_closed_socket_shows_at_once(link, end):
    data, control = link.worker_ends
    {"data": data, "control": control}[end].close()
    with pytest.raises(WorkerEndedError):
        link.receive(100, later())


def test_the_acknowledgement_of_a_call_is_awaited_but_not_for_long(link):
    _, control = link.worker_ends
    # Nobody acknowledges, and the deadline is no help.
    link.begin_call("first", FOREVER)
    control.send(READY)
    link.begin_call("second", later())
    assert control.recv(100) == b"first\nsecond\n"
    with pytest.raises(BlockingIOError):
        link.control.recv(1)


@pytest.mark.parametrize("number", [None, 1_500])
def test_a_workers_end_is_read_from_a_high_descriptor(link, number):
    _, control = link.worker_ends
    if number:
        # select() would refuse descriptors above 1023.
        link.control = socket.socket(fileno=fcntl.fcntl(link.control.detach(), fcntl.F_DUPFD, number))
    link.control.setblocking(False)
    control.send(READY + json.dumps({"code": 3}).encode() + b"\n")
    link.begin_call("f", later())
    assert link.read_exit_report() == {"code": 3}
    assert control.recv(100) == f"f\n{EXIT_QUERY}\n".encode()


def test_no_report_is_an_empty_one_after_its_time_limit(link, monkeypatch):
    monkeypatch.setattr("grpo_tasks.processes.worker_process.REPORT_LIMIT_S", 0.1)
    assert link.read_exit_report() == {}
    link.worker_ends[1].send(b"no json\n")
    assert link.read_exit_report() == {}
