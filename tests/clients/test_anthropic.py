"""The unchanged `anthropic` client against the messages endpoints."""
import anthropic
import pytest
from conftest import png

WEATHER = {"name": "weather", "description": "Weather of a city",
           "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}


def user(text):
    return [{"role": "user", "content": text}]


def test_models(claude):
    assert [m.id for m in claude.models.list()] == ["tiny"]


def test_message(claude):
    answer = claude.messages.create(model="tiny", max_tokens=100, messages=user("Say hello"), system="Be kind.")
    assert [b.type for b in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "The user wants a greeting." and answer.content[0].signature
    assert answer.content[1].text == "Hello there!"
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0


def test_message_stream(claude):
    with claude.messages.stream(model="tiny", max_tokens=100, messages=user("Say hello")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello there!" and final.content[1].text == text
    assert final.content[0].thinking == "The user wants a greeting." and final.content[0].signature
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0


def test_tools_and_their_result(claude):
    first = claude.messages.create(model="tiny", max_tokens=200, messages=user("Weather in Oslo"), tools=[WEATHER])
    used = first.content[-1]
    assert first.stop_reason == "tool_use" and used.type == "tool_use" and used.input == {"city": "Oslo", "days": 3}
    turns = user("Weather in Oslo") + [{"role": "assistant", "content": [b.model_dump() for b in first.content]},
                                       {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "12 degrees and rain"}]}]
    second = claude.messages.create(model="tiny", max_tokens=200, messages=turns, tools=[WEATHER])
    assert second.content[-1].text == "It is 12 degrees and raining in Oslo."


def test_tools_streamed(claude):
    with claude.messages.stream(model="tiny", max_tokens=300, messages=user("Weather in two"), tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert [b.input["city"] for b in final.content if b.type == "tool_use"] == ["Oslo", "Rome"]


def test_images_and_stop(claude):
    source = {"type": "base64", "media_type": "image/png", "data": png()}
    content = [{"type": "text", "text": "Say hello to"}, {"type": "image", "source": source}]
    assert claude.messages.create(model="tiny", max_tokens=100, messages=user(content)).content[-1].text == "Hello there!"
    stopped = claude.messages.create(model="tiny", max_tokens=100, messages=user("Count to three"), stop_sequences=[" STOP"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " STOP" and stopped.content[-1].text == "one two three"


def test_count_tokens_and_cache(claude):
    count = claude.messages.count_tokens(model="tiny", messages=user("Say hello, please"), tools=[WEATHER]).input_tokens
    usages = [claude.messages.create(model="tiny", max_tokens=50, messages=user("Say hello, please"), tools=[WEATHER]).usage for _ in range(2)]
    for usage in usages:
        assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usages[1].cache_read_input_tokens == count - 1


def test_limits(claude):
    assert claude.messages.create(model="tiny", max_tokens=2, messages=user("Say hello")).stop_reason == "max_tokens"
    thinking = claude.messages.create(model="tiny", max_tokens=1200, messages=user("Say hello"), thinking={"type": "enabled", "budget_tokens": 1024})
    assert thinking.thinking_mode == "enabled"


def test_errors(claude, server):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=5, messages=user([{"type": "document", "source": {}}]))
    assert caught.value.body["error"]["param"] == "messages[0].content[0].type"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=user("x"))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server, api_key="wrong", max_retries=0).messages.create(model="tiny", max_tokens=5, messages=user("x"))
