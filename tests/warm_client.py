"""The client of warm.py's warm_program: `python -I -S warm_client.py SOCKET WORDS`. It imports little, and so starts at
once."""

import json
import os
import signal
import socket
import sys

place, *words = sys.argv[1:]
asked = socket.socket(socket.AF_UNIX)
asked.connect(place)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda sent, _: asked.send(bytes([sent])))
data = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(asked, [b"%8d" % len(data)], [0, 1, 2])
asked.sendall(data)
code = int(asked.recv(16) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
