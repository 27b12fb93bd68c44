"""A scripted server and the unchanged official clients for the tests of this folder."""
import base64
import json
import os
import pathlib
import struct
import subprocess
import zlib

import anthropic
import openai
import pytest

NS = "]<]minimax[>["


def call(name, **arguments):
    """One tool call as the model writes it."""
    tags = "".join(f"{NS}<{key}>{value}{NS}</{key}>" for key, value in arguments.items())
    return f'{NS}<invoke name="{name}">{tags}{NS}</invoke>\n'


def block(*calls):
    return f"{NS}<tool_call>\n{''.join(calls)}{NS}</tool_call>"


# A coding agent at work (test_agent.py): it looks, answers without a call, edits with two calls at once, and submits.
EDIT = """python3 - <<'EOF'
import re
text = open("greet.py").read()
text = re.sub(r'"Helo, <(\\w+)>!"', r'"Hello, \\1 & all!"', text)
open("greet.py", "w").write(text)
EOF"""
AGENT = [
    {"when": "Mend the greeting in greet.py", "answer": f"<mm:think>First I look.</mm:think>I look at the file.\n{block(call('bash', command='cat -A greet.py; ls'))}[e~["},
    {"when": r"Helo, \u003cworld", "answer": "</mm:think>The word is misspelled.[e~["},
    {"when": "No tool calls found in the response", "answer": f"</mm:think>{block(call('bash', command=EDIT), call('bash', command='python3 greet.py'))}[e~["},
    {"when": r"Hello, world \u0026 all!", "answer": f"<mm:think>Done.</mm:think>{block(call('bash', command='echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat greet.py'))}[e~["},
]

# The last line whose text occurs in the prompt decides; prompts without one are answered by the model itself.
SCRIPT = [
    {"when": "Say hello", "answer": "<mm:think>The user wants a greeting.</mm:think>Hello there![e~["},
    {"when": "Count to three", "answer": "</mm:think>one two three STOP four[e~["},
    {"when": "Weather in Oslo", "answer": f"<mm:think>I need the tool.</mm:think>Let me see.\n{block(call('weather', city='Oslo', days=3))}[e~["},
    {"when": "Weather in two", "answer": f"</mm:think>{block(call('weather', city='Oslo', days=1), call('weather', city='Rome', days=2))}[e~["},
    {"when": "Talk on", "answer": "</mm:think>" + "on and " * 5000 + "[e~["},
    {"when": "12 degrees and rain", "answer": "</mm:think>It is 12 degrees and raining in Oslo.[e~["},
    *AGENT,
]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    process = subprocess.Popen([os.environ["M3_SCRIPTED_SERVER"], os.environ["M3_TEST_MODEL"], str(script)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "M3_LOG": "warn"})
    port = process.stdout.readline().strip()
    assert port, "the server did not start"
    yield f"http://127.0.0.1:{port}"
    process.stdin.close()
    assert process.wait(timeout=30) == 0, "the server ended with an error"


@pytest.fixture(scope="session")
def oai(server):
    return openai.OpenAI(base_url=server + "/v1", api_key="test-key", max_retries=0)


@pytest.fixture(scope="session")
def claude(server):
    return anthropic.Anthropic(base_url=server, api_key="test-key", max_retries=0)


def film():
    """12 frames of 48 x 64 at 25 a second."""
    return base64.b64encode((pathlib.Path(__file__).parents[1] / "golden/media/broken/mp4_good.mp4").read_bytes()).decode()


def png(width=56, height=56):
    """A plain red picture, without any library."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\0\0" * width) * height
    data = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    return base64.b64encode(data).decode()
