"""PyTorch's end of `cargo xtask interop-store`: interop.py PEER RANK

PEER is the example interop_peer of comm-store, RANK a program whose ranks find each other and say "all right".
Everything stays on loopback. Prints a line for each check and, last, how many passed and failed.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

HERE = os.path.abspath(__file__)
LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)
RESULTS = {True: 0, False: 0}


def report(name, error=None):
    RESULTS[error is None] += 1
    print(f"ok {name}" if error is None else f"FAILED {name}: {error}", flush=True)


def check(name, f, *args):
    try:
        f(*args)
    except Exception as e:  # Whatever it is, the next check follows.
        report(name, f"{type(e).__name__}: {e}")
    else:
        report(name)


def same(got, want, what="value"):
    if got != want:
        raise AssertionError(f"{what}: {str(got)[:200]!r} instead of {str(want)[:200]!r}")


def raises(kind, f, *args):
    try:
        got = f(*args)
    except kind as e:
        return str(e)
    raise AssertionError(f"returned {got!r} instead of raising {kind.__name__}")


# ---- their client on our server

@contextmanager
def our_server(peer):
    server = subprocess.Popen([peer, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield int(server.stdout.readline())
    finally:
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def client(port, timeout=LONG):
    return dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


def basics(port):
    s = client(port)
    s.set("k", "v1")
    same(s.get("k"), b"v1")
    s.set("k", "")
    same(s.get("k"), b"")
    key = "é" * 2000
    s.set(key, "x")
    same(s.get(key), b"x")


def binary(port):
    s = client(port)
    every = bytes(range(256))
    s.set("bytes", every)
    same(s.get("bytes"), every)
    big = bytes(os.urandom(1 << 16)) * 120  # 7.5 MiB, below the limit of 8
    s.set("big", big)
    assert s.get("big") == big, "7.5 MiB came back changed"
    s.append("bytes", b"\x00end")
    same(s.get("bytes"), every + b"\x00end")


def too_big(port):
    s = client(port)

    def exchange():
        s.set("huge", b"x" * (9 << 20))
        return s.get("k")

    raises((dist.DistNetworkError, dist.DistStoreError, RuntimeError), exchange)
    client(port).set("still", "there")


def counts(port):
    s = client(port)
    same(s.add("n", 5), 5)
    same(s.add("n", -7), -2)
    same(s.get("n"), b"-2")
    s.set("n", "41")
    same(s.add("n", 1), 42)
    same(s.add("large", 2**62), 2**62)


def compare(port):
    s = client(port)
    same(s.compare_set("c", "x", "y"), b"x", "missing, expected")
    same(s.check(["c"]), False)
    same(s.compare_set("c", "", "1"), b"1", "missing, not expected")
    same(s.compare_set("c", "1", "2"), b"2", "equal")
    same(s.compare_set("c", "1", "3"), b"2", "different")


def waits(port):
    s = client(port)
    s.set("w1", "")
    s.wait(["w1", "w1"], LONG)
    start = time.monotonic()
    raises(dist.DistStoreError, s.wait, ["w1", "never"], SHORT)
    assert time.monotonic() - start >= 0.3, "too early"
    same(s.add("after", 1), 1, "the next answer")
    short = client(port, SHORT)
    raises(dist.DistStoreError, short.get, "never")
    same(short.add("after", 1), 2, "the next answer")
    threading.Timer(0.2, lambda: client(port).set("w2", "late")).start()
    s.wait(["w1", "w2"], LONG)
    same(s.get("w2"), b"late")
    same(s.check(["w1", "w2"]), True)
    same(s.check(["w1", "w3"]), False)


def keys(port):
    s = client(port)
    before = s.num_keys()
    s.set("d", "1")
    same(s.num_keys(), before + 1)
    assert "d" in s.list_keys(), s.list_keys()
    same(s.delete_key("d"), True)
    same(s.delete_key("d"), False)
    same(s.num_keys(), before)


def several(port):
    s = client(port)
    s.multi_set(["m1", "m2", "m3"], ["1", "", "333"])
    same(s.multi_get(["m3", "m1", "m2", "m3"]), [b"333", b"1", b"", b"333"])
    names = [f"many{i}" for i in range(2000)]
    s.multi_set(names, names)
    same(s.multi_get(names), [n.encode() for n in names])
    raises(dist.DistStoreError, client(port, SHORT).multi_get, ["m1", "never"])
    same(s.has_extended_api(), True)


def queues(port):
    s = client(port)
    s.queue_push("q", b"1\x00")
    s.queue_push("q", b"")
    same(s.queue_len("q"), 2)
    same(s.queue_pop("q"), b"1\x00")
    same(s.queue_pop("q"), b"")
    raises(dist.QueueEmptyError, s.queue_pop, "q", False)
    raises(dist.DistStoreError, client(port, SHORT).queue_pop, "q")
    threading.Timer(0.2, lambda: client(port).queue_push("q", "late")).start()
    same(s.queue_pop("q"), b"late")


def barrier(port):
    def member(i):
        client(port).barrier("bar", 4, LONG)
        done.append(i)

    done = []
    members = [threading.Thread(target=member, args=(i,)) for i in range(3)]
    [m.start() for m in members]
    time.sleep(0.3)
    same(done, [], "three of four")
    client(port).barrier("bar", 4, LONG)
    [m.join(30) for m in members]
    same(sorted(done), [0, 1, 2])
    raises(dist.DistStoreError, client(port).barrier, "alone", 2, SHORT)
    client(port).barrier("one", 1)


def prefixes(port):
    s = client(port)
    inner = dist.PrefixStore("in", dist.PrefixStore("out", s))
    inner.set("k", "1")
    same(s.get("out/in/k"), b"1")
    same(inner.get("k"), b"1")
    same(inner.add("n", 3), 3)
    same(inner.check(["k", "n"]), True)
    same(inner.delete_key("k"), True)


def together(port):
    def work(t):
        s = client(port)
        for i in range(100):
            s.add("sum", 1)
            if i % 10 == 0:
                s.set(f"t{i}/{t}", str(t))
                same(s.get(f"t{i}/{(t + 1) % 8}"), str((t + 1) % 8).encode())
        done.append(t)

    done = []
    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    same(sorted(done), list(range(8)))
    same(client(port).add("sum", 0), 800)


def world_of_clients(port):
    """What a world size and wait_for_workers add: each counts itself under init/."""
    made = []

    def member():
        made.append(dist.TCPStore("127.0.0.1", port, 3, False, LONG, wait_for_workers=True))

    members = [threading.Thread(target=member) for _ in range(3)]
    [m.start() for m in members]
    [m.join(30) for m in members]
    same(len(made), 3)
    same(made[0].clone().add("sum", 0), 800, "a clone's")


def their_client(peer):
    with our_server(peer) as port:
        for f in (basics, binary, too_big, counts, compare, waits, keys, several, queues, barrier, prefixes, together,
                  world_of_clients):
            check(f"torch's client on our server: {f.__name__}", f, port)


# ---- our client on their server

def our_client(peer, libuv):
    kind = "libuv" if libuv else "legacy"
    server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False, use_libuv=libuv)
    same(server.libuvBackend, libuv, "backend")
    server.set("from python", b"py\x00\xff")
    server.set("out/in/py", "nested")
    if libuv:
        server.queue_push("q/py", "element")
    ended = subprocess.run([peer, "check", str(server.port), kind], capture_output=True, text=True, timeout=240)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    for line in lines:
        name, _, why = line.partition(" ")[2].partition(": ")
        report(f"our client on torch's {kind} server: {name}", None if line.startswith("ok ") else why)
    check(f"our client on torch's {kind} server: all checks ran", same, (len(lines), ended.returncode), (16, 0), ended.stderr)
    check(f"our client on torch's {kind} server: what it left", lambda: same(server.get("from rust"), b"rs\x00\xfe."))


# ---- torch.distributed over our server

def gloo_rank(rank, how, port):
    if how == "store":
        dist.init_process_group("gloo", store=client(port), rank=rank, world_size=2, timeout=timedelta(seconds=60))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    x = torch.arange(1000, dtype=torch.float32) + rank
    dist.all_reduce(x)
    assert torch.equal(x, 2 * torch.arange(1000, dtype=torch.float32) + 1)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    same(objects, [{"rank": 0}, {"rank": 1}])
    half = dist.new_group([1])
    if rank == 1:
        dist.barrier(half)
    dist.barrier()
    dist.destroy_process_group()
    print("all right", flush=True)


def gloo(peer, how):
    with our_server(peer) as port:
        env = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
               "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [start([sys.executable, HERE, "--gloo", str(r), how, str(port)], {**env, "RANK": str(r)}) for r in range(2)]
        for r in ranks:
            ended(r, 0, "all right")


# ---- our ranks under torchrun

def start(command, env=None):
    log = tempfile.TemporaryFile("w+")
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                             env={**os.environ, **(env or {})})
    child.log = log
    return child


def ended(child, code, *texts, limit=120):
    try:
        got = child.wait(limit)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        got = "a hang"
    child.log.seek(0)
    out = child.log.read()
    right = (got == code) if code == 0 or got == "a hang" else (got != 0)
    missing = [t for t in texts if t not in out]
    if not right or missing:
        raise AssertionError(f"ended with {got}, without {missing}: ...{out[-1500:]}")
    return out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Rank 1 of the first attempt fails, the others wait for it; the second attempt succeeds.
FAILS_ONCE = 'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && [ "$RANK" = 1 ]; then sleep 1; exit 7; fi; exec "$0"'


def torchrun(*args):
    return [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2", *args]


def single_agent(rank, options, env, n, program=None, code=0):
    child = start(torchrun("--nproc-per-node", str(n), *options, "--no-python", *(program or [rank])), env)
    return ended(child, code, *([f"{n} ranks, all right"] if code == 0 else []))


def two_agents(rank, options_of, env=None, program=None):
    agents = []
    for i in range(2):
        options = ["--nnodes", "2", "--nproc-per-node", "2", *options_of(i)]
        agents.append(start(torchrun(*options, "--no-python", *(program or [rank])), env))
    errors, outs = [], []
    for a in agents:
        try:
            outs.append(ended(a, 0, limit=150))
        except AssertionError as e:
            errors.append(str(e))
    if errors:
        raise AssertionError(" | ".join(errors))
    assert any("4 ranks, all right" in o for o in outs), outs


def under_torchrun(rank):
    again = ["sh", "-c", FAILS_ONCE, rank]
    unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def c10d():
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "interop"]

    def static():
        return ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]

    one = [
        ("standalone", ["--standalone"], {}, 2, None, 0),
        ("standalone, 4 ranks", ["--standalone"], {}, 4, None, 0),
        ("standalone, legacy server", ["--standalone"], {"USE_LIBUV": "0"}, 2, None, 0),
        ("static rendezvous", static(), {}, 3, None, 0),
        ("c10d rendezvous", c10d(), {}, 3, None, 0),
        ("c10d rendezvous, a store of the ranks' own", c10d(), unshared, 3, None, 0),
        ("c10d rendezvous, legacy server", c10d() + ["--rdzv-conf", "use_libuv=0"], {"USE_LIBUV": "0"}, 2, None, 0),
        ("standalone, a failure and a restart", ["--standalone", "--max-restarts", "2"], {}, 3, again, 0),
        ("c10d, a failure and a restart", c10d() + ["--max-restarts", "2"], {}, 3, again, 0),
        ("c10d, own store, a failure and a restart", c10d() + ["--max-restarts", "2"], unshared, 3, again, 0),
        ("static, a failure and a restart", static() + ["--max-restarts", "2"], {}, 3, again, 0),
        ("a failure without restarts", ["--standalone"], {}, 3, again, 1),
    ]
    for name, options, env, n, program, code in one:
        check(f"our ranks under torchrun: {name}", single_agent, rank, options, env, n, program, code)
    both = c10d()
    check("our ranks under torchrun: two agents, c10d", two_agents, rank, lambda _: both)
    port = str(free_port())

    def node(i):
        return ["--node-rank", str(i), "--master-addr", "127.0.0.1", "--master-port", port]

    check("our ranks under torchrun: two agents, static", two_agents, rank, node)
    for more, env in (("", None), (", a store of the ranks' own", unshared)):
        # The agent whose rank fails counts a restart, the other one does not.
        options = c10d() + ["--max-restarts", "2"]
        name = f"our ranks under torchrun: two agents, c10d, a failure and a restart{more}"
        check(name, two_agents, rank, lambda _: options, env, again)


def main():
    if sys.argv[1] == "--gloo":
        return gloo_rank(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    peer, rank = map(os.path.abspath, sys.argv[1:3])
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    their_client(peer)
    our_client(peer, True)
    our_client(peer, False)
    for how in ("store", "env"):
        check(f"two gloo ranks over our server: {how}", gloo, peer, how)
    under_torchrun(rank)
    print(f"{RESULTS[True]} passed, {RESULTS[False]} failed", flush=True)
    return RESULTS[False] > 0


if __name__ == "__main__":
    sys.exit(main())
