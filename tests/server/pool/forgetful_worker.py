"""Entry of a worker process that forgets every other plan at once, which a worker never does."""

from __future__ import annotations

import socket
import sys

from npugrad_server.worker.descendants import leave
from npugrad_server.worker.loop import Worker
from npugrad_server.worker.protocol import Message
from npugrad_server.worker.run_again import RunAgain


class ForgetfulWorker(Worker):
    def _take(self, message: Message) -> None:
        if isinstance(message, RunAgain) and message.plan % 2 == 0:
            self._plans.clear()
        super()._take(message)


if __name__ == "__main__":
    leave(ForgetfulWorker(socket.socket(fileno=int(sys.argv[2]))).serve())
