"""A headless Chromium that a test drives by its DevTools protocol, over a pipe: no port, no driver."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from itertools import count

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """One page; a context."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        command = [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--remote-debugging-pipe", "--window-size=1200,900", f"--user-data-dir={self._folder.name}",
                   "about:blank"]  # fmt: skip

        def in_place():  # Chromium reads 3 and writes 4
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=in_place, stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._numbers, self._left = count(1), b""
        (page,) = (one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def ask(self, method, **parameters):
        """The result of a command."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            pass  # an event
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self):
        while b"\0" not in self._left:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def value(self, expression):
        """What a JavaScript expression comes to."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression):
        """What it comes to once it is something; pytest's timeout ends the waiting."""
        while not (found := self.value(expression)):
            time.sleep(0.1)
        return found

    def put_file(self, selector, path):
        """Choose a file in an <input>."""
        root = self.ask("DOM.getDocument", depth=-1)["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", files=[str(path)], nodeId=node)
