"""The unchanged `openai` client against every OpenAI endpoint."""
import base64
import json

import openai
import pytest
from conftest import film, png

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a city",
           "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                          "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "bb"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["kind", "count"], "additionalProperties": False}


def user(text):
    return [{"role": "user", "content": text}]


def test_models(oai):
    models = list(oai.models.list())
    assert [m.id for m in models] == ["tiny"]
    assert oai.models.retrieve("tiny").max_model_len == 65536
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("other")


def test_chat(oai):
    answer = oai.chat.completions.create(model="tiny", messages=user("Say hello"))
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].message.reasoning_content == "The user wants a greeting."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    again = oai.chat.completions.create(model="tiny", messages=user("Say hello"))
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.id != answer.id


def test_chat_stream(oai):
    chunks = list(oai.chat.completions.create(model="tiny", messages=user("Say hello"), stream=True,
                                              stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == "Hello there!"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "The user wants a greeting."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices


def test_chat_tools_and_their_result(oai):
    first = oai.chat.completions.create(model="tiny", messages=user("Weather in Oslo"), tools=[WEATHER])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see.\n"  # as the model wrote it, so that the next prompt finds the same tokens cached
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 3}
    turns = user("Weather in Oslo") + [message.model_dump(exclude_none=True),
                                       {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees and rain"}]
    second = oai.chat.completions.create(model="tiny", messages=turns, tools=[WEATHER])
    assert second.choices[0].message.content == "It is 12 degrees and raining in Oslo."


def test_chat_tools_streamed_with_the_clients_own_accumulator(oai):
    with oai.chat.completions.stream(model="tiny", messages=user("Weather in two"), tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == ["Oslo", "Rome"]
    assert len({c.id for c in message.tool_calls}) == 2


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_json_schema(oai, mode, stream):
    options = dict(model="tiny", messages=user("Give me JSON"), seed=1, max_tokens=400, logit_bias={"1084": 9},
                   response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
                   extra_body={"thinking_mode": mode})
    if stream:
        chunks = list(oai.chat.completions.create(stream=True, **options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        text = oai.chat.completions.create(**options).choices[0].message.content
    value = json.loads(text)
    assert value["kind"] in ("a", "bb") and 0 <= value["count"] <= 9


def test_chat_json_object(oai):
    answer = oai.chat.completions.create(model="tiny", messages=user("Give me JSON"), seed=2, max_tokens=3000,
                                         response_format={"type": "json_object"}, extra_body={"thinking_mode": "disabled"})
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:  # random weights need not end; what came is the beginning of an object
        assert answer.choices[0].message.content.startswith("{")


def test_chat_images(oai):
    content = [{"type": "text", "text": "Say hello to"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png()}}]
    answer = oai.chat.completions.create(model="tiny", messages=user(content))
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.usage.prompt_tokens_details.image_tokens == 4


def test_chat_video(oai):
    def tokens(**options):
        content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + film(), **options}}, {"type": "text", "text": "Say hello to"}]
        answer = oai.chat.completions.create(model="tiny", messages=user(content))
        assert answer.choices[0].message.content == "Hello there!"
        details = answer.usage.prompt_tokens_details
        return details.video_tokens, details.cached_tokens, answer.usage.prompt_tokens

    assert tokens(fps=25)[0] == 24  # 12 frames of 48 x 64: six steps of two, each resized to 56 x 56, four tokens
    few, _, total = tokens()
    assert 0 < few < 24, "one frame a second is the default"
    assert tokens()[1] == total - 1, "the same film is found in the cache"
    with pytest.raises(openai.BadRequestError) as caught:
        content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + png()}}]
        oai.chat.completions.create(model="tiny", messages=user(content))
    assert "messages[0].content[0]" in caught.value.param


def test_files(oai):
    uploaded = oai.files.create(file=("red.png", base64.b64decode(png())), purpose="vision")
    assert uploaded.id in [f.id for f in oai.files.list()]
    content = [{"type": "text", "text": "Say hello to"}, {"type": "file", "file": {"file_id": uploaded.id}}]
    answer = oai.chat.completions.create(model="tiny", messages=user(content))
    assert answer.usage.prompt_tokens_details.image_tokens == 4
    assert oai.files.delete(uploaded.id).deleted
    with pytest.raises(openai.NotFoundError):
        oai.files.retrieve(uploaded.id)


def test_sampling_fields(oai):
    options = dict(model="tiny", messages=user("Anything"), seed=11, max_tokens=8, n=2, logprobs=True, top_logprobs=3, temperature=0.7)
    one, two = (oai.chat.completions.create(**options) for _ in range(2))
    assert [c.message.content for c in one.choices] == [c.message.content for c in two.choices]
    assert len(one.choices) == 2
    for token in one.choices[0].logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
    stopped = oai.chat.completions.create(model="tiny", messages=user("Count to three"), stop=[" STOP"])
    assert stopped.choices[0].message.content == "one two three"


def test_completions(oai):
    answer = oai.completions.create(model="tiny", prompt=["one", "two"], max_tokens=4, temperature=0, logprobs=2)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens > 0
    text = "".join(c.choices[0].text for c in oai.completions.create(model="tiny", prompt="one", max_tokens=4, temperature=0, stream=True))
    assert text == answer.choices[0].text


def test_responses(oai):
    answer = oai.responses.create(model="tiny", input="Say hello", instructions="Be kind.")
    assert answer.output_text == "Hello there!"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "The user wants a greeting."
    assert answer.usage.output_tokens_details.reasoning_tokens > 0 and answer.status == "completed"


def test_responses_stream(oai):
    with oai.responses.stream(model="tiny", input="Say hello") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Hello there!"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds and "response.reasoning_text.delta" in kinds


def test_responses_tools(oai):
    tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"], "strict": False}
    first = oai.responses.create(model="tiny", input="Weather in Oslo", tools=[tool])
    called = [item for item in first.output if item.type == "function_call"][0]
    assert json.loads(called.arguments) == {"city": "Oslo", "days": 3}
    turns = [{"role": "user", "content": "Weather in Oslo"}] + [item.model_dump(exclude_none=True) for item in first.output] + \
            [{"type": "function_call_output", "call_id": called.call_id, "output": "12 degrees and rain"}]
    assert oai.responses.create(model="tiny", input=turns, tools=[tool]).output_text == "It is 12 degrees and raining in Oslo."
    with oai.responses.stream(model="tiny", input="Weather in two", tools=[tool]) as stream:
        for _ in stream:
            pass
        calls = [i for i in stream.get_final_response().output if i.type == "function_call"]
    assert [json.loads(c.arguments)["city"] for c in calls] == ["Oslo", "Rome"]


def test_responses_image_and_schema(oai):
    content = [{"type": "input_text", "text": "Say hello to"}, {"type": "input_image", "image_url": "data:image/png;base64," + png(), "detail": "auto"}]
    answer = oai.responses.create(model="tiny", input=[{"role": "user", "content": content}])
    assert answer.output_text == "Hello there!"
    answer = oai.responses.create(model="tiny", input="Give me JSON", max_output_tokens=400, reasoning={"effort": "none"},
                                  text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}})
    assert json.loads(answer.output_text)["kind"] in ("a", "bb")


def test_responses_incomplete(oai):
    answer = oai.responses.create(model="tiny", input="Say hello", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


def test_errors(oai, server):
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model="tiny", messages=user("x"), temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        oai.chat.completions.create(model="other", messages=user("x"))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server + "/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model="tiny", messages=user("x " * 100000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        oai.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_request_id(oai):
    raw = oai.chat.completions.with_raw_response.create(model="tiny", messages=user("Say hello"))
    assert raw.headers["x-request-id"] in raw.parse().id
