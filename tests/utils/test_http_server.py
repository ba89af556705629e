"""What servers share: how they end."""

import asyncio
import os
import signal

from arealite.utils.http.server import stop_at_signals


def test_a_signal_that_comes_while_the_loop_is_closed_writes_to_no_closed_pipe():
    async def serve():
        with stop_at_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 30)
            # A second one is the same to it.
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        return signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)

    assert asyncio.run(serve()) == (signal.SIG_DFL, -1)
