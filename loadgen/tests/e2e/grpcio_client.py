"""Calls the demo service through the sidecar with gRPC's own C core, which is stricter about HTTP/2 and gRPC than the
Rust client: a reply put together wrongly fails here.

Usage: grpcio_client.py SIDECAR_HOST:PORT BACKEND_HTTP_URL
"""

import json
import queue
import sys
import time
import traceback
import urllib.request

import grpc

SERVICE = "/collapser.demo.v1.Demo/"
# However busy the machine is; nothing here takes more than a few seconds.
PATIENCE = 30


# --- Protobuf by hand: the few fields that are needed, so that no generated code is. ---


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def metadata(name, value):
    return field(1, name) + field(3 if isinstance(value, bytes) else 2, value)


def compute_request(key, latency_ms=0, fail=None, initial=(), trailing=()):
    request = field(1, key)
    if latency_ms:
        request += field(2, latency_ms)
    if fail:
        code, message = fail
        request += field(4, code) + field(5, message)
    request += b"".join(field(6, metadata(*pair)) for pair in initial)
    return request + b"".join(field(7, metadata(*pair)) for pair in trailing)


class Demo:
    """The demo service through the sidecar, and the backend's counters beside it."""

    def __init__(self, sidecar, backend):
        self.backend = backend
        self.channel = grpc.insecure_channel(sidecar)
        # Without serializers, messages are the bytes on the wire.
        self.compute = self.channel.unary_unary(SERVICE + "Compute")
        self.echo = self.channel.stream_stream(SERVICE + "Echo")

    def ask_backend(self, path, method="GET"):
        request = urllib.request.Request(self.backend + path, method=method)
        return urllib.request.urlopen(request, timeout=PATIENCE).read()

    def counts(self):
        return json.loads(self.ask_backend("/calls"))

    def calls(self, key):
        return self.counts()["per_key"].get(key, 0)

    def wait_for_flight(self, key):
        deadline = time.monotonic() + PATIENCE
        while not self.calls(key):
            assert time.monotonic() < deadline, f"no call of {key!r} reached the backend"
            time.sleep(0.01)


def failure_of(future):
    try:
        reply = future.result(timeout=PATIENCE)
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {reply!r}")


# --- What is tested ---


def test_a_hundred_calls_are_one_backend_call(demo):
    request = compute_request("hundred", latency_ms=2000)
    futures = [demo.compute.future(request) for _ in range(100)]
    replies = {future.result(timeout=PATIENCE) for future in futures}
    assert len(replies) == 1, f"{len(replies)} different replies"
    assert field(1, "hundred") in replies.pop()
    assert demo.calls("hundred") == 1, demo.counts()


def test_a_failure_keeps_its_message_and_trailers(demo):
    message = "Größe überschritten: 数据 ✗ 100 % sûr\n"
    trailing = [("x-detail", "one"), ("x-detail", "two"), ("detail-bin", bytes(range(256)))]
    request = compute_request("failure", latency_ms=1000, fail=(9, message), trailing=trailing)
    for future in [demo.compute.future(request) for _ in range(5)]:
        error = failure_of(future)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error
        assert error.details() == message, error.details()
        got = [(name, value) for name, value in error.trailing_metadata() if "detail" in name]
        assert sorted(got) == sorted(trailing), got
    assert demo.calls("failure") == 1, demo.counts()


def test_binary_metadata_passes_both_ways(demo):
    initial = [("initial-bin", bytes(range(256))), ("x-initial", "text")]
    trailing = [("trailing-bin", b"\x00\xff,\x80"), ("x-trailing", "text")]
    request = compute_request("binary", latency_ms=1000, initial=initial, trailing=trailing)
    # The test that runs this looks for it in what the backend has seen.
    sent = [("caller-bin", bytes(range(256)))]
    for future in [demo.compute.future(request, metadata=sent) for _ in range(5)]:
        assert field(1, "binary") in future.result(timeout=PATIENCE)
        for expected, got in ((initial, future.initial_metadata()), (trailing, future.trailing_metadata())):
            got = [(name, value) for name, value in got]
            missing = [pair for pair in expected if pair not in got]
            assert not missing, f"{missing} missing in {got}"
    assert demo.calls("binary") == 1, demo.counts()


def test_the_leaders_cancellation_is_its_own(demo):
    request = compute_request("cancelled", latency_ms=2000)
    leader = demo.compute.future(request)
    demo.wait_for_flight("cancelled")
    followers = [demo.compute.future(request) for _ in range(5)]
    leader.cancel()
    assert leader.cancelled()
    replies = {follower.result(timeout=PATIENCE) for follower in followers}
    assert len(replies) == 1, f"{len(replies)} different replies"
    assert demo.calls("cancelled") == 1, demo.counts()


def test_the_leaders_deadline_is_its_own(demo):
    request = compute_request("deadline", latency_ms=2000)
    leader = demo.compute.future(request, timeout=1)
    demo.wait_for_flight("deadline")
    followers = [demo.compute.future(request) for _ in range(5)]
    assert failure_of(leader).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    replies = {follower.result(timeout=PATIENCE) for follower in followers}
    assert len(replies) == 1, f"{len(replies)} different replies"
    assert demo.calls("deadline") == 1, demo.counts()


def test_a_bidirectional_stream_passes(demo):
    outgoing = queue.Queue()
    # A sentinel ends the caller's half.
    call = demo.echo(iter(outgoing.get, None), timeout=PATIENCE)
    # From 1 on: the backend leaves out a field that is zero.
    for index in range(1, 21):
        message = field(1, index) + field(2, bytes([index]) * 100)
        outgoing.put(message)
        assert next(call) == message, index
    outgoing.put(None)
    assert list(call) == []
    assert call.code() == grpc.StatusCode.OK


def main():
    sidecar, backend = sys.argv[1:]
    failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        demo = Demo(sidecar, backend)
        try:
            test(demo)
            print("ok  ", name)
        except Exception:
            failed += 1
            print("FAIL", name)
            traceback.print_exc(file=sys.stdout)
        demo.channel.close()
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
