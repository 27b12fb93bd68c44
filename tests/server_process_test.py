#!/usr/bin/env python3
"""`m3 serve` as a process: what a kill leaves behind, what many clients leave behind, how many threads it has.

    tests/server_process_test.py build/cpu/m3 tests/golden/models/tiny-vl [TEST...]
"""
import base64
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib

M3, MODEL = "", ""
# What the build tells: sanitizers keep freed memory and report to stderr; without OpenMP a model has one thread.
SANITIZED = bool(os.environ.get("M3_SANITIZE"))
OPENMP = os.environ.get("M3_OPENMP", "ON") == "ON"
JSON = {"Content-Type": "application/json"}


class Server:
    """A process on any free port, or on the given one, that does not outlive its test."""

    def __init__(self, test, *flags, port=0):
        command = [M3, "serve", MODEL, "--dtype", "f32", "--port", str(port), *map(str, flags)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None if SANITIZED else subprocess.DEVNULL, text=True,
                                        env={**os.environ, "M3_LOG": "error", "OMP_WAIT_POLICY": "passive"})
        test.addCleanup(self.kill)
        line = self.process.stdout.readline()
        assert line.startswith("ready on"), f"the server did not start: {line!r}"
        self.port = int(line.rsplit(":", 1)[1])

    def call(self, method, path, body=None, headers=JSON, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        return reply.status, data

    def open_stream(self, path, body):
        """The socket of a streamed answer."""
        text = json.dumps(body)
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     f"Content-Length: {len(text)}\r\n\r\n{text}".encode())
        return sock

    def upload(self, content):
        head = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nvision\r\n--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.png\"\r\n\r\n"
        status, data = self.call("POST", "/v1/files", head.encode() + content + b"\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"})
        assert status == 200, data
        return json.loads(data)["id"]

    def metrics(self):
        """name{label="..."} without the model's label: value."""
        values = {}
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            if not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                values[re.sub(r'model_name="[^"]*",?', "", key).replace("{}", "")] = float(value)
        return values

    def wait_until_idle(self, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            m = self.metrics()
            if m["vllm:num_requests_running"] == m["vllm:num_requests_waiting"] == m['m3:cache_blocks{state="used"}'] == 0:
                return m
            time.sleep(0.05)
        raise AssertionError(f"not idle after {seconds} s: {self.call('GET', '/v1/requests')}")

    def proc(self, name):
        return pathlib.Path(f"/proc/{self.process.pid}/{name}")

    def resident_mib(self):
        return int(re.search(r"VmRSS:\s+(\d+) kB", self.proc("status").read_text())[1]) / 1024

    def num_threads(self):
        return len(os.listdir(self.proc("task")))

    def num_open_files(self):
        return len(os.listdir(self.proc("fd")))

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def png(shade):
    """A grey picture of 56 x 56."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = (b"\0" + bytes([shade]) * 56) * 56
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 56, 56, 8, 0, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def image_part(shade):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(shade)).decode()}}


class Kill(unittest.TestCase):
    def test_kill_amid_streams_and_restart_on_the_same_port(self):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(self, "--files-dir", folder)
            uploads = [server.upload(png(shade)) for shade in (10, 20)]
            streams = [server.open_stream("/v1/completions", {"prompt": f"stream {i}", "max_tokens": 4000, "ignore_eos": True, "stream": True}) for i in range(8)]
            for stream in streams:
                self.assertIn(b"200 OK", stream.recv(4096))
            self.assertEqual({p.name for p in pathlib.Path(folder).iterdir()}, set(uploads))
            server.kill()
            # What a kill in the middle of an upload may leave.
            (pathlib.Path(folder) / "file-0123456789abcdef.partial").write_bytes(b"half")
            (pathlib.Path(folder) / "notes.txt").write_text("somebody else's")

            again = Server(self, "--files-dir", folder, port=server.port)
            for stream in streams:
                stream.close()
            self.assertEqual([p.name for p in pathlib.Path(folder).iterdir()], ["notes.txt"], "earlier uploads are gone, nothing else is")
            self.assertEqual(json.loads(again.call("GET", "/v1/files")[1])["data"], [])
            self.assertEqual(again.call("GET", "/v1/files/" + uploads[0])[0], 404)
            content = [{"type": "text", "text": "see"}, {"type": "file", "file": {"file_id": again.upload(png(10))}}]
            status, data = again.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 3})
            self.assertEqual(status, 200, data)
            self.assertEqual(again.wait_until_idle()["m3:media_encoded_total"], 1)
            self.assertEqual(again.end(), 0)


def computed_tokens(test, server, text):
    """Of a prompt: those that were not cached."""
    status, data = server.call("POST", "/v1/completions", {"prompt": text, "max_tokens": 4, "temperature": 0})
    test.assertEqual(status, 200, data)
    usage = json.loads(data)["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


class CacheFile(unittest.TestCase):
    def test_the_next_server_finds_what_this_one_computed(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "cache"
            texts = [f"{i} " + "word " * 100 for i in range(3)]
            for start in range(3):
                server = Server(self, "--cache-file", file)
                for text in texts:
                    self.assertEqual(computed_tokens(self, server, text) == 1, start > 0)
                if start == 1:
                    server.kill()  # leaves the file of the start before
                else:
                    self.assertEqual(server.end(), 0)
                self.assertEqual([p.name for p in pathlib.Path(folder).iterdir()], ["cache"])
            with open(file, "r+b") as damaged:
                damaged.truncate(file.stat().st_size - 1)
            server = Server(self, "--cache-file", file)
            self.assertEqual([computed_tokens(self, server, text) for text in texts][:2], [1, 1], "what stands before the damage")
            self.assertEqual(server.end(), 0)


class Offload(unittest.TestCase):
    def test_chats_come_back_from_the_file_and_a_kill_leaves_none(self):
        with tempfile.TemporaryDirectory() as folder:
            flags = ("--cache-tokens", 256, "--offload-dir", folder, "--offload-gib", 0.05)
            server = Server(self, *flags)
            texts = [f"{chat} " + "word " * 100 for chat in range(6)]
            for text in texts:
                self.assertGreater(computed_tokens(self, server, text), 50)
            for text in texts:
                self.assertEqual(computed_tokens(self, server, text), 1, "only the last token is computed again")
            metrics = server.metrics()
            self.assertGreater(metrics["m3:offload_restored_blocks_total"], 20)
            self.assertEqual(metrics["m3:offload_failures_total"], 0)
            self.assertLess(metrics["m3:offload_capacity_blocks"] * metrics["m3:cache_block_bytes"], 0.05 * 2**30 + 1)
            server.kill()
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


def random_request(rng):
    """(path, body); all kinds of work that the server knows."""
    kind = rng.randrange(8)
    words = " ".join(rng.choice(("red", "green", "blue", "one", "two")) for _ in range(rng.choice((3, 20, 60, 400))))
    common = {"max_tokens": rng.randint(1, 30), "stream": rng.random() < 0.5}
    messages = [{"role": "user", "content": words}]
    if kind == 0:
        return "/v1/completions", {"prompt": [words, "two"], "ignore_eos": True, "n": 2, "logprobs": 3, **common}
    if kind == 1:
        return "/v1/messages", {"model": pathlib.Path(MODEL).name, "messages": messages, **common}
    if kind == 2:
        common["max_output_tokens"] = common.pop("max_tokens")
        return "/v1/responses", {"input": words, **common}
    if kind == 3:
        schema = {"type": "object", "properties": {"a": {"enum": ["x", words[:20]]}}, "required": ["a"], "additionalProperties": False}
        return "/v1/chat/completions", {"messages": messages, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **common}
    if kind == 4:
        return "/v1/chat/completions", {"messages": messages, "tools": [TOOL], "tool_choice": "required", **common}
    if kind == 5:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": [image_part(rng.randrange(8)), {"type": "text", "text": words}]}], **common}
    if kind == 6:
        return "/v1/chat/completions", {"messages": messages, "temperature": -1, **common}  # an error
    return "/v1/chat/completions", {"messages": messages, "stop": ["e"], "seed": 1, **common}


class Load(unittest.TestCase):
    # After some 600 requests the heap of all threads has found its size: +0.4 MiB in the next 600. Of the 500 below, 0.3 MiB
    # may be such rest; the state of an answer (tens of KiB with its texts, grammar and events) would come to more than this.
    MOST_GROWTH_MIB = 4

    def drive(self, server, num_requests, seed):
        """Eight clients; a third of them leave at any moment."""
        counts = {"answered": 0, "refused": 0, "left": 0}
        lock, todo = threading.Lock(), iter(range(num_requests))

        def client(number):
            rng = random.Random(seed * 100 + number)
            while True:
                with lock:
                    if next(todo, None) is None:
                        return
                path, body = random_request(rng)
                try:
                    if rng.random() < 0.33:
                        sock = server.open_stream(path, body)
                        time.sleep(rng.random() * 0.05)
                        sock.close()
                        outcome = "left"
                    else:
                        status, data = server.call("POST", path, body)
                        outcome = {200: "answered", 400: "refused"}.get(status, f"{status}: {data[:300]}")
                except Exception as error:  # no answer: seen by the test, not only by this thread
                    outcome = repr(error)
                with lock:
                    counts[outcome] = counts.get(outcome, 0) + 1

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts

    def test_mixed_requests_with_disconnects_leave_memory_pages_and_sockets_as_they_were(self):
        # A cache for less than what comes together: waiting, eviction and preemption take part, and all of it is soon touched.
        server = Server(self, "--context", 2048, "--cache-tokens", 2048, "--max-num-seqs", 8)
        self.drive(server, 700, seed=1)
        before = server.wait_until_idle()
        resident, files = server.resident_mib(), server.num_open_files()
        counts = self.drive(server, 500, seed=2)
        after = server.wait_until_idle()
        growth = server.resident_mib() - resident
        print(f"500 requests: {counts}, resident {resident:.1f} MiB {growth:+.1f} MiB, "
              f"{after['vllm:num_preemptions_total'] - before['vllm:num_preemptions_total']:.0f} preemptions", file=sys.stderr)
        self.assertEqual(set(counts), {"answered", "refused", "left"}, "nothing but answers and the refusals asked for")
        self.assertEqual(sum(counts.values()), 500)
        self.assertGreater(counts["answered"], 200)
        self.assertGreater(counts["left"], 100)
        if not SANITIZED:
            self.assertLess(growth, self.MOST_GROWTH_MIB)
        end = time.monotonic() + 10  # the connection of the last answer may still be closing
        while server.num_open_files() > files and time.monotonic() < end:
            time.sleep(0.05)
        self.assertLessEqual(server.num_open_files(), files)
        self.assertEqual(json.loads(server.call("GET", "/v1/requests")[1])["data"], [])
        pages = [after[f'm3:cache_blocks{{state="{state}"}}'] for state in ("used", "cached", "free")]
        self.assertEqual((pages[0], sum(pages)), (0, sum(before[f'm3:cache_blocks{{state="{state}"}}'] for state in ("cached", "free"))))
        self.assertGreater(after["m3:client_aborts_total"], before["m3:client_aborts_total"])
        self.assertEqual(server.end(), 0)


class Thinking(unittest.TestCase):
    """Of random weights: whatever they write, the mode is that of the flag and no marker is content."""

    def answer(self, server, path, turns):
        body = {"model": pathlib.Path(MODEL).name, "seed": len(turns)}
        if path == "/v1/responses":
            body = {**body, "input": turns, "max_output_tokens": 40}
            body.pop("seed")
        else:
            body = {**body, "messages": turns, "max_tokens": 40}
            if path == "/v1/messages":
                body.pop("seed")
        status, data = server.call("POST", path, body)
        self.assertEqual(status, 200, data)
        reply = json.loads(data)
        if path == "/v1/responses":
            text = "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
        elif path == "/v1/messages":
            text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        else:
            text = reply["choices"][0]["message"]["content"] or ""
        return reply["thinking_mode"], text

    def test_one_flag_sets_the_default_of_all_endpoints_and_every_turn(self):
        for mode in ("enabled", "disabled", "adaptive"):
            server = Server(self, "--default-thinking", mode)
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
                turns = []
                for turn in range(3):
                    turns.append({"role": "user", "content": f"turn {turn}"})
                    told, text = self.answer(server, path, turns)
                    self.assertEqual(told, mode)
                    self.assertNotIn("mm:think>", text)
                    turns.append({"role": "assistant", "content": text or "nothing"})
            self.assertEqual(server.end(), 0)


@unittest.skipUnless(OPENMP, "needs OpenMP")
class Threads(unittest.TestCase):
    def test_the_model_uses_as_many_as_were_asked_for(self):
        numbers = {}
        for asked in (1, 3):
            server = Server(self, "--threads", asked)
            content = [image_part(1), {"type": "text", "text": "word " * 300}]
            status, data = server.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 3})
            self.assertEqual(status, 200, data)
            numbers[asked] = server.num_threads()
            self.assertEqual(server.end(), 0)
        # Three: the loading thread and the engine's each have two helpers.
        self.assertIn(numbers[3] - numbers[1], (2, 4), numbers)


if __name__ == "__main__":
    M3, MODEL = sys.argv[1:3]
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
