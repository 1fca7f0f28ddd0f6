"""A server process over a gated scripted engine, for tests that send signals.

Prints its port when it takes requests. Each line on stdin lets the engine do that many steps. Says "closed" and exits
with the server's code when the server has ended.
"""

from __future__ import annotations

import sys
import threading

from prometheus_client import CollectorRegistry
from scripted_engine import ByteTokenizer, PlainChat, Script, ScriptedEngine

from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.listen import reserve_port
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ServerLimits
from flexspec.runtime.server.serve import serve


def main(grace_s: float) -> int:
    engine = ScriptedEngine(gated=True)
    engine.script = Script([f"{number} " for number in range(20)])

    def feed() -> None:
        for line in sys.stdin:
            engine.allow(int(line))

    threading.Thread(target=feed, daemon=True).start()
    limits = ServerLimits(context_tokens=512)
    app = create_app(engine, ByteTokenizer(), PlainChat(), "m", Metrics(CollectorRegistry()), limits)
    listener = reserve_port("127.0.0.1", 0)
    port = listener.port
    code = serve(app, listener, grace_s=grace_s, on_ready=lambda: print(port, flush=True))
    engine.close()
    others = [thread.name for thread in threading.enumerate() if not thread.daemon]
    print("closed", *others, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
