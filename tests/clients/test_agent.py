"""A coding agent, unchanged from PyPI, mends a file through the server: mini-swe-agent by way of litellm, over the chat
completions of OpenAI and over the messages of Anthropic. The server's tokens are prescribed (conftest.AGENT), so that the
loop is the same each time; rendering, parsing and the protocol are the real ones."""
import json
import os
import pathlib
import subprocess
import sys

import pytest


def answers(trajectory):
    return [m["extra"]["response"] for m in trajectory["messages"] if "response" in m.get("extra", {})]


@pytest.mark.parametrize("model, path", [("openai/tiny", "/v1"), ("anthropic/tiny", "")])
def test_coding_agent(server, tmp_path, model, path):
    folder, log = tmp_path / "project", tmp_path / "trajectory.json"
    folder.mkdir()
    (folder / "greet.py").write_text('print("Helo, <world>!")\n')
    settings = {"model.model_kwargs.api_base": server + path, "model.model_kwargs.api_key": "test-key", "environment.cwd": folder}
    command = [pathlib.Path(sys.executable).with_name("mini"), "--yolo", "--exit-immediately", "--model", model, "--output", log,
               "--task", "Mend the greeting in greet.py", "--config", "mini.yaml"]
    for key, value in settings.items():
        command += ["--config", f"{key}={value}"]
    offline = {"HOME": str(tmp_path), "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1",
               "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run(command, env={**os.environ, **offline}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr

    trajectory = json.loads(log.read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["submission"] == (folder / "greet.py").read_text() == 'print("Hello, world & all!")\n'
    replies = answers(trajectory)
    assert [r["choices"][0]["finish_reason"] for r in replies] == ["tool_calls", "stop", "tool_calls", "tool_calls"]
    assert [len(r["choices"][0]["message"]["tool_calls"] or []) for r in replies] == [1, 0, 2, 1]
    assert replies[0]["choices"][0]["message"]["content"].strip() == "I look at the file."
    assert replies[0]["choices"][0]["message"]["reasoning_content"] == "First I look."
    # Each turn begins with the one before it, so most of the prompt comes from the cache.
    for before, after in zip(replies, replies[1:]):
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.9 * before["usage"]["prompt_tokens"]
