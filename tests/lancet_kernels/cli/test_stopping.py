"""A process that is told to stop finishes what it does; told twice, it ends."""

import signal
import sys

import pytest

from lancet_kernels.cli.train import stop_requests
from tests.processes import started

PATIENT = """
import signal, time
from lancet_kernels.cli.train import stop_requests
with stop_requests() as asked:
    print("ready", flush=True)
    while asked.number < signal.SIGTERM:
        time.sleep(0.01)
    print("told", flush=True)
    time.sleep(60)
"""


def test_signal_is_noted_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_requests() as asked:
        assert asked.number == 0
        signal.raise_signal(signal.SIGINT)
        assert asked.number == signal.SIGINT
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.long
def test_second_signal_ends_the_process() -> None:
    with started(sys.executable, "-c", PATIENT) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
