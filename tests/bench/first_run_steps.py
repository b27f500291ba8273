"""Steps that end well, badly, or not at all: what test_first_run.py lets `first_run` run."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

from bench.gpu.first_run import FACT


def say(**result: object) -> None:
    print(FACT + json.dumps(result), flush=True)


def main(name: str, device: str) -> None:
    say(device=device, interpreted=os.environ["TRITON_INTERPRET"])
    if name == "right":
        package = importlib.util.find_spec("lancet_kernels").origin
        say(package=package, part={"right": True})
    if name == "wrong":
        say(first={"right": True}, second={"deep": {"right": False}})
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        # In a session of its own, as ranks of a launcher have.
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        say(child=child.pid)
        print("a word before the end", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
