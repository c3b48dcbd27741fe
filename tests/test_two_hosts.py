"""Two hosts are one machine: torchrun on each, over a network, ends with the weights of a single process.

The hosts are network namespaces, joined by a virtual cable and by nothing else. Making them takes root and `ip`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from scenes import MINUTE, write_dataset
from test_training import run, weights

pytestmark = pytest.mark.slow
TORCHRUN = Path(__file__).parents[1] / "scripts" / "torchrun.sh"
CARD = "veth0"  # in each host
ADDRESSES = "10.77.0.1", "10.77.0.2"


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


def remove(host):
    """End whatever still runs in the namespace, then the namespace, and with it its end of the cable."""
    for pid in ip("netns", "pids", host).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", host)


@pytest.fixture
def hosts():
    """The names of two namespaces that reach each other under ADDRESSES."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (Debian's package iproute2)")
    unique = uuid.uuid4().hex[:8]
    a, b = names = f"detector-{unique}-a", f"detector-{unique}-b"
    commands = [["netns", "add", name] for name in names]
    commands.append(["-n", a, "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", b])
    for name, address in zip(names, ADDRESSES, strict=True):
        commands.append(["-n", name, "address", "add", f"{address}/24", "dev", CARD])
        commands += [["-n", name, "link", "set", card, "up"] for card in ("lo", CARD)]
        commands.append(["netns", "exec", name, "true"])
    with ExitStack() as stack:
        for name in names:
            stack.callback(remove, name)  # before it is made: a failed `add` may leave half of one
        for command in commands:
            if (done := ip(*command)).returncode:
                pytest.skip(f"network namespaces do not work here: ip {' '.join(command)}: {done.stderr.strip()}")
        yield names


def run_on_both(hosts, arguments, folder, seconds=150):
    """scripts/torchrun.sh with one process on each host; returns what each wrote."""
    environment = {**os.environ, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"}
    files = [folder / f"host{number}.txt" for number in (1, 2)]
    started = []
    for host, file in zip(hosts, files, strict=True):
        command = ["ip", "netns", "exec", host, TORCHRUN, ADDRESSES[0], "1", *arguments]
        with file.open("w") as output:
            started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + seconds
    while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    status = [one.poll() for one in started]
    for one in started:  # if one failed the other waits for it
        one.terminate()
    for one in started:
        with suppress(subprocess.TimeoutExpired):
            one.wait(timeout=10)
    written = [file.read_text() for file in files]
    assert status == [0, 0], "\n".join(["(None: did not end)", *written])
    return written


def sent_bytes(host):
    return json.loads(ip("-n", host, "-json", "-statistics", "link", "show", CARD).stdout)[0]["stats64"]["tx"]["bytes"]


@pytest.mark.long
def test_a_run_on_two_hosts_ends_with_the_weights_of_one_process(tmp_path, hosts):
    data = write_dataset(tmp_path / "data")
    common = [f"data={data}", f"model={MINUTE}", "imgsz=64", "nbs=8", "workers=0", "plots=false", "amp=fp32",
              "epochs=2", "bn=frozen", "accumulate_warmup=false", "optimizer=SGD", "device=cpu",
              f"project={tmp_path}"]  # fmt: skip
    written = run_on_both(hosts, [*common, "batch=2", "name=hosts"], tmp_path)
    assert sum(text.count("= 2 a micro-batch x 2 accumulated x 2 devices") for text in written) == 1

    assert run("train", *common, "batch=8", "name=alone") == 0
    together, alone = weights(tmp_path / "hosts"), weights(tmp_path / "alone")
    assert together.keys() == alone.keys()
    floating = {name: value for name, value in alone.items() if value.dtype.is_floating_point}
    for name, value in floating.items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-6)

    steps = 4  # 10 images at 8 a step are two windows, twice
    saved = torch.load(tmp_path / "hosts" / "weights" / "last.pt", weights_only=True)
    assert saved["step"] == steps
    gradients = 4 * steps * sum(value.numel() for name, value in floating.items() if name.startswith("model."))
    # The rank that prints sends weights, too; the other little but its gradients, once a step for two micro-batches.
    assert 0.9 < min(map(sent_bytes, hosts)) / gradients < 1.5  # 0.9: the norms' statistics have no gradient
