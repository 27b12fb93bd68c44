#include "formats/safetensors.h"

#include <cstring>
#include <fstream>

#include "formats/test_support.h"

namespace m3 {
namespace {

// A file from its parts; `length` may lie about the header.
std::string file_bytes(const std::string& header, size_t data_bytes, uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data_bytes, 'x');
}
std::string file_bytes(std::string header, size_t data_bytes) {
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  return file_bytes(header, data_bytes, header.size());
}
SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes.data(), bytes.size())), "a.safetensors");
}

TEST(Safetensors, reads_what_it_wrote) {
  TemporaryFolder folder;
  std::vector<float> f32 = {1, -2, 3.5f, 0, 5, 6};
  std::vector<bf16> half = {bf16(1.0f), bf16(-0.5f), bf16(7.0f)};
  std::vector<int64_t> i64 = {-1, int64_t{1} << 40};
  std::vector<uint8_t> u8 = {0, 255, 7};
  const std::map<std::string, Tensor> tensors = {{"b.f32", Tensor(f32.data(), DType::kF32, {2, 3})},
                                                 {"a.half", Tensor(half.data(), DType::kBF16, {3})},
                                                 {"c.i64", Tensor(i64.data(), DType::kI64, {2, 1})},
                                                 {"d.u8", Tensor(u8.data(), DType::kU8, {3})},
                                                 {"e.e4m3", Tensor(u8.data(), DType::kE4M3, {3, 1, 1})},
                                                 {"f.scalar", Tensor(f32.data() + 2, DType::kF32, {})},
                                                 {"g.empty", Tensor(f32.data(), DType::kF32, {0, 4})}};
  const auto path = folder.path() / "a.safetensors";
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "\"quoted\" \n"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "\"quoted\" \n");
  for (const auto& [name, tensor] : tensors) {
    const Tensor read = file.get(name);
    EXPECT_EQ(read.dtype(), tensor.dtype()) << name;
    EXPECT_EQ(read.shape(), tensor.shape()) << name << read.shape().str();
    EXPECT_EQ(std::memcmp(read.data(), tensor.data(), tensor.bytes()), 0) << name;
  }
  EXPECT_FALSE(file.contains("b.f3"));
  expect_error([&] { file.get("nowhere"); }, {"a.safetensors", "'nowhere'", "7"});
}

TEST(Safetensors, reads_files_of_the_reference_library) {
  const SafetensorsFile file(golden_model("tiny-small-mxfp8") / "model-00001-of-00002.safetensors");
  EXPECT_EQ(file.entries().size(), 73u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const Tensor scales = file.get("language_model.model.layers.0.mlp.down_proj.weight_scale_inv");
  EXPECT_EQ(scales.dtype(), DType::kU8);
  EXPECT_EQ(scales.shape(), (Shape{64, 3}));
  EXPECT_EQ(file.get("language_model.model.layers.0.mlp.down_proj.weight").dtype(), DType::kE4M3);
}

TEST(Safetensors, exponent_type_is_read_as_bytes) {
  const SafetensorsHeader header =
      parse(file_bytes(R"({"s":{"dtype":"F8_E8M0","shape":[2,2],"data_offsets":[0,4]}})", 4));
  ASSERT_EQ(header.entries.size(), 1u);
  EXPECT_EQ(header.entries[0].dtype, DType::kU8);
  EXPECT_EQ(header.entries[0].stored_dtype, "F8_E8M0");
}

TEST(Safetensors, order_in_the_header_does_not_matter) {
  const SafetensorsHeader header = parse(file_bytes(
      R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"z":{"shape":[0],"data_offsets":[2,2],"dtype":"U8"},)"
      R"("a":{"data_offsets":[0,2],"shape":[2],"dtype":"U8"}}   )", 4));
  ASSERT_EQ(header.entries.size(), 3u);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[1].name, "z");
  EXPECT_EQ(header.entries[2].name, "b");
}

struct BrokenFile {
  const char* name;
  std::string bytes;
  std::vector<std::string> message;
};

std::string one(const std::string& fields) { return "{\"t\":{" + fields + "}}"; }

std::vector<BrokenFile> broken_files() {
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  return {
      {"empty", "", {"0 bytes", "too short"}},
      {"seven bytes", "1234567", {"7 bytes", "too short"}},
      {"no header", file_bytes("", 0), {"does not begin with '{'"}},
      {"length beyond the file", file_bytes("{}", 0, 3), {"header length 3", "only 2 bytes"}},
      {"length beyond the limit", file_bytes("{}", 0, 100'000'001), {"100000001", "limit of 100000000"}},
      {"length of 2^64 - 1", file_bytes("{}", 0, ~uint64_t{0}), {"18446744073709551615", "limit"}},
      {"not JSON", file_bytes("{hello}", 0), {"not JSON"}},
      {"cut JSON", file_bytes(R"({"t":{"dtype":"F32")", 0), {"not JSON"}},
      {"text after the JSON", file_bytes("{}{}", 0), {"not JSON"}},
      {"invalid UTF-8", file_bytes("{\"\xff\":{}}", 0), {"not JSON"}},
      {"an array", file_bytes(" []", 0), {"does not begin with '{'"}},
      {"tensor is a number", file_bytes(R"({"t":5})", 0), {"a number", "'t'"}},
      {"tensor is null", file_bytes(R"({"t":null})", 0), {"null", "'t'"}},
      {"deep nesting", file_bytes("{\"t\":" + std::string(100000, '['), 0), {"an array", "'t'"}},
      {"no dtype", file_bytes(one(R"("shape":[2],"data_offsets":[0,8])"), 8), {"'t' has no dtype"}},
      {"no shape", file_bytes(one(R"("dtype":"F32","data_offsets":[0,8])"), 8), {"'t' has no shape"}},
      {"no offsets", file_bytes(one(R"("dtype":"F32","shape":[2])"), 8), {"'t' has no data_offsets"}},
      {"unknown field", file_bytes(one(good + R"(,"strides":[1])"), 8), {"'t'", "'strides'"}},
      {"repeated field", file_bytes(one(good + R"(,"dtype":"F32")"), 8), {"'t'", "repeated", "'dtype'"}},
      {"unknown type", file_bytes(one(R"("dtype":"F16","shape":[2],"data_offsets":[0,4])"), 4),
       {"'t'", "'F16'", "BF16", "F8_E4M3"}},
      {"type is a number", file_bytes(one(R"("dtype":3,"shape":[2],"data_offsets":[0,4])"), 4), {"'t'", "text for dtype"}},
      {"shape is text", file_bytes(one(R"("dtype":"F32","shape":"2","data_offsets":[0,8])"), 8), {"'t'", "array for shape"}},
      {"negative axis", file_bytes(one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8), {"'t'", "-2"}},
      {"fractional axis", file_bytes(one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8), {"'t'", "2.0"}},
      {"seven axes", file_bytes(one(R"("dtype":"F32","shape":[1,1,1,1,1,1,2],"data_offsets":[0,8])"), 8),
       {"'t'", "more than 6 axes"}},
      {"axis beyond bounds", file_bytes(one(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])"), 8),
       {"'t'", "9223372036854775808", "2^48"}},
      {"product of axes overflows",
       file_bytes(one(R"("dtype":"F32","shape":[281474976710656,281474976710656],"data_offsets":[0,8])"), 8),
       {"'t'", "overflows"}},
      {"one offset", file_bytes(one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8), {"'t'", "1 data_offsets"}},
      {"three offsets", file_bytes(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), 8),
       {"'t'", "more than two"}},
      {"end before begin", file_bytes(one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8),
       {"'t'", "[8, 0]", "end before the begin"}},
      {"size disagrees with shape", file_bytes(one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8),
       {"'t'", "8 bytes", "F32 [3] needs 12"}},
      {"file cut short", file_bytes(one(good), 7), {"'t'", "ends at byte 8", "holds 7"}},
      {"offsets beyond the file", file_bytes(one(R"("dtype":"U8","shape":[2],"data_offsets":[1000000,1000002])"), 8),
       {"'t'", "1000002", "holds 8"}},
      {"bytes after the last tensor", file_bytes(one(good), 12), {"last 4 bytes"}},
      {"hole at the start", file_bytes(one(R"("dtype":"U8","shape":[4],"data_offsets":[4,8])"), 8),
       {"bytes 0 to 4", "'t'"}},
      {"hole between",
       file_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
       {"bytes 2 to 4", "'b'"}},
      {"overlap",
       file_bytes(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
       {"'b' begins at byte 4", "'a'", "ends at 5"}},
      {"same place twice",
       file_bytes(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", 8),
       {"'b'", "'a'"}},
      {"duplicate name",
       file_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", 4),
       {"'a' twice"}},
      {"not aligned",
       file_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}} )", 5),
       {"'b' (F32)", "not a multiple of 4"}},
      {"metadata is a list", file_bytes(R"({"__metadata__":[]})", 0), {"__metadata__"}},
      {"metadata holds a number", file_bytes(R"({"__metadata__":{"a":1}})", 0), {"__metadata__", "a number"}},
      {"control characters in a name stay out of the message", file_bytes("{\"a\\u001bb\":5}", 0), {"'a?b'"}},
  };
}

TEST(Safetensors, every_broken_file_is_refused_by_name) {
  for (const BrokenFile& broken : broken_files()) {
    SCOPED_TRACE(broken.name);
    std::vector<std::string> wanted = broken.message;
    wanted.push_back("a.safetensors");
    expect_error([&] { parse(broken.bytes); }, wanted);
  }
}

TEST(Safetensors, every_cut_of_a_good_file_is_refused) {
  TemporaryFolder folder;
  std::vector<float> values(6, 1.0f);
  write_safetensors(folder.path() / "a", {{"t", Tensor(values.data(), DType::kF32, {2, 3})}});
  const std::string whole = read_file(folder.path() / "a");
  parse(whole);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(parse(whole.substr(0, size)), Error) << size;
  }
}

TEST(SafetensorsWriter, streams_pieces_and_appears_only_when_finished) {
  TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  const std::vector<uint8_t> bytes = {1, 2, 3, 4, 5};
  const auto data = std::as_bytes(std::span(bytes));
  {
    SafetensorsWriter writer(path, {{"empty", DType::kU8, {0}}, {"x", DType::kU8, {3}}, {"y", DType::kU8, {2}}});
    writer.write("x", data.subspan(0, 1));
    writer.write("x", data.subspan(1, 2));
    EXPECT_FALSE(std::filesystem::exists(path));
    expect_error([&] { writer.write("x", data.subspan(0, 1)); }, {"'x'", "turn of 'y'"});
    expect_error([&] { writer.write("y", data.subspan(0, 3)); }, {"'y'", "2 bytes", "3 given"});
    expect_error([&] { writer.finish(); }, {"'y'", "0 of 2"});
    writer.write("y", data.subspan(3, 2));
    writer.finish();
  }
  const SafetensorsFile file(path);
  EXPECT_EQ(std::memcmp(file.get("x").data(), bytes.data(), 3), 0);
  EXPECT_EQ(std::memcmp(file.get("y").data(), bytes.data() + 3, 2), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.get("x").data()) % 64, 0u);
}

TEST(SafetensorsWriter, an_abandoned_file_leaves_nothing) {
  TemporaryFolder folder;
  { SafetensorsWriter writer(folder.path() / "a", {{"x", DType::kU8, {3}}}); }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, refuses_what_the_reader_would_refuse) {
  TemporaryFolder folder;
  expect_error([&] { SafetensorsWriter(folder.path() / "a", {{"x", DType::kU8, {1}}, {"y", DType::kF32, {1}}}); },
               {"'y'", "byte 1"});
  expect_error([&] { SafetensorsWriter(folder.path() / "a", {{"x", DType::kU8, {1}}, {"x", DType::kU8, {1}}}); },
               {"'x'", "twice"});
}

}  // namespace
}  // namespace m3
